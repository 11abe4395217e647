"""Print how many lines each algorithm's dataflow has, and its file: ``python tools/algorithm_lines.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.algorithms import lines  # noqa: E402 - the checkout's own

print("algorithm             function  file")
for name in lines.NAMES:
    file = ROOT / "hpcflow" / "algorithms" / f"{name}.py"
    print(f"{name:<21} {lines.count(name):>8}  {len(file.read_text().splitlines()):>4}")
