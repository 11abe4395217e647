"""Which random numbers a sample is drawn with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from hpcflow.data.ids import sample_id
from hpcflow.reshard.layout import Layout
from hpcflow.workers.generator import Generator
from hpcflow.workers.primitive import Context, Rows


def seeds(ids: list[int], model: str = "actor", run_seed: int = 0, index=None, **options) -> list[int]:
    """What the generation engine is given for these samples, or for those of them at ``index``."""
    given: list[int] = []
    prompts = [[1]] * len(ids if index is None else index)
    generate = lambda prompts, seeds, sampling, greedy: given.extend(seeds) or "made"
    generator = Generator.__new__(Generator)
    generator.context = Context(model, 0, 0, 1, lambda mine: [mine], lambda name: contextlib.nullcontext())
    generator.config = SimpleNamespace(seed=run_seed, algorithm=SimpleNamespace(sampling=None))
    generator.engine = SimpleNamespace(version=0)
    generator.generation = SimpleNamespace(version=0, generate=generate)
    generator.layout = Layout(d=1)
    rows = Rows(torch.tensor(ids), {}, 0)
    assert generator._generate(rows, prompts, index=index, **options) == "made"
    return given


def test_samples_turns_models_runs_and_evaluations_have_random_numbers_of_their_own() -> None:
    ids = [sample_id(0, prompt, draw) for prompt in range(3) for draw in range(2)]
    found = [
        *(seeds(ids), seeds(ids, turn=1), seeds(ids, turn=2), seeds(ids, purpose="eval")),
        *(seeds(ids, model="judge"), seeds(ids, run_seed=1)),
    ]
    assert len({seed for part in found for seed in part}) == len(found) * len(ids)


def test_a_samples_random_numbers_are_those_of_its_id_alone() -> None:
    ids = [sample_id(0, prompt, 0) for prompt in range(4)]
    assert seeds(ids[::-1]) == seeds(ids)[::-1]
    assert seeds(ids[2:3]) == seeds(ids)[2:3]
    goes_on = torch.tensor([1, 3])
    assert seeds(ids, turn=1, index=goes_on) == seeds(ids, turn=1)[1::2]
