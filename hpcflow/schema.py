"""Dataclasses as a schema: nested dicts in, checked dataclasses out, each breach with a value that works."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "keys and values",
    tuple: "a list",
}
EXAMPLES = {int: 1, float: 1.0, bool: False, str: "text", list: [], dict: {}}


@dataclass(frozen=True)
class Problem:
    """One breach: the dotted ``key``, the value ``seen`` there, ``why`` it cannot be, and what ``works``."""

    key: str
    seen: Any
    why: str
    works: str

    def __str__(self) -> str:
        return f"{self.key}={show(self.seen)}: {self.why}; works: {self.works}"


Problems = Iterator[Problem]


class ConfigError(ValueError):
    """All `problems` found in a configuration, one a line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def show(value: Any) -> str:
    """A value as it is written on the command line, cut when long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return (text if len(text) <= 120 else text[:117] + "...") or '""'


def nearest(word: str, words: Any) -> str:
    """The closest of ``words`` to ``word``, else all of them."""
    near = difflib.get_close_matches(word, [str(w) for w in words], 3, 0.5)
    return ", ".join(near or sorted(str(w) for w in words)) or "none"


def option(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    """A field with its range: ``low <= value <= high``, ``value > above``, or one ``among`` some words."""
    limits = {"low": low, "above": above, "high": high, "among": among, "default": default}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


def build(kind: type, tree: Any) -> Any:
    """A dataclass of type ``kind`` from nested dicts. `ConfigError` lists every breach there is."""
    problems: list[Problem] = []
    value = _value(kind, tree, "", {}, problems)
    if problems:
        raise ConfigError(problems)
    return value


def _value(kind: Any, value: Any, key: str, limits: dict[str, Any], problems: list[Problem]) -> Any:
    """``value`` as ``kind``; breaches are added to ``problems`` (the value returned is then not used)."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):  # X | None is the only one there is
        return None if value is None else _value(args[0], value, key, limits, problems)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value, key, problems)
    if origin is dict and isinstance(value, dict):
        return {
            str(name): _value(args[1], item, f"{key}.{name}", {}, problems) for name, item in value.items()
        }
    if origin is list and isinstance(value, list):
        return [_value(args[0], item, f"{key}[{i}]", limits, problems) for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(_value(args[0], item, f"{key}[{i}]", limits, problems) for i, item in enumerate(value))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        basic = dict if dataclasses.is_dataclass(kind) else origin or kind
        why = f"must be {WORDS[basic]}" + (f" of {len(args)}" if basic is tuple else "")
        problems.append(Problem(key or "config", value, why, _works(key.partition("[")[0], basic, limits)))
    elif why := _out_of_range(value, limits):
        problems.append(Problem(key, value, why, _works(key.partition("[")[0], kind, limits)))
    return value


def _dataclass(kind: type, tree: dict, key: str, problems: list[Problem]) -> Any:
    prefix = f"{key}." if key else ""
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    before = len(problems)
    for name in tree.keys() - fields.keys():
        problems.append(
            Problem(
                f"{prefix}{name}",
                tree[name],
                "there is no such key",
                prefix + nearest(str(name), fields).replace(", ", f", {prefix}"),
            )
        )
    values = {}
    for name, f in fields.items():
        if name in tree:
            values[name] = _value(hints[name], tree[name], prefix + name, dict(f.metadata), problems)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            basic = get_origin(hints[name]) or hints[name]
            basic = dict if dataclasses.is_dataclass(basic) else basic
            problems.append(
                Problem(
                    prefix + name,
                    "(missing)",
                    f"must be given, as {WORDS[basic]}",
                    _works(prefix + name, basic, dict(f.metadata)),
                )
            )
    return kind(**values) if len(problems) == before else None


def _out_of_range(value: Any, limits: dict[str, Any]) -> str | None:
    low, above, high, among = (limits.get(name) for name in ("low", "above", "high", "among"))
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if among and value not in among:
        return f"must be one of {', '.join(among)}"
    if low is not None and value < low:
        return f"must be at least {low:g}"
    if above is not None and value <= above:
        return f"must be above {above:g}"
    if high is not None and value > high:
        return f"must be at most {high:.10g}"
    return None


def _works(key: str, kind: type, limits: dict[str, Any]) -> str:
    """A value for ``key`` that is right by itself: the default, an allowed word, a limit."""
    default = limits.get("default", dataclasses.MISSING)
    if isinstance(default, (bool, int, float, str, list, tuple)):
        example = default
    elif limits.get("among"):
        example = limits["among"][0]
    elif limits.get("low") is not None:
        example = kind(limits["low"])
    else:
        example = EXAMPLES.get(kind, [])
    return f"{key}={show(example)}"
