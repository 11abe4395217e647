"""Dotted paths, right and wrong."""

from __future__ import annotations

import sys

import pytest

from hpcflow.data.resolve import resolve


def test_found():
    from hpcflow.algorithms.ppo import ppo

    assert resolve("hpcflow.algorithms.ppo:ppo") is ppo


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hpcflow.algorithms.ppo", "is not of the form package.module:name, e.g. hpcflow.algorithms.ppo:ppo"),
        (":ppo", "is not of the form"),
        ("hpcflow.algorithms.ppo:", "is not of the form"),
        ("", "is not of the form"),
        ("hpcflow.algorithms.pop:ppo", "there is no module 'hpcflow.algorithms.pop'"),
        ("no_such_package.x:ppo", "there is no module 'no_such_package'"),
        ("hpcflow.algorithms.advantages:gea", "has no 'gea'; it has gae"),
    ],
)
def test_not_found(path, message):
    with pytest.raises(ValueError, match=message):
        resolve(path)


def test_a_missing_dependency_of_the_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        resolve("needs_more:f")
    assert "needs_more" not in sys.modules
