"""The FSDP engine at 1, 2 and 4 ranks against one Hugging Face model in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcflow.config import Optimizer
from hpcflow.data.columns import Columns, select_rows
from hpcflow.engines.fsdp import FSDPEngine
from tests.engines.batches import OPTIMIZER, Oracle, batch, policy_loss, protocol, tiny, value_loss
from tests.engines.ranks import run_ranks

UPDATES = 3
LOSSES = {"lm": policy_loss, "value": value_loss}
AGGS = {"lm": "token-mean", "value": "seq-mean-token-mean"}
MINI_BATCHES = [[0, 1, 2, 3, 4, 5], [6], [], [10, 9, 8, 7]]
"""Global rows of each optimizer step: the second leaves most ranks empty, the third all of them."""
DEAL = {
    1: [list(range(11))],
    2: [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]],
    4: [[9, 0, 4, 2], [], [1, 3, 5, 6, 7, 8], [10]],
}
"""Global rows of each rank: uneven, out of order, one rank with nothing."""
BOUND = 2e-6


def updates() -> list[Columns]:
    return [batch(11, seed) for seed in range(UPDATES)]


def dealt(rows: Columns) -> tuple[Columns, list[torch.Tensor]]:
    """This rank's rows, and its part of the mini-batches."""
    mine = DEAL[dist.get_world_size()][dist.get_rank()]
    parts = [[mine.index(row) for row in part if row in mine] for part in MINI_BATCHES]
    part = select_rows(rows, torch.tensor(mine, dtype=torch.int64))
    return part, [torch.tensor(p, dtype=torch.int64) for p in parts]


def make(head: str, optimizer: Optimizer = OPTIMIZER, **changes: Any) -> FSDPEngine:
    return FSDPEngine(tiny(), head=head, trainable=True, protocol=protocol(**changes), optimizer=optimizer)


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def score(engine: FSDPEngine, rows: Columns) -> list[list[float]]:
    return (engine.log_probs(rows) if engine.model.head == "lm" else engine.values(rows)).tolist()


@functools.cache
def oracle(head: str) -> dict[str, Any]:
    model = Oracle(tiny(), head)
    first, facts = model.column(updates()[0]), []
    for rows in updates():
        for part in filter(None, MINI_BATCHES):
            facts.append(model.step(select_rows(rows, torch.tensor(part)), LOSSES[head], AGGS[head]))
    last = model.column(updates()[0])
    return {
        "first": first,
        "facts": facts,
        "last": last,
        "weights": {k: v.detach() for k, v in model.names.items()},
    }


def train_and_tell(head: str, **changes: Any) -> dict[str, Any]:
    engine = make(head, **changes)
    rows, _ = dealt(updates()[0])
    found: dict[str, Any] = {"digest": engine.weights_digest(), "first": score(engine, rows), "facts": []}
    for rows in updates():
        part, mini_batches = dealt(rows)
        found["facts"].append(engine.train(part, mini_batches, LOSSES[head], AGGS[head]))
    rows, _ = dealt(updates()[0])
    found |= {"last": score(engine, rows), "weights": weights(engine), "version": engine.version}
    return found | {"end": engine.weights_digest(), "bytes": engine.nbytes()}


def both_heads(**changes: Any) -> dict[str, Any]:
    return {head: train_and_tell(head, **changes) for head in ("lm", "value")}


def assert_close(found: Any, expected: Any, bound: float = BOUND) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=bound, atol=bound)


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """Results of each rank, at each number of ranks; gathered weights freed after use at 2, kept
    otherwise."""
    return {
        ranks: run_ranks(ranks, functools.partial(both_heads, reshard_after_forward=ranks == 2))
        for ranks in DEAL
    }


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("ranks", DEAL)
def test_scores_losses_norms_and_weights_are_those_of_one_process(
    found: dict[int, list[dict[str, Any]]], ranks: int, head: str
) -> None:
    expected = oracle(head)
    for rank, told in enumerate(found[ranks]):
        told = told[head]
        for when in ("first", "last"):
            for row, values in zip(DEAL[ranks][rank], told[when], strict=True):
                assert_close(values, expected[when][row].tolist(), 1e-5)
        facts = [fact for update in told["facts"] for fact in update]
        assert facts[2::4] == [
            {"tokens": 0.0, "rows": 0.0, "lr": pytest.approx(fact["lr"]), "loss": 0.0, "grad_norm": 0.0}
            for fact in facts[3::4]
        ]
        del facts[2::4]
        for fact, wanted in zip(facts, expected["facts"], strict=True):
            assert fact == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert told["weights"].keys() == expected["weights"].keys()
        for name, tensor in told["weights"].items():
            assert_close(tensor, expected["weights"][name], 1e-5)
        assert told["version"] == UPDATES


def test_ranks_agree_and_the_start_is_the_same_everywhere(found: dict[int, list[dict[str, Any]]]) -> None:
    for head in ("lm", "value"):
        assert len({told[head]["digest"] for told in sum(found.values(), [])}) == 1
        for ranks in DEAL:
            assert len({told[head]["end"] for told in found[ranks]}) == 1
            assert all(told[head]["facts"] == found[ranks][0][head]["facts"] for told in found[ranks])
            assert found[ranks][0][head]["end"] != found[ranks][0][head]["digest"]


def test_shards_and_moments_are_split_over_ranks(found: dict[int, list[dict[str, Any]]]) -> None:
    whole = found[1][0]["lm"]["bytes"]
    assert whole["optimizer"] == 2 * whole["parameters"]
    for ranks in DEAL:
        assert sum(told["lm"]["bytes"]["parameters"] for told in found[ranks]) == whole["parameters"]


def test_the_value_head_starts_at_zero(found: dict[int, list[dict[str, Any]]]) -> None:
    values = [v for told in found[2] for row in told["value"]["first"] for v in row]
    assert values and set(values) == {0.0}


def with_micro_batches(sizes: list[tuple[int, int]]) -> list[tuple[dict[str, torch.Tensor], list[int]]]:
    results = []
    for rows, tokens in sizes:
        engine, calls = make("lm", micro_batch=rows, micro_batch_tokens=tokens), [0]
        engine.model.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        part, mini_batches = dealt(updates()[0])
        engine.train(part, mini_batches, policy_loss)
        results.append((weights(engine), calls[0]))
    return results


def test_micro_batches_change_only_rounding_and_are_as_many_on_every_rank() -> None:
    sizes = [(64, 0), (1, 0), (3, 0), (64, 9)]
    results = run_ranks(2, with_micro_batches, sizes)
    for (tensors, calls), (other, other_calls), size in zip(*results, sizes, strict=True):
        assert calls == other_calls
        if size == (64, 0):
            assert calls == 3  # one each for the mini-batches that have rows
        if size == (1, 0):
            assert calls == 6 + 1 + 3  # rows of the fullest rank in each
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other[name])
            assert_close(tensor, results[0][0][0][name])


def one_row_owner() -> tuple[str, list[dict[str, float]]]:
    """All rows on rank 0; no clipping, whose factor would depend on the order of sums."""
    engine = make("lm", Optimizer(lr=1e-2, eps=1e-4, clip_norm=1e9))
    rows = batch(6) if dist.get_rank() == 0 else select_rows(batch(6), torch.zeros(0, dtype=torch.int64))
    part = torch.arange(len(rows["prompt_ids"]))
    facts = engine.train(rows, [part, part], policy_loss)
    return engine.weights_digest(), facts


def test_a_rank_without_rows_adds_exactly_nothing() -> None:
    alone, shared = run_ranks(1, one_row_owner), run_ranks(2, one_row_owner)
    assert shared[0][0] == shared[1][0] == alone[0][0]
    assert shared[1][1][1]["loss"] == alone[0][1][1]["loss"]


def update(engine: FSDPEngine, seed: int) -> list[dict[str, float]]:
    return engine.train(*dealt(batch(11, seed)), policy_loss)


def save_and_go_on(folder: Path) -> dict[str, Any]:
    engine = make("lm")
    update(engine, 0)
    engine.save(folder)
    saved = engine.weights_digest()
    update(engine, 1)
    return {"saved": saved, "end": engine.weights_digest(), "weights": weights(engine)}


def load_and_go_on(folder: Path) -> dict[str, Any]:
    engine = make("lm")
    score(engine, dealt(batch(11))[0])  # what was gathered for this must not be used after loading
    engine.load(folder)
    loaded, version = engine.weights_digest(), engine.version
    facts = update(engine, 1)
    return {
        "loaded": loaded,
        "versions": (version, engine.version),
        "lr": facts[0]["lr"],
        "end": engine.weights_digest(),
        "weights": weights(engine),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint") / "actor"
    return folder, run_ranks(2, save_and_go_on, folder)[0]


@pytest.mark.parametrize("ranks", DEAL)
def test_training_goes_on_from_a_checkpoint_of_two_ranks(
    saved: tuple[Path, dict[str, Any]], ranks: int
) -> None:
    folder, before = saved
    for after in run_ranks(ranks, load_and_go_on, folder):
        assert after["loaded"] == before["saved"]
        assert after["versions"] == (1, 2)
        assert after["lr"] == pytest.approx(OPTIMIZER.lr)  # warm-up of 3 steps was over
        if ranks == 2:
            assert after["end"] == before["end"]
        for name, tensor in after["weights"].items():
            assert_close(tensor, before["weights"][name])


def load_as(folder: Path, **changes: Any) -> str:
    engine = FSDPEngine(tiny(**changes), head="lm", trainable=True, protocol=protocol(), optimizer=OPTIMIZER)
    with pytest.raises(ValueError) as caught:
        engine.load(folder)
    return str(caught.value)


def test_what_cannot_be_loaded_is_named(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = saved
    assert "holds no checkpoint" in run_ranks(1, load_as, tmp_path)[0]
    assert (
        "shape [64, 32], this model [96, 32]"
        in run_ranks(1, functools.partial(load_as, vocab_size=96), folder)[0]
    )
    assert "has no model/model.layers.2" in run_ranks(1, functools.partial(load_as, layers=3), folder)[0]
    (tmp_path / "00000-of-00002.safetensors").write_bytes(
        (folder / "00000-of-00002.safetensors").read_bytes()
    )
    assert "00001-of-00002.safetensors" in run_ranks(1, load_as, tmp_path)[0]


def poisoned(log_probs: torch.Tensor, rows: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, _ = policy_loss(log_probs, rows)
    return torch.where(rows["old"].values > 1e8, torch.nan, loss), {}


def train_on_nan() -> tuple[str, bool, bool]:
    engine = make("lm")
    part, mini_batches = dealt(batch(11))
    if dist.get_rank() == 1:
        part["old"].values[-1] = 1e9
        part["loss_mask"].values[-1] = True
    reference = make("lm")
    reference.train(part, mini_batches[:3], poisoned)
    with pytest.raises(FloatingPointError) as caught:
        engine.train(part, mini_batches, poisoned)
    untouched = engine.weights_digest() == reference.weights_digest()
    again = make("lm")
    part["loss_mask"].values[-1] = False  # a token that does not count may be NaN
    facts = again.train(part, mini_batches, poisoned)
    return str(caught.value), untouched, all(fact["loss"] == fact["loss"] for fact in facts)


def test_nan_stops_all_ranks_before_the_step() -> None:
    for message, untouched, masked_is_fine in run_ranks(2, train_on_nan):
        assert message.startswith("mini-batch 3 of update 0: loss is nan; no step was taken")
        assert untouched and masked_is_fine


def steep(log_probs: torch.Tensor, rows: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Finite, but its slope at 0 is not."""
    return (log_probs * 0).sqrt(), {}


def train_on_infinite_slope() -> str:
    engine = make("lm")
    part, mini_batches = dealt(batch(11))
    before = engine.weights_digest()
    with pytest.raises(FloatingPointError) as caught:
        engine.train(part, mini_batches, steep)
    assert engine.weights_digest() == before and engine.version == 0
    return str(caught.value)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    message = "mini-batch 0 of update 0: grad_norm is nan; no step was taken"
    said = run_ranks(2, train_on_infinite_slope)
    assert len(said) == 2 and all(each.startswith(message) for each in said)


def against_reference(dtype: str) -> dict[str, Any]:
    rows, mini_batches = dealt(batch(11))
    reference = FSDPEngine(tiny(), head="lm", trainable=False, protocol=protocol(dtype=dtype))
    actor = make("lm", dtype=dtype)
    first = torch.equal(actor.log_probs(rows).values, reference.log_probs(rows).values)
    facts = actor.train(rows, mini_batches, policy_loss)
    moved = not torch.equal(actor.log_probs(rows).values, reference.log_probs(rows).values)
    masters = {p.dtype for p in actor.parameters.values()}
    return {"first": first, "moved": moved or not len(rows["old"]), "facts": facts, "masters": masters}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untrained_actor_has_exactly_the_log_probs_of_its_reference(dtype: str) -> None:
    for told in run_ranks(2, against_reference, dtype):
        assert told["first"] and told["moved"]
        assert told["masters"] == {torch.float32}
        expected = oracle("lm")["facts"][0]
        assert told["facts"][0]["loss"] == pytest.approx(expected["loss"], rel=0.02)
        assert told["facts"][0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def edges() -> dict[str, Any]:
    nothing = select_rows(batch(3), torch.zeros(0, dtype=torch.int64))
    engine = make("lm")
    before = engine.weights_digest()
    facts = engine.train(nothing, [torch.zeros(0, dtype=torch.int64)], policy_loss)
    rows = batch(3)
    del rows["loss_mask"]
    everything = engine.train(rows, [torch.arange(3)], policy_loss)
    tempered = FSDPEngine(tiny(), head="lm", trainable=False, protocol=protocol(), temperature=2.0)
    return {
        "empty": engine.log_probs(nothing).tolist(),
        "skipped": facts[0]["lr"] and engine.weights_digest() != before,
        "tokens": everything[0]["tokens"],
        "tempered": tempered.log_probs(rows).tolist(),
    }


def test_edges() -> None:
    told = run_ranks(1, edges)[0]
    rows = batch(3)
    assert told["empty"] == []
    assert told["tokens"] == len(rows["response_ids"].values)
    model = Oracle(tiny(), "lm").hf
    for row, found_row in enumerate(told["tempered"]):
        prompt, response = (rows[name].split()[row] for name in ("prompt_ids", "response_ids"))
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        wanted = (logits / 2).log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert_close(found_row, wanted.tolist(), 1e-5)


def construct(path: str, head: str) -> str:
    with pytest.raises(ValueError) as caught:
        FSDPEngine(path, head=head, trainable=False, protocol=protocol())
    return str(caught.value)


def test_a_folder_that_does_not_fit_the_head_is_refused() -> None:
    assert "has no weights for score.weight" in run_ranks(1, construct, tiny(), "score")[0]


@pytest.mark.parametrize("release", [True, False])
def test_a_batch_wider_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch, release: bool) -> None:
    monkeypatch.setattr("hpcflow.engines.token_model.LOGIT_CHUNK", 64 * 3)  # forked ranks inherit it
    train = functools.partial(train_and_tell, "lm", micro_batch=64, reshard_after_forward=release)
    for told in run_ranks(2, train):
        for name, tensor in told["weights"].items():
            assert_close(tensor, oracle("lm")["weights"][name], 1e-5)


def score_rows(path: str) -> torch.Tensor:
    from hpcflow.engines.score_model import ScoreModel

    rows, _ = dealt(batch(11))
    return ScoreModel(path, protocol=protocol()).scores(rows)


def test_scores_are_the_classifiers_logits_at_the_last_token() -> None:
    from transformers import AutoModelForSequenceClassification

    path, rows = tiny(head="score"), batch(11)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    parts = zip(rows["prompt_ids"].split(), rows["response_ids"].split(), strict=True)
    expected = [float(model(input_ids=torch.cat(part)[None]).logits.detach()) for part in parts]
    for ranks in (1, 4):
        for rank, scores in enumerate(run_ranks(ranks, score_rows, path)):
            assert scores.dtype == torch.float32
            assert_close(scores, torch.tensor([expected[row] for row in DEAL[ranks][rank]]), 1e-5)
