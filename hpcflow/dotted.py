"""What a dotted path names, read from the source without importing it: a check must not pay for torch."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcflow.data.resolve import is_module, resolve


@dataclass(frozen=True)
class Signature:
    """Names of a function's parameters: those it takes by keyword, those it cannot do without, in order; how
    many it takes by position."""

    accepted: list[str]
    required: list[str]
    any_keyword: bool
    by_position: float


def signature(path: str) -> Signature | None:
    """The parameters of the function at ``"package.module:name"``; None for another callable.

    ValueError, as `hpcflow.data.resolve.resolve`, when there is no such function. A module is imported only
    if the name is not defined in its source; ValueError when that fails.
    """
    definition = definition_of(path)
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _from_source(definition.args)
    if definition is not None:
        return None
    try:
        found = resolve(path)
    except ValueError:
        raise
    except Exception as error:  # of the user's module
        raise ValueError(f"its module cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{path!r} is {type(found).__name__}, not a function")
    return _from_object(found) if inspect.isfunction(found) else None


def columns_read(path: str) -> tuple[str, ...] | None:
    """The columns without which the function cannot do (`hpcflow.data.needs.reads`); None if it does not say
    so in a form that the source shows."""
    definition = definition_of(path)
    for mark in getattr(definition, "decorator_list", []):
        if isinstance(mark, ast.Call) and getattr(mark.func, "id", getattr(mark.func, "attr", "")) == "reads":
            try:
                names = [ast.literal_eval(a.value if isinstance(a, ast.Starred) else a) for a in mark.args]
            except ValueError:
                return None
            return tuple(name for each in names for name in ([each] if isinstance(each, str) else each))
    return None


def undecorated(path: str) -> bool:
    """Whether the source defines a function of that name and says nothing more about it."""
    definition = definition_of(path)
    return isinstance(definition, ast.FunctionDef) and not definition.decorator_list


def models_called(path: str) -> list[str]:
    """The models that a dataflow function calls: the attributes of its first parameter that it names, in
    order."""
    found = {(node.lineno, node.col_offset): node.attr for node in _models(definition_of(path))}
    return list(dict.fromkeys(name for _, name in sorted(found.items())))


def methods_called(path: str) -> tuple[list[tuple[str, str]], bool]:
    """(model, method) of the calls ``m.model.method(...)`` of a dataflow function, in order; and whether these
    are all: neither ``m`` nor a model is handed on."""
    definition = definition_of(path)
    models = _models(definition)
    if not models:
        return [], False
    nodes = list(ast.walk(definition))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    uses = sum(isinstance(node, ast.Name) and node.id == models[0].value.id for node in nodes)
    taken = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in models]
    found = {
        (node.lineno, node.col_offset): (node.value.attr, node.attr) for node in taken if node in functions
    }
    return [call for _, call in sorted(found.items())], uses == len(models) == len(taken)


def _models(definition: ast.stmt | None) -> list[ast.Attribute]:
    """Where a dataflow function takes an attribute of its first parameter."""
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return []
    first = definition.args.args[0].arg
    return [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == first
    ]


def import_failures(modules: Iterable[str]) -> dict[str, str]:
    """Import the modules in another process, where whatever else they start or load does no harm. For each that
    raised: the exception, and where."""
    names = sorted(set(modules))
    if not names:
        return {}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", IMPORT, *names], stdout=subprocess.PIPE, env=env, text=True)
    if child.returncode:
        return dict.fromkeys(names, f"the interpreter ended with code {child.returncode}")
    return json.loads(child.stdout.splitlines()[-1])


IMPORT = """
import importlib, json, os, sys, traceback
failures = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        failures[name] = f"{type(error).__name__}: {error}{place}"
print()  # after what an import may have written
print(json.dumps(failures), flush=True)
os._exit(0)
"""
"""What `import_failures` runs. It leaves without the exit handlers of what it imported."""


def near(path: str, otherwise: str) -> str:
    """The path of what the same module defines under the nearest name; ``otherwise`` where there is none."""
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    names = [known for known in _definitions(module) if not known.startswith("_")]
    return (
        f"{module}:{(difflib.get_close_matches(name, names, 1) or sorted(names))[0]}" if names else otherwise
    )


def definition_of(path: str) -> ast.stmt | None:
    """What the source of ``module:name`` defines under that name; None where it does not show it."""
    module, _, name = path.partition(":")
    return _definitions(module).get(name)


def _definitions(module: str) -> dict[str, ast.stmt]:
    """Functions and classes in the source of ``module``; none when it is not found, or not Python source."""
    try:
        spec = importlib.util.find_spec(module) if is_module(module) else None
    except (ImportError, ValueError):
        return {}
    if spec is None or not (spec.origin or "").endswith(".py"):
        return {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except SyntaxError:
        return {}
    return {statement.name: statement for statement in body if isinstance(statement, kinds)}


def _from_source(args: ast.arguments) -> Signature:
    positional = [a.arg for a in args.posonlyargs + args.args]
    keyword = [a.arg for a in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [name for name, default in zip(keyword, args.kw_defaults, strict=True) if default is None]
    by_position = math.inf if args.vararg else len(positional)
    return Signature([a.arg for a in args.args] + keyword, required, args.kwarg is not None, by_position)


def _from_object(function: object) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    return Signature(
        [p.name for p in named if p.kind != p.POSITIONAL_ONLY],
        [p.name for p in named if p.default is p.empty],
        any(p.kind == p.VAR_KEYWORD for p in parameters),
        math.inf if any(p.kind == p.VAR_POSITIONAL for p in parameters) else len(positional),
    )
