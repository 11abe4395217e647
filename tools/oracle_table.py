"""Print hpcflow beside verl, OpenRLHF and TRL: ``python tools/oracle_table.py [part of a case's name]``.

One line a case: the library with its version, the case, the largest absolute difference of each value and
gradient; then the cases that hpcflow does not compute alike, with the reason. Exit code 1 if a difference
exceeds 1e-6 (relative to values above 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.algorithms import oracles, peers  # noqa: E402 - the checkout's own

BOUND = 1e-6


def main(part: str) -> int:
    versions, worst, compared = oracles.versions(), 0.0, 0
    for name in sorted(n for n in peers.CASES if part in n):
        library, _, case = name.partition("/")
        other, found = peers.expected(name), peers.differences(name)
        text = "  ".join(f"{key or 'value'} {difference:.1e}" for key, difference in found.items())
        note = f"  ({peers.ADJUSTED[name][1]})" if name in peers.ADJUSTED else ""
        print(f"{library.removesuffix('_ppo'):>8} {versions[library]:<7} {case:<48} {text}{note}")
        worst = max([worst, *(d / max(1.0, float(other[key].abs().max())) for key, d in found.items())])
        compared += 1
    left = [name for name in oracles.names() if part in name and name not in peers.CASES]
    print(f"\nnot computed alike ({len(left)}):")
    for name in left:
        print(f"{name:<58} {peers.left_out(name)}")
    print(f"\n{compared} cases compared, largest difference {worst:.1e} (bound {BOUND:g})")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
