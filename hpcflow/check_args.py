"""Values of the arguments that a config gives to functions (``*.args``), judged by the functions' source."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

from hpcflow import dotted
from hpcflow.config import Call
from hpcflow.schema import EXAMPLES, WORDS, Problem, Problems, nearest, show

TYPES = {"float": float, "int": int, "bool": bool, "str": str}


@dataclass(frozen=True)
class Limits:
    """``low <= value <= high``, ``value > above``, or one ``among`` some words."""

    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    among: tuple[str, ...] = ()

    def breach(self, value: Any) -> str | None:
        """Why ``value``, of the right type, cannot be."""
        if isinstance(value, str):
            return (
                f"must be one of {', '.join(self.among)}" if self.among and value not in self.among else None
            )
        if value < self.low:
            return f"must be at least {self.low:g}"
        if value <= self.above:
            return f"must be above {self.above:g}"
        return f"must be at most {self.high:g}" if value > self.high else None


PART = Limits(low=0, high=1)
POSITIVE = Limits(above=0)
NOT_NEGATIVE = Limits(low=0)
COUNT = Limits(low=1)
OWN = {
    "gamma": PART,
    "lam": PART,
    "clip": POSITIVE,
    "clip_high": POSITIVE,
    "dual_clip": Limits(above=1),
    "importance_cap": POSITIVE,
    "eps": POSITIVE,
    "maximum": POSITIVE,
    "kl_coef": NOT_NEGATIVE,
    "overlong_penalty": NOT_NEGATIVE,
    "lr": NOT_NEGATIVE,
    "length": COUNT,
    "max_tokens": COUNT,
    "rounds": COUNT,
    "uses": COUNT,
    "kl": Limits(among=("k1", "k2", "k3", "k1+", "k2+", "k3+")),
    "scale": Limits(among=("group", "batch", "none")),
}
"""Of arguments of hpcflow's own functions, by name: it means the same in all of them."""


@dataclass(frozen=True)
class Parameter:
    """What the source says: the ``type`` (None: it does not say), whether None and infinity are allowed, the
    default where it is a literal."""

    type: type | None
    nullable: bool
    infinite: bool
    default: Any


def value_problems(key: str, call: Call) -> Problems:
    """Arguments whose value the function cannot mean: of another type than its annotation or its default, not
    finite, or out of the range of an argument of hpcflow's own."""
    for name, parameter in _parameters(call.function).items():
        if name in call.args:
            value = call.args[name]
            limits = OWN.get(name, Limits()) if call.function.startswith("hpcflow.") else Limits()
            if why := _breach(value, parameter, limits):
                place = f"{key}.args.{name}"
                works = f"{place}={_example(value, parameter, limits)}"
                if parameter.nullable:
                    works += ", or null"
                yield Problem(place, value, why, works)


def _breach(value: Any, parameter: Parameter, limits: Limits) -> str | None:
    kind = parameter.type
    if value is None:
        return None if parameter.nullable or kind is None else f"must be {WORDS[kind]}"
    if isinstance(value, float) and (math.isnan(value) or math.isinf(value) and not parameter.infinite):
        return "must be a finite number"
    if kind is None:
        return None
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"must be {WORDS[kind]}"
    return limits.breach(value)


def _example(value: Any, parameter: Parameter, limits: Limits) -> str:
    """A value that is right: the default, or one within the limits."""
    if limits.among and isinstance(value, str):
        return nearest(value, limits.among).partition(",")[0]
    if parameter.default is not None:
        return show(parameter.default)
    if limits.among:
        return limits.among[0]
    example = EXAMPLES[parameter.type or float]
    return show(example + 1 if type(example) in (int, float) and limits.breach(example) else example)


def _parameters(path: str) -> dict[str, Parameter]:
    """The parameters of a function as its source defines them; none where the source does not show it."""
    definition = dotted.definition_of(path)
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    args = definition.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)[-len(args.args) :]
    pairs = [*zip(args.args, defaults, strict=False), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return {arg.arg: _parameter(arg.annotation, default) for arg, default in pairs}


def _parameter(annotation: ast.expr | None, default: ast.expr | None) -> Parameter:
    try:
        literal = ast.literal_eval(default) if default is not None else None
    except ValueError:
        literal = None
    none_by_default = isinstance(default, ast.Constant) and default.value is None
    infinite = default is not None and ast.unparse(default) in ("math.inf", "inf", "float('inf')")
    if annotation is not None:
        names = _names(annotation)
        nullable = none_by_default or "None" in names
        named = names - {"None"}
        kind = TYPES.get(named.pop()) if len(named) == 1 else None
        return Parameter(kind, nullable, infinite, literal)
    kind = {int: float}.get(type(literal), type(literal))  # an unannotated 1 may well be given as 0.5
    return Parameter(kind if kind in TYPES.values() else None, none_by_default, infinite, literal)


def _names(annotation: ast.expr) -> set[str]:
    """The alternatives of an annotation: {"float", "None"} of ``float | None`` and ``Optional[float]``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return {annotation.value}
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _names(annotation.left) | _names(annotation.right)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Optional"):
        return _names(annotation.slice) | {"None"}
    return {ast.unparse(annotation)}
