"""Dotted paths: how a config names a function that a lower layer must not know."""

from __future__ import annotations

import difflib
import importlib
from typing import Any


def resolve(path: str) -> Any:
    """The object named by ``"package.module:name"``. ValueError names what was not found and what is near."""
    module_name, colon, name = path.partition(":")
    if not colon or not is_module(module_name) or not name:
        raise ValueError(f"{path!r} is not of the form package.module:name, e.g. hpcflow.algorithms.ppo:ppo")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(error.name or "\0"):
            raise
        raise ValueError(f"{path!r}: there is no module {error.name!r}; is it on PYTHONPATH?") from error
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(name, names, 3) or sorted(names)[:8]
        raise ValueError(f"{path!r}: module {module_name} has no {name!r}; it has {', '.join(near)}")
    return getattr(module, name)


def is_module(name: str) -> bool:
    """Whether ``name`` can be that of a module: words joined by dots."""
    return all(word.isidentifier() for word in name.split("."))
