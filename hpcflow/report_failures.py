"""What failed in a run, and what was run again because of it; steps not taken; rewards that failed."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from hpcflow import store
from hpcflow.data.columns import texts
from hpcflow.run_folder import in_one_line

Entry = dict[str, Any]
SHOWN = 10
"""Failures, and kinds of errors of rewards, that are listed: the last ones, the most frequent ones."""
WIDTH, INDENT = 110, " " * 4


def lines(run: store.Run, history: list[Entry]) -> Iterable[str]:
    """Lines of a report; none where nothing failed."""
    yield from _failures(run.failures)
    yield from _skipped(history)
    yield from _rewards(run, history)


def _failures(entries: list[Entry]) -> Iterable[str]:
    found = list(_paired(entries))
    if not found:
        return
    inside = sum(failed["event"] == "in_world" for failed, _ in found)
    others = len(found) - inside
    yield f"failures   {len(found)}: {inside} made good inside the launch, {others} by another one"
    if len(found) > SHOWN:
        yield f"  ({len(found) - SHOWN} earlier ones are in failures.jsonl)"
    for failed, resumed in found[-SHOWN:]:
        what = in_one_line(failed.get("error", "")) or "the launch ended without a word"
        when = f"  {datetime.fromtimestamp(failed['time']):%Y-%m-%d %H:%M:%S}  "
        yield from _wrapped(what, when, lines=2)
        yield from _wrapped(_then(failed, resumed), INDENT, lines=5)


def _paired(entries: list[Entry]) -> Iterable[tuple[Entry, Entry | None]]:
    """Each failure with the decision that was acted on after it, if any.

    A launch that ended without a word has a decision only; where that has nothing to run again, nothing
    failed.
    """
    open_failure: Entry | None = None
    for entry in entries:
        if entry["event"] == "resume":
            decision = entry["decision"]
            if open_failure or decision["node"] or decision["replayed"]:
                yield open_failure or entry, entry
            open_failure = None
            continue
        if open_failure:
            yield open_failure, None
            open_failure = None
        if entry["event"] == "in_world":
            yield entry, None
        else:
            open_failure = entry
    if open_failure:
        yield open_failure, None


def _then(failed: Entry, resumed: Entry | None) -> str:
    """Where it went on, and what was lost."""
    if failed["event"] == "in_world":
        where = f"iteration {failed['iteration'] + 1}, {failed['node'].removesuffix('#1')}"
        return f"in the living world: {where}: only the samples of what failed were made again"
    decision = (resumed or failed).get("decision")
    how = "relaunched" if resumed else "not relaunched yet"
    if decision is None:
        return f"{how}; no iteration was in progress"
    text = f"{how}, again from iteration {decision['iteration'] + 1}"
    text += f", {decision['node']}" if decision["node"] else ""
    lost = [] if failed.get("seconds") is None else [f"stopped {failed['seconds']:.1f} s into that iteration"]
    lost += [f"{len(decision['kept'])} of its nodes kept"] if decision["kept"] else []
    text += f" ({', '.join(lost)})" if lost else ""
    if decision["replayed"]:
        first, last = (number + 1 for number in decision["replayed"])
        text += f"; {f'iteration {first}' if first == last else f'iterations {first} to {last}'} replayed"
    return text


def _skipped(history: list[Entry]) -> Iterable[str]:
    """Updates of which mini-batches took no step (protocol.training.bad_step=skip), by model."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for facts in history:
        for name, value in facts["metrics"].items():
            if name.endswith("/skipped"):
                shares[name.removesuffix("/skipped")].append(value)
    for model, of_updates in shares.items():
        hit = sum(share > 0 for share in of_updates)
        if hit:
            part = 100 * sum(of_updates) / len(of_updates)
            yield f"skipped    {model}: {part:.3g} % of its mini-batches took no step, in {hit} iterations"


def _rewards(run: store.Run, history: list[Entry]) -> Iterable[str]:
    known = [facts for facts in history if "reward_error_rate" in facts["metrics"]]
    total = sum(facts["samples"] for facts in known)
    again = sum(round(facts["metrics"].get("reward_retry_rate", 0.0) * facts["samples"]) for facts in known)
    failed = sum(round(facts["metrics"]["reward_error_rate"] * facts["samples"]) for facts in known)
    if failed or again:
        yield f"rewards    of {total} samples {failed} failed for good, {again} were asked for more than once"
    errors: Counter[str] = Counter()
    for facts in known:
        if facts["metrics"]["reward_error_rate"] > 0:
            columns = run.iteration(facts["iteration"]).columns
            errors.update(filter(None, texts(columns["reward_error"]) if "reward_error" in columns else ()))
    for error, count in errors.most_common(SHOWN):
        yield from _wrapped(error, f"  {count:>7}  ", lines=1)
    if len(errors) > SHOWN:
        yield f"  (and {len(errors) - SHOWN} other errors)"


def _wrapped(text: str, first: str, lines: int) -> list[str]:
    """At most so many lines, the first beginning with ``first``, the others indented."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=INDENT, max_lines=lines, placeholder="..."
    )
