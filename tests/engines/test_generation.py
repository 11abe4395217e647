"""vLLM and the plain engine against each other and against the training engine's log-probs."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hpcflow.config import GenerationProtocol, Optimizer, Sampling
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.models import resolve_model
from hpcflow.engines import generation_engine, isolation, training_engine
from hpcflow.engines.fsdp import FSDPEngine
from hpcflow.engines.generation import Generated
from hpcflow.engines.plain import PlainEngine, _Row, truncate
from tests.engines.batches import policy_loss, protocol
from tests.engines.ranks import run_ranks

VOCAB = 100
GENERATION = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "kv_cache_gib": 0.05}
SAMPLING = Sampling(max_tokens=12)
BOUND = 1e-4


# heads of 32: vLLM on CPUs has no smaller ones; std such that neither one token nor all are likely
RECIPE = f"random:llama?vocab_size={VOCAB}&hidden_size=128&layers=2&heads=4&kv_heads=2&std=0.12&vocab=words"


@pytest.fixture(scope="module")
def path() -> str:
    return str(resolve_model(RECIPE))


@pytest.fixture(scope="module")
def vllm() -> None:
    """Imported once, before ranks are forked."""
    pytest.importorskip("vllm")
    with isolation.Sandbox({"VLLM_LOGGING_LEVEL": "ERROR"}).inside():
        from vllm import LLM

        assert LLM


def prompts(count: int = 20) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(4, VOCAB) for _ in range(draw.randrange(1, 30))] for _ in range(count)]


def seeds(count: int = 20) -> list[int]:
    return [2**63 - 1 - 7919 * index for index in range(count)]


def make(name: str, path: str, tensor_parallel: int = 1, **changes: Any) -> Any:
    """An engine with the weights in ``path``."""
    engine = generation_engine(name)(
        path,
        protocol=GenerationProtocol(**{**GENERATION, "tensor_parallel": tensor_parallel, **changes}),
        tensor_parallel=tensor_parallel,
        unique=f"hpcflow-test-{os.getppid()}",
        max_prompt_tokens=30,
        max_tokens=SAMPLING.max_tokens,
    )
    assert engine.version is None
    engine.load_weights(iter(load_file(f"{path}/model.safetensors").items()), 0)
    return engine


def told(generated: Generated) -> list[tuple[list[int], list[float], bool]]:
    columns = generated.response_ids.tolist(), generated.log_probs.tolist(), generated.truncated.tolist()
    return list(zip(*columns, strict=True))


def as_rows(asked: list[list[int]], generated: Generated) -> Columns:
    return {"prompt_ids": Ragged.from_lists(asked, torch.int64), "response_ids": generated.response_ids}


def trainer(path: str, **more: Any) -> FSDPEngine:
    settings = protocol(micro_batch=8, reshard_after_forward=True)
    return training_engine("fsdp")(path, head="lm", trainable=True, protocol=settings, **more)


def gap(generated: Generated, asked: list[list[int]], engine: FSDPEngine) -> float:
    """Largest difference to the training engine's log-probs."""
    expected = engine.log_probs(as_rows(asked, generated))
    return float((expected.values - generated.log_probs.values).abs().max())


def process_state() -> tuple:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return *states, dict(os.environ), torch.set_num_threads, torch.get_num_threads()


def one_rank(name: str, path: str, folder: Path) -> dict[str, Any]:
    """Everything that one rank can show with two engines after each other."""
    found: dict[str, Any] = {}
    random.seed(1)
    before = process_state()
    engine = make(name, path)
    everything = engine.generate(prompts(), seeds(), SAMPLING)
    found["state kept"] = process_state() == before
    found["all"] = told(everything)
    found["again"] = told(engine.generate(prompts(), seeds(), SAMPLING))
    found["reversed"] = told(engine.generate(prompts()[::-1], seeds()[::-1], SAMPLING))[::-1]
    pairs = list(zip(prompts(), seeds(), strict=True))
    found["pieces"] = []
    for begin in range(0, 20, 3):
        asked, drawn = map(list, zip(*pairs[begin : begin + 3], strict=True))
        found["pieces"] += told(engine.generate(asked, drawn, SAMPLING))
    found["other seeds"] = told(engine.generate(prompts(), seeds()[::-1], SAMPLING))
    found["greedy"] = told(engine.generate(prompts(), seeds(), SAMPLING, greedy=True))
    found["nothing"] = told(engine.generate([], [], SAMPLING))
    narrow = Sampling(max_tokens=12, temperature=0.7, top_k=5, top_p=0.8)
    found["narrow"] = told(engine.generate(prompts(), seeds(), narrow))
    tempered = engine.generate(prompts(), seeds(), Sampling(max_tokens=12, temperature=0.7))
    trained = trainer(path, optimizer=Optimizer(lr=1e-2, eps=1e-4))
    found["gap"] = gap(everything, prompts(), trained)
    found["gap at 0.7"] = gap(tempered, prompts(), trainer(path, temperature=0.7))
    word = f"t{found['greedy'][0][0][3]}"
    stopping = Sampling(max_tokens=12, stop=[word])
    token = told(engine.generate(prompts(), seeds(), Sampling(max_tokens=12), greedy=True))[0][0][2]
    by_token = Sampling(max_tokens=12, stop_token_ids=[token])
    found["stop_token"] = token
    found["stopped_by_token"] = told(engine.generate(prompts(), seeds(), by_token, greedy=True))
    short = Sampling(max_tokens=len(found["stopped_by_token"][0][0]), stop_token_ids=[token])
    found["stopped at the limit"] = told(engine.generate(prompts()[:1], seeds(1), short, greedy=True))
    found["stopped"], found["word"] = told(engine.generate(prompts(), seeds(), stopping, greedy=True)), word
    found["refused"] = []
    for asked in ([[5]] * 3 + [[6] * 60], [[5], []]):
        with pytest.raises(ValueError) as caught:
            engine.generate(asked, seeds(len(asked)), SAMPLING)
        found["refused"].append(str(caught.value))

    if name == "vllm":
        found["after failure"] = fail_and_recover(engine)

    rows = as_rows(prompts(), everything)
    rows |= {name: everything.log_probs for name in ("advantages", "old")}
    trained.train(rows, [torch.arange(20)], policy_loss)
    found["version before"] = engine.version
    engine.load_weights(trained.full_weights(), trained.version)
    found["version"] = engine.version
    updated = engine.generate(prompts(), seeds(), SAMPLING)
    found["updated"], found["updated gap"] = told(updated), gap(updated, prompts(), trained)
    engine.close()
    write_model(path, folder, {name: tensor.clone() for name, tensor in trained.full_weights()})
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group has outlived the engine
    fresh = make(name, str(folder))
    found["fresh"] = told(fresh.generate(prompts(), seeds(), SAMPLING))
    if name == "vllm":
        found["unset"] = load_partly(fresh, folder)
    fresh.close()
    found["state kept to the end"] = process_state()[3:] == before[3:]
    return found


def load_partly(engine: Any, folder: Path) -> str:
    """What an engine says whose first weights lack one."""
    engine.version = None
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(RuntimeError) as caught:
        engine.load_weights(iter(weights.items()), 0)
    return str(caught.value)


def fail_and_recover(engine: Any) -> tuple[int, list]:
    """Requests left over after an exception in the middle, and what the next call gives."""
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    calls, execute = iter(range(99)), runner.execute_model

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise ArithmeticError("injected")
        return execute(*args, **kwargs)

    runner.execute_model = failing
    with pytest.raises(ArithmeticError):
        engine.generate(prompts(), seeds(), SAMPLING)
    runner.execute_model = execute
    left = engine._llm.llm_engine.get_num_unfinished_requests()
    return left, told(engine.generate(prompts(), seeds(), SAMPLING))


def write_model(source: str, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert weights.keys() == load_file(folder / "model.safetensors").keys()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def found(path: str, vllm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("updated")
    return {name: run_ranks(1, one_rank, name, path, folder / name)[0] for name in ("vllm", "plain")}


def assert_same(left: list, right: list, bound: float) -> None:
    """Equal tokens and ends; log-probs within ``bound``."""
    assert [(tokens, cut) for tokens, _, cut in left] == [(tokens, cut) for tokens, _, cut in right]
    for (_, a, _), (_, b, _) in zip(left, right, strict=True):
        assert a == pytest.approx(b, abs=bound)


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_what_a_sample_is_depends_on_its_prompt_and_seed_alone(found: dict, name: str) -> None:
    told = found[name]
    bound = 0.0 if name == "vllm" else 1e-5
    for how in ("again", "reversed", "pieces"):
        assert_same(told[how], told["all"], bound)
    assert told["other seeds"] != told["all"]
    assert len({tuple(tokens) for tokens, _, _ in told["all"]}) == 20
    assert told["nothing"] == []


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_log_probs_are_the_training_engines(found: dict, name: str) -> None:
    for which in ("gap", "gap at 0.7", "updated gap"):
        assert found[name][which] < BOUND, which


def test_engines_agree_on_greedy_responses(found: dict) -> None:
    assert_same(found["vllm"]["greedy"], found["plain"]["greedy"], BOUND)


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_responses_end_with_the_end_token_or_are_truncated(found: dict, name: str) -> None:
    for which in ("all", "greedy"):
        for tokens, log_probs, cut in found[name][which]:
            assert len(tokens) == len(log_probs) and all(value <= 0 for value in log_probs)
            assert 2 not in tokens[:-1]
            assert cut == (tokens[-1] != 2)
            assert not cut or len(tokens) == SAMPLING.max_tokens
    assert any(not cut for _, _, cut in found[name]["all"])  # else the above would show nothing


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_stop_texts_end_a_response(found: dict, name: str) -> None:
    token = int(found[name]["word"][1:])
    for (tokens, _, cut), (free, _, free_cut) in zip(
        found[name]["stopped"], found[name]["greedy"], strict=True
    ):
        if token in free:
            assert tokens == free[: free.index(token) + 1] and not cut
        else:
            assert (tokens, cut) == (free, free_cut)
    assert len(found[name]["stopped"][0][0]) <= 4


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_stop_tokens_end_a_response(found: dict, name: str) -> None:
    """The token that ends it is part of it; only what the limit cut off is truncated."""
    token = found[name]["stop_token"]
    for (stopped, _, cut), (greedy, _, _) in zip(
        found[name]["stopped_by_token"], found[name]["greedy"], strict=True
    ):
        end = greedy.index(token) + 1 if token in greedy else len(greedy)
        assert stopped == greedy[:end]
        assert cut == (end == 12 and greedy[-1] != token and cut)
    first = found[name]["stopped_by_token"][0]
    assert len(first[0]) <= 3 and not first[2]
    ((tokens, _, cut),) = found[name]["stopped at the limit"]
    assert tokens == first[0] and not cut, "its last token is the last that the limit allows"


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_narrow_sampling_draws_from_and_reports_the_narrow_distribution(
    found: dict, path: str, name: str
) -> None:
    told = run_ranks(1, narrowed, path, found[name]["narrow"])[0]
    assert told < BOUND


def narrowed(path: str, told: list) -> float:
    """Largest difference between the log-probs of narrow samples and those of the model's distribution,
    narrowed."""
    from transformers import AutoModelForCausalLM

    model, worst = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.0
    with torch.no_grad():
        for prompt, (tokens, log_probs, _) in zip(prompts(), told, strict=True):
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            kept = truncate(logits / 0.7, 5, 0.8).log_softmax(-1)
            expected = kept.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(log_probs)).abs().max()))
    return worst


def test_truncate_by_hand() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = lambda k, p: (truncate(logits, k, p) > -math.inf).tolist()[0]  # noqa: E731
    assert kept(0, 1.0) == [True] * 4
    assert kept(2, 1.0) == [True, True, False, False]
    assert kept(0, 0.4) == [True, False, False, False]
    assert kept(0, 0.41) == [True, True, False, False]
    assert kept(2, 0.6) == [True, True, False, False]  # 0.4 / 0.7 < 0.6
    assert kept(9, 0.01) == [True, False, False, False]


def test_the_plain_engine_draws_each_token_as_often_as_it_is_likely() -> None:
    likely = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    rows = [_Row([1], seed) for seed in range(4000)]
    drawn = PlainEngine._draw(likely.log().expand(4000, 5), rows).bincount(minlength=5) / 4000
    assert ((drawn - likely).abs() <= 4 * (likely * (1 - likely) / 4000).sqrt()).all()


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_loaded_weights_are_exactly_those_of_a_fresh_engine(found: dict, name: str) -> None:
    told = found[name]
    assert (told["version before"], told["version"]) == (0, 1)
    assert told["updated"] == told["fresh"]
    assert told["updated"] != told["all"]


def test_weights_that_did_not_come_are_named(found: dict) -> None:
    said = "no weights came for model.layers.1.mlp.down_proj.weight of the generation engine"
    assert found["vllm"]["unset"] == said


def test_a_failed_generation_leaves_nothing_behind(found: dict) -> None:
    assert found["vllm"]["after failure"] == (0, found["vllm"]["all"])


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_the_process_is_left_as_it_was(found: dict, name: str) -> None:
    assert found[name]["state kept"] and found[name]["state kept to the end"]


@pytest.mark.parametrize("name", ["vllm", "plain"])
def test_prompts_that_do_not_fit_are_named(found: dict, name: str) -> None:
    long, empty = found[name]["refused"]
    assert long == (
        "prompt 3 has 60 tokens, with algorithm.sampling.max_tokens=12 more than "
        "protocol.generation.max_model_len=64; max_model_len=72 works"
    )
    assert empty == "prompt 1 is empty; a prompt needs at least one token"


def two_ranks(path: str) -> dict[str, Any]:
    """One engine over both ranks, then one on each, in the same processes."""
    rank, found = dist.get_rank(), {}
    engine = make("vllm", path, tensor_parallel=2)
    found["names"] = [file.name for file in isolation.SHARED_MEMORY.glob(f"hpcflow-test-{os.getppid()}*")]
    found["together"] = told(engine.generate(prompts(), seeds(), SAMPLING))
    with pytest.raises(RuntimeError) as caught:
        engine.generate(prompts(8 + rank), seeds(8 + rank), SAMPLING)
    found["disagreed"] = str(caught.value)
    trained = trainer(path, optimizer=Optimizer(lr=1e-2, eps=1e-4))
    found["gap"] = gap(engine.generate(prompts(), seeds(), SAMPLING), prompts(), trained)
    engine.load_weights(trained.full_weights(), 0)
    found["reloaded"] = told(engine.generate(prompts(), seeds(), SAMPLING))
    engine.close()
    engine = make("vllm", path)
    mine = slice(0, 13) if rank == 0 else slice(13, 20)
    found["apart"] = told(engine.generate(prompts()[mine], seeds()[mine], SAMPLING))
    found["one idle"] = told(engine.generate(prompts()[: 3 * rank], seeds()[: 3 * rank], SAMPLING))
    engine.close()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return found | {"sum": int(total)}


def test_one_engine_over_two_ranks_then_two_engines(found: dict, path: str) -> None:
    alone = found["vllm"]["all"]
    first, second = run_ranks(2, two_ranks, path)
    for told in (first, second):
        assert_same(told["together"], alone, BOUND)
        assert told["reloaded"] == told["together"]
        assert told["gap"] < BOUND
        assert "different prompts" in told["disagreed"]
        assert told["names"] == [] and told["sum"] == 1
    assert_same(first["apart"] + second["apart"], alone, 0.0)
    assert (first["one idle"], second["one idle"]) == ([], alone[:3])


def tied_gaps(path: str) -> list[float]:
    """Differences to the training engine's log-probs before and after an update."""
    engine, trained = make("vllm", path), trainer(path, optimizer=Optimizer(lr=1e-2, eps=1e-4))
    gaps = []
    for _ in range(2):
        made = engine.generate(prompts(), seeds(), SAMPLING)
        gaps.append(gap(made, prompts(), trained))
        rows = as_rows(prompts(), made) | dict.fromkeys(("advantages", "old"), made.log_probs)
        trained.train(rows, [torch.arange(20)], policy_loss)
        engine.load_weights(trained.full_weights(), trained.version)
    engine.close()
    return gaps


def test_a_tied_output_head_gets_new_weights_too(vllm: None) -> None:
    assert max(run_ranks(1, tied_gaps, str(resolve_model(f"{RECIPE}&tie=true")))[0]) < BOUND


def refusals(path: str) -> list[str]:
    messages = []
    for name, changes in (
        ("vllm", {"max_model_len": 41}),
        ("plain", {"max_model_len": 41}),
        ("vllm", {"tensor_parallel": 3}),
    ):
        with pytest.raises(ValueError) as caught:
            make(name, path, **changes)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        make("plain", path, tensor_parallel=2)
    return [*messages, str(caught.value)]


def test_keys_that_do_not_fit_each_other_are_named(path: str) -> None:
    lengths, same, ranks, plain = run_ranks(1, refusals, path)[0]
    assert (
        lengths
        == same
        == (
            "data.max_prompt_tokens=30 + algorithm.sampling.max_tokens=12 > "
            "protocol.generation.max_model_len=41; max_model_len=42 works"
        )
    )
    assert ranks == "protocol.generation.tensor_parallel=3 does not divide the pool's 1 ranks; 1 works"
    assert "tensor_parallel=1 or engine=vllm works" in plain


def test_unknown_engines_are_named() -> None:
    with pytest.raises(ValueError, match="protocol.generation.engine=vlm: .* valid names: plain, vllm"):
        generation_engine("vlm")
    with pytest.raises(ValueError, match="protocol.training.engine=zero: .* valid names: fsdp"):
        training_engine("zero")
    assert generation_engine("plain") is PlainEngine


def test_a_sandbox_hides_what_the_code_inside_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "outer")
    monkeypatch.setenv("GONE", "outer")
    sandbox = isolation.Sandbox({"GIVEN": "1", "KEPT": "inner"})
    outside = dict(os.environ)
    with pytest.raises(KeyError), sandbox.inside():
        assert (os.environ["GIVEN"], os.environ["KEPT"]) == ("1", "inner")
        os.environ["SET"] = "inside"
        del os.environ["GONE"]
        torch.set_num_threads = print
        random.random(), np.random.random(), torch.rand(1)
        raise KeyError
    assert dict(os.environ) == outside and torch.set_num_threads is not print
    with sandbox.inside():
        assert (os.environ["SET"], os.environ["GIVEN"], os.environ["KEPT"]) == ("inside", "1", "inner")
        assert "GONE" not in os.environ
    assert dict(os.environ) == outside
