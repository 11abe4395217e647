"""What a run did, as text and curves; for finished, running and crashed runs, also without iterations."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcflow import report_failures, store
from hpcflow.slurm import usage

Facts = dict[str, Any]
CURVES = ("reward", "kl", "response_length", "tokens_per_s")
CURVES_OF_MODELS = ("loss", "rollout_gap", "mean", "multiplier")
"""Drawn of every model that has them; mean: of a cost, which the multiplier holds below its limit."""


@dataclass(frozen=True)
class Mean:
    """A mean over ``count`` samples with its standard error; NaN where there are too few samples."""

    value: float
    error: float
    count: int

    def __str__(self) -> str:
        return _number(self.value) + ("" if math.isnan(self.error) else f" +- {_number(self.error)}")


def report(run: Path | str) -> str:
    """The report of ``run``, also written to RUN/report/report.txt, beside curves.png.

    ValueError when ``run`` is no run directory. A run that cannot be written to is reported all the same.
    """
    opened = store.open(run)
    history = opened.history()
    text = "\n".join(_lines(opened, history)) + "\n"
    folder = opened.path / "report"
    try:
        folder.mkdir(exist_ok=True)
        if history:
            draw_curves(history, folder / "curves.png")
            text += f"curves     {folder / 'curves.png'}\n"
        store.write_atomic(folder / "report.txt", text.encode())
    except OSError as error:
        text += f"curves     not written: {error}\n"
    return text


def _lines(run: store.Run, history: list[Facts]) -> Iterable[str]:
    yield f"run        {run.path}"
    yield f"state      {_state(run, history)}"
    yield from _quarters(history)
    yield from _evals(run, history)
    yield from _nodes(history)
    yield from _trace(history)
    yield from _accelerators(history)
    yield from report_failures.lines(run, history)
    yield from usage.lines(run, history)
    yield from _lineage(history)
    for name in ("algorithm", "protocol", "placement"):
        if name in run.objects:
            yield f"{name:<10} sha256 {run.objects[name].get('sha256', 'missing')}"
    for name, why in run.skipped.items():
        yield f"skipped    {name}: {why}"
    yield f"continue   {_continue(run)}"


def _state(run: store.Run, history: list[Facts]) -> str:
    done, planned, launches = run.iterations, run.config.get("iterations"), run.launches
    text = f"{len(done)} of {planned or '?'} iterations committed"
    if history:
        text += f", the last at {datetime.fromtimestamp(history[-1]['time']):%Y-%m-%d %H:%M:%S}"
    if len(launches) > 1:
        text += f", in {len(launches)} launches"
    since = launches[-1].get("time", 0) if launches else 0
    exits = [entry for entry in run.exits if _time(entry) >= _seconds(since)]
    bad = [entry for entry in exits if entry.get("signal") or entry.get("exit")]
    if bad:
        named = (f"rank {e.get('rank')} by " + _how(e) for e in bad[:8])
        text += f"; ended badly: {', '.join(named)}" + (", ..." if len(bad) > 8 else "")
    elif launches and not exits and (planned is None or len(done) < planned):
        text += "; running, or cut off without a trace"
    return text


def _how(entry: dict[str, Any]) -> str:
    return f"signal {entry['signal']}" if entry.get("signal") else f"exit code {entry.get('exit')}"


def _time(entry: dict[str, Any]) -> float:
    return _seconds(entry.get("time", math.inf))


def _seconds(time: Any) -> float:
    """Times in logs are unix seconds; ISO text is understood as well."""
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else float(time)


def _quarters(history: list[Facts]) -> Iterable[str]:
    if not history:
        return
    parts = quarters(history)
    rows = [("iterations", "reward", "KL", "length", "truncated", "tokens/s", "s/iteration")]
    for part in parts:
        rows.append(
            (
                f"{part[0]['iteration']}-{part[-1]['iteration']}",
                str(reward(part)),
                *(_number(weighted(part, name)) for name in ("kl", "response_length", "truncated_rate")),
                _number(rate(part)),
                _number(_mean([facts["wall_s"] for facts in part if "wall_s" in facts])),
            )
        )
    yield ""
    yield from _table(rows)
    if len(parts) > 1:
        yield f"first to last quarter: reward {difference(reward(parts[0]), reward(parts[-1]))}"
    yield ""


def quarters(history: list[Facts]) -> list[list[Facts]]:
    """At most four parts of nearly equal length, in order, none empty."""
    count = min(4, len(history))
    bounds = [len(history) * i // count for i in range(count + 1)] if count else []
    return [history[lo:hi] for lo, hi in zip(bounds, bounds[1:], strict=False)]


def reward(part: list[Facts]) -> Mean:
    """Mean reward over all samples of some iterations, exact, from their means, standard errors, counts."""
    count, total, squares = 0, 0.0, 0.0
    for metrics in (facts["metrics"] for facts in part):
        n = int(metrics.get("reward_samples", 0))
        if n and "reward" in metrics:
            # Sum of squared deviations from the iteration's own mean, plus that mean's square.
            within = metrics.get("reward_se", 0.0) ** 2 * n * (n - 1)
            count, total = count + n, total + n * metrics["reward"]
            squares += within + n * metrics["reward"] ** 2
    mean = total / count if count else math.nan
    if count < 2:
        return Mean(mean, math.nan, count)
    variance = max(0.0, squares - count * mean**2) / (count - 1)
    return Mean(mean, math.sqrt(variance / count), count)


def difference(before: Mean, after: Mean) -> str:
    """How far ``after`` is from ``before``, also in standard errors of the difference."""
    change = after.value - before.value
    error = math.hypot(before.error, after.error)
    text = f"{_number(before.value)} -> {_number(after.value)}, {change:+.3g}"
    return text + (f" = {change / error:+.1f} standard errors" if error > 0 else "")


def weighted(part: list[Facts], name: str) -> float:
    """A metric's mean over samples."""
    pairs = [(f["metrics"][name], f.get("samples", 1)) for f in part if name in f["metrics"]]
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else math.nan


def rate(part: list[Facts]) -> float:
    """Tokens per second of whole iterations."""
    timed = [facts for facts in part if "tokens" in facts and "wall_s" in facts]
    seconds = sum(facts["wall_s"] for facts in timed)
    return sum(facts["tokens"] for facts in timed) / seconds if seconds else math.nan


def _evals(run: store.Run, history: list[Facts]) -> Iterable[str]:
    entries = run.evals or [facts["eval"] for facts in history if "eval" in facts]
    means = {}
    for entry in entries:
        when = str(entry.get("when"))
        known = [math.nan if entry.get(key) is None else entry[key] for key in ("reward_mean", "reward_se")]
        mean = Mean(*known, int(entry.get("samples", 0)))
        # After a resume there may be several; the change since the very beginning is of interest.
        if when != "before" or when not in means:
            means[when] = mean
        passed = "".join(f", {name} {value:.3g}" for name, value in entry.items() if name.startswith("pass@"))
        yield f"held-out   {when}: reward {mean} ({mean.count} samples){passed}"
    if "before" in means and "after" in means:
        yield f"held-out   before to after: {difference(means['before'], means['after'])}"


def _nodes(history: list[Facts]) -> Iterable[str]:
    seconds: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for node in (node for facts in history for node in facts.get("nodes", ())):
        key = (node["model"], node["method"])
        seconds[key] += node["end"] - node["start"]
        moved[key] += node.get("bytes", 0)
        calls[key] += 1
    wall = sum(facts.get("wall_s", 0) for facts in history)
    if not seconds:
        return
    rows = [("node", "calls", "s/call", "share of time", "MiB moved/call")]
    for key, total in seconds.most_common():
        share = f"{100 * total / wall:.1f} %" if wall else "-"
        count = calls[key]
        volume = _number(moved[key] / count / 2**20)
        rows.append((".".join(key), str(count), _number(total / count), share, volume))
    yield ""
    yield from _table(rows)
    yield "(nodes in different pools overlap, so shares may add up to more than 100 %)"
    yield ""


def _trace(history: list[Facts]) -> Iterable[str]:
    """The calls of the last iteration, in the order in which the dataflow made them."""
    nodes = [node for node in history[-1].get("nodes", ()) if node["model"] != "recorder"] if history else []
    if not nodes:
        return
    began = min(node["start"] for node in nodes)
    rows = [(f"iteration {history[-1]['iteration']}, call by call", "begins at s", "takes s", "KiB moved")]
    for node in sorted(nodes, key=lambda node: node["call"]):
        times = (node["start"] - began, node["end"] - node["start"], node.get("bytes", 0) / 1024)
        rows.append((f"{node['model']}.{node['method']}", *map(_number, times)))
    yield from _table(rows)
    yield ""


def _accelerators(history: list[Facts]) -> Iterable[str]:
    updates = len(history)
    samples, tokens, accelerator_s = (
        sum(facts.get(name, 0) for facts in history) for name in ("samples", "tokens", "accelerator_s")
    )
    if updates:
        yield (
            f"capacity   {updates} updates; per update {_number(samples / updates)} samples, "
            f"{_number(tokens / updates)} tokens, {_number(accelerator_s / updates)} accelerator-seconds"
        )
    idle: Counter[str] = Counter()
    for facts in history:
        idle.update(facts.get("idle", {}))
    for cause, seconds in idle.most_common():
        share = f" ({100 * seconds / accelerator_s:.1f} % of all)" if accelerator_s else ""
        yield f"idle       {cause}: {_number(seconds)} accelerator-seconds{share}"


def _lineage(history: list[Facts]) -> Iterable[str]:
    versions: defaultdict[str, set[int]] = defaultdict(set)
    samples = 0
    for facts in history:
        if store.GENERATED in facts["stamps"]:
            _, model, version = facts["stamps"][store.GENERATED]
            versions[model].add(version)
            samples += int(facts.get("samples", 0))
    for model, seen in versions.items():
        yield (
            f"lineage    {samples} samples from {len(seen)} weight versions of {model} "
            f"({min(seen)} to {max(seen)})"
        )
    if history and history[-1].get("versions"):
        now = ", ".join(f"{model} {version}" for model, version in sorted(history[-1]["versions"].items()))
        yield f"versions   {now}"


def _continue(run: store.Run) -> str:
    planned = run.config.get("iterations")
    if planned is None or len(run.iterations) < planned:
        return f"hpcflow train --resume {run.path}"
    return f"hpcflow train --resume {run.path} iterations={planned + max(1, planned // 2)}"


def draw_curves(history: list[Facts], path: Path) -> None:
    """The metrics of `CURVES` and `CURVES_OF_MODELS` that were recorded, over iterations, as a PNG. OSError
    when not writable."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    recorded = {name for facts in history for name in facts["metrics"]}
    models = sorted(name for name in recorded if name.partition("/")[2] in CURVES_OF_MODELS)
    names = [name for name in CURVES if name in recorded] + models
    if not names:
        return
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        shown = [facts for facts in history if name in facts["metrics"]]
        x = [facts["iteration"] for facts in shown]
        y = [facts["metrics"][name] for facts in shown]
        axis.plot(x, y, marker="." if len(x) < 100 else None)
        if name == "reward":
            errors = [facts["metrics"].get("reward_se", 0.0) for facts in shown]
            low, high = ([v + sign * e for v, e in zip(y, errors, strict=True)] for sign in (-1, 1))
            axis.fill_between(x, low, high, alpha=0.25, label="standard error")
            axis.legend()
        axis.set_title(name)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    temp = path.with_name("curves.tmp.png")
    try:
        figure.savefig(temp, dpi=100)
        temp.replace(path)
    finally:
        pyplot.close(figure)
        temp.unlink(missing_ok=True)


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
