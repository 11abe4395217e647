"""How long the dataflow functions are."""

from __future__ import annotations

import ast
import importlib
import inspect

NAMES = (
    *("ppo", "safe_rlhf", "remax", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo"),
    "propose_judge_revise",
)
"""Modules of `hpcflow.algorithms` that hold a function of the same name."""


def count(name: str) -> int:
    """Lines of the function, its signature counted; not its docstring, comments and blank lines."""
    source = inspect.getsource(getattr(importlib.import_module(f"hpcflow.algorithms.{name}"), name))
    docstring = ast.get_docstring(ast.parse(source).body[0], clean=False)
    assert docstring, f"{name} has no docstring"
    lines = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    return len(lines) - len(docstring.splitlines())
