"""Functions of the user's own, named by a dotted path: what is wrong with one is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcflow.check import check
from hpcflow.check_models import import_problems
from hpcflow.cli import main
from hpcflow.config import compose

RUN = ["experiment=tiny", "algorithm=gspo"]
MODULE = """
from hpcflow.data.needs import reads

def mine(m, prompts):
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)

def one(m): ...

def wrong_method(m, prompts):
    batch = m.actor.generate_sequence(prompts)
    batch |= m.reward.compute_reward(batch)

def wrong_model(m, prompts):
    batch = m.actor.generate_sequences(prompts)
    batch |= m.rewrad.compute_reward(batch)

def no_reward(m, prompts):
    batch = m.actor.generate_sequences(prompts)
    batch |= m.actor.compute_advantages(batch)

def helped(m, prompts):
    batch = m.actor.generate_sequences(prompts)
    rest(m, batch)

def taken(m, prompts):
    actor = m.actor
    actor.generate_sequences(prompts)

def rest(m, batch): ...

def silent(ids, rows, gather): ...

@reads("reward", "loss_mask")
def raw(ids, rows, gather): ...
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user, in the working directory."""
    (tmp_path / "own_good.py").write_text(MODULE)
    (tmp_path / "own_raises.py").write_text('raise RuntimeError("no licence")\n')
    (tmp_path / "own_syntax.py").write_text("def mine(m, prompts)\n    pass\n")
    (tmp_path / "own_needs.py").write_text("import not_installed_here\ndef mine(m, prompts): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in check(compose([*RUN, *overrides]))]


@pytest.mark.parametrize("name", ["mine", "helped", "taken"])
def test_a_function_of_ones_own(name: str) -> None:
    """Also one that hands models on: what is called then is not known."""
    advantage = "algorithm.advantage.function=own_good:raw"
    assert problems(f"algorithm.function=own_good:{name}", advantage) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("own_good:mien", ["has no 'mien'", "works: algorithm.function=own_good:mine"]),
        ("own_good.mine", ["not of the form package.module:name", "works: algorithm.function=own_good:mine"]),
        ("own_god:mine", ["no module 'own_god'", "PYTHONPATH"]),
        ("./own_good.py:mine", ["not of the form package.module:name"]),
        ("own_raises:mine", ["cannot be imported: RuntimeError: no licence"]),
        ("own_syntax:mine", ["cannot be imported: SyntaxError", "own_syntax.py, line 1"]),
        (
            "own_needs:other",
            ["cannot be imported: ModuleNotFoundError: No module named 'not_installed_here'"],
        ),
        (
            "own_good:one",
            ["takes 1 by position, but is called with 2: m, prompts", "def one(m, prompts, ...)"],
        ),
        (
            "own_good:wrong_method",
            ["calls actor.generate_sequence, which", "works: m.actor.generate_sequences"],
        ),
        ("own_good:wrong_model", ["calls rewrad, which is no model; works: m.reward"]),
        (
            "own_good:no_reward",
            [
                "reads column reward, which reward.compute_reward makes, but own_good:no_reward does not call it"
            ],
        ),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_named(path: str, expected: list[str]) -> None:
    found = problems(f"algorithm.function={path}")
    assert found and all(text in "\n".join(found) for text in expected), found


def test_an_advantage_says_which_columns_it_reads() -> None:
    (found,) = problems("algorithm.advantage.function=own_good:silent")
    assert "own_good:silent: does not say which columns it reads; works: @hpcflow.data.needs.reads(" in found


def test_columns_come_from_what_the_dataflow_calls() -> None:
    """The reward model could make a baseline, but nobody asks it to."""
    (found,) = problems("algorithm.advantage.function=hpcflow.algorithms.advantages:remax")
    assert "reads column baseline, which reward.compute_baseline makes" in found


def test_a_run_on_this_machine_imports_what_a_check_only_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The check may run where the packages of the compute nodes are not installed."""
    (tmp_path / "own_needs.py").write_text(f"import not_installed_here\n{MODULE}")
    own = "algorithm.function=own_needs:mine"
    assert problems(own) == []
    (problem,) = import_problems(compose([*RUN, own]))
    assert "No module named 'not_installed_here'" in problem.why and "own_needs.py, line 1" in problem.why
    assert list(import_problems(compose([*RUN, "algorithm.function=own_good:mine"]))) == []
    assert main(["train", *RUN, own, f"run.dir={tmp_path / 'runs'}"]) == 2
    assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
