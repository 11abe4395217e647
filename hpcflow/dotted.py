"""What a dotted path names, read from the source without importing it: a check must not pay for torch."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path

from hpcflow.data.resolve import resolve


@dataclass(frozen=True)
class Signature:
    """Names of a function's parameters: those it takes by keyword, those it cannot do without, in order."""

    accepted: list[str]
    required: list[str]
    any_keyword: bool


def signature(path: str) -> Signature | None:
    """The parameters of the function at ``"package.module:name"``; None for another callable.

    ValueError, as `hpcflow.data.resolve.resolve`, when there is no such function. A module is imported only
    if the name is not defined in its source.
    """
    definition = _definition(path)
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _from_source(definition.args)
    if definition is not None:
        return None
    found = resolve(path)
    if not callable(found):
        raise ValueError(f"{path!r} is {type(found).__name__}, not a function")
    return _from_object(found) if inspect.isfunction(found) else None


def columns_read(path: str) -> tuple[str, ...] | None:
    """The columns without which the function cannot do (`hpcflow.data.needs.reads`); None if it does not say
    so in a form that the source shows."""
    definition = _definition(path)
    for mark in getattr(definition, "decorator_list", []):
        if isinstance(mark, ast.Call) and getattr(mark.func, "id", getattr(mark.func, "attr", "")) == "reads":
            try:
                names = [ast.literal_eval(a.value if isinstance(a, ast.Starred) else a) for a in mark.args]
            except ValueError:
                return None
            return tuple(name for each in names for name in ([each] if isinstance(each, str) else each))
    return None


def models_called(path: str) -> list[str]:
    """The models that a dataflow function calls: the attributes of its first parameter that it names, in
    order."""
    definition = _definition(path)
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return []
    first = definition.args.args[0].arg
    found = [
        (node.lineno, node.attr)
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == first
    ]
    return list(dict.fromkeys(name for _, name in sorted(found)))


def near(path: str, otherwise: str) -> str:
    """The path of what the same module defines under the nearest name; ``otherwise`` where there is none."""
    module, _, name = path.partition(":")
    names = [known for known in _definitions(module) if not known.startswith("_")]
    return (
        f"{module}:{(difflib.get_close_matches(name, names, 1) or sorted(names))[0]}" if names else otherwise
    )


def _definition(path: str) -> ast.stmt | None:
    module, _, name = path.partition(":")
    return _definitions(module).get(name)


def _definitions(module: str) -> dict[str, ast.stmt]:
    """Functions and classes in the source of ``module``; none when it is not found, or not Python source."""
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return {}
    if spec is None or not (spec.origin or "").endswith(".py"):
        return {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(Path(spec.origin).read_bytes()).body
    return {statement.name: statement for statement in body if isinstance(statement, kinds)}


def _from_source(args: ast.arguments) -> Signature:
    positional = [a.arg for a in args.posonlyargs + args.args]
    keyword = [a.arg for a in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [name for name, default in zip(keyword, args.kw_defaults) if default is None]
    return Signature([a.arg for a in args.args] + keyword, required, args.kwarg is not None)


def _from_object(function: object) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    return Signature(
        [p.name for p in named if p.kind != p.POSITIONAL_ONLY],
        [p.name for p in named if p.default is p.empty],
        any(p.kind == p.VAR_KEYWORD for p in parameters),
    )
