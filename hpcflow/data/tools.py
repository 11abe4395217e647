"""Tools: functions from a sample's text to a text, called as ``f(prompt, response, record, **args) -> str``
in a process of `hpcflow.data.rewards.VerifierPool`. What they return is told to a policy, or is its
prompt."""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
TERM = re.compile(r"[-+]?\d{1,9}(?:\s*[-+*]\s*\d{1,9})+")


def calculator(prompt: str, response: str, record: dict[str, Any], *, form: str = " = {} ") -> str:
    """The value of the last sum, difference or product of whole numbers in the response, or else in the
    prompt, put into ``form``; "" when there is none."""
    found = TERM.findall(response) or TERM.findall(prompt)
    return form.format(_value(ast.parse(found[-1].strip(), mode="eval").body)) if found else ""


def template(prompt: str, response: str, record: dict[str, Any], *, form: str) -> str:
    """``form`` with {prompt} and {response} filled in."""
    return form.format(prompt=prompt, response=response)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand))
    return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
