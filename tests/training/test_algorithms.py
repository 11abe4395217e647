"""Every algorithm as a whole run on MPI ranks: what is recorded is what its formulas say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from hpcflow.config import Config, load
from hpcflow.data.columns import Columns, Ragged, texts
from hpcflow.data.ids import group_key, unpack
from hpcflow.data.models import resolve_model
from hpcflow.data.prompts import permutation
from hpcflow.data.resolve import resolve
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.store.reader import Run
from tests.training.judges import lower_half
from tests.training.programs import start, train
from tests.training.test_resume import go_on
from tests.training.test_same_training import digests, equal
from tests.worlds import ROOT

GROUPS = ["algorithm.batch.draws=4", "algorithm.batch.prompts=4"]
COST = ["models.cost.function=tests.training.judges:upper_half", "models.cost.limit=0.3"]
SETTINGS: dict[str, list[str]] = {
    "ppo": [],
    "safe_rlhf": COST,
    "remax": [],
    "grpo": GROUPS,
    "dr_grpo": GROUPS,
    "rloo": GROUPS,
    "reinforce_pp": [],
    "reinforce_pp_baseline": GROUPS,
    "dapo": GROUPS,
    "gspo": GROUPS,
}
SHORT = ["iterations=2", "algorithm.sampling.max_tokens=8"]


def alone(part: torch.Tensor) -> list[torch.Tensor]:
    return [part]


def estimated(run: Run, number: int, **state: float) -> Columns:
    """The configured advantage, computed here in one piece from what is recorded."""
    config, iteration = config_of(run), run.iteration(number)
    call = config.algorithm.advantage
    function = resolve(call.function)
    rows = {name: iteration.columns[name] for name in function.needs.always}
    rows |= {name: iteration.columns[name] for name in function.needs.optional if name in iteration.columns}
    mask = iteration.columns["response_ids"]
    rows["loss_mask"] = mask.like(torch.ones(len(mask.values), dtype=torch.bool))  # as generation made it
    return function(iteration.ids, rows, alone, **call.args, **state)


def config_of(run: Run) -> Config:
    return load(run.path / "config.yaml")


def neural(folder: Path) -> str:
    """A sequence classifier over the tiny models' vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_labels=1, pad_token_id=0, max_position_embeddings=512, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_with_vllm_and_a_verifier(tmp_path: Path, algorithm: str) -> None:
    """Policy on one rank, values and rewards on another."""
    check_run(tmp_path, algorithm, ["placement=split"])


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=() if name in ("grpo", "remax", "safe_rlhf") else pytest.mark.slow)
        for name in SETTINGS
    ],
)
def test_with_vllm_and_a_reward_model(tmp_path: Path, algorithm: str) -> None:
    """A network rewards (and, in Safe RLHF, a function costs); all models on the same two ranks."""
    judge = ["models.reward.function=null", f"models.reward.path={neural(tmp_path / 'judge')}"]
    run = check_run(tmp_path, algorithm, ["placement=colocate", *judge])
    assert run.iteration(0).columns["reward"].unique().numel() > 4


def check_run(folder: Path, algorithm: str, options: list[str]) -> Run:
    """Two iterations on vLLM: recorded advantages are the formulas, every update moves the weights by one
    version, and vLLM samples from those."""
    options = [f"algorithm={algorithm}", *SHORT, *SETTINGS[algorithm], *options]
    run, _ = train(folder, [*options, "protocol.generation.engine=vllm"], vllm=True, timeout=300)
    assert run.iterations == [0, 1]
    multiplier = config_of(run).algorithm.state.initial if algorithm == "safe_rlhf" else {}
    for number in run.iterations:
        iteration = run.iteration(number)
        expected = estimated(run, number, **multiplier)
        for name in ("advantages", "returns", *(["cost_returns"] if multiplier else [])):
            assert equal(iteration.columns[name], expected[name]), name
        assert iteration.facts["versions"]["actor"] == number + 1
        assert iteration.metrics["actor/grad_norm"] > 0
        assert 0 < iteration.metrics["actor/rollout_gap"] <= iteration.metrics["actor/rollout_gap_max"] < 1e-4
        assert tuple(iteration.stamps["response_ids"])[1:] == ("actor", number)
        if multiplier:
            cost = iteration.columns["cost"].double()
            assert iteration.metrics["cost/mean"] == pytest.approx(float(cost.mean()))
            multiplier = {"multiplier": multiplier["multiplier"] + 0.5 * (float(cost.mean()) - 0.3)}
            assert iteration.metrics["actor/multiplier"] == pytest.approx(multiplier["multiplier"], abs=1e-12)
            multiplier = {"multiplier": iteration.metrics["actor/multiplier"]}
    return run


def often(prompt: str, response: str, record: dict[str, Any]) -> float:
    """No number for about every third response, decided by its text."""
    return lower_half(prompt, response, record) if sum(map(ord, response)) % 3 else float("nan")


def test_the_gap_between_the_engines_without_another_pass(tmp_path: Path) -> None:
    """Ratios to the rollout's log-probs: the first mini-batch of the update tells how far those are from the
    policy's own, which are the reference's before the first step. A generation engine in bfloat16 is far.
    Samples without a reward count here as little as in the loss."""
    options = ["algorithm.old_log_probs=rollout", "protocol.generation.dtype=bfloat16"]
    options += [
        "models.reward.function=tests.training.test_algorithms:often",
        "models.reward.max_error_rate=1",
    ]
    run, _ = train(tmp_path, ["algorithm=grpo", *SHORT, *GROUPS, *options])
    first = run.iteration(0)
    columns = first.columns
    assert equal(columns["old_log_probs"], columns["rollout_log_probs"])
    gap = columns["ref_log_probs"].values - columns["rollout_log_probs"].values
    place = torch.arange(len(first.ids)).repeat_interleave(columns["response_ids"].lengths)
    counted = columns["loss_mask"].values
    assert counted.any() and not counted.all()
    gap = gap[(place // 4 % 2 == 0) & counted].abs()  # every second prompt of four draws
    assert gap.mean() > 1e-3
    assert first.metrics["actor/rollout_gap"] == pytest.approx(float(gap.mean()), rel=1e-3)
    assert first.metrics["actor/rollout_gap_max"] == pytest.approx(float(gap.max()), rel=1e-3)
    assert 1e-3 < run.iteration(1).metrics["actor/rollout_gap"] < 0.1


def test_the_baseline_is_the_greedy_response_of_the_same_weights(tmp_path: Path) -> None:
    """Against transformers' own greedy decoding, for the first weights; later the version is that of the
    samples."""
    run, _ = train(
        tmp_path, ["algorithm=remax", *SHORT, "algorithm.batch.draws=2", "algorithm.batch.prompts=4"]
    )
    folder = resolve_model(config_of(run).models["actor"].path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(folder)
    first = run.iteration(0)
    for prompt, greedy, baseline in zip(
        first.columns["prompt_ids"].tolist(),
        first.columns["greedy_ids"].tolist(),
        first.columns["baseline"].tolist(),
        strict=True,
    ):
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=8,
        )
        assert greedy == made[0, len(prompt) :].tolist()
        text = tokenizer.decode(greedy, skip_special_tokens=True)
        assert baseline == pytest.approx(lower_half("", text, {}))
    for number in run.iterations:
        stamps = run.iteration(number).stamps
        assert tuple(stamps["greedy_ids"]) == tuple(stamps["response_ids"]) == (number, "actor", number)


def test_without_multiplier_and_pretraining_safe_rlhf_is_ppo_bitwise(tmp_path: Path) -> None:
    plain, _ = train(tmp_path / "ppo", SHORT)
    off = ["algorithm.state.initial.multiplier=0", "algorithm.state.args.lr=0", "algorithm.pretrain.coef=0"]
    safe, _ = train(tmp_path / "safe", ["algorithm=safe_rlhf", *SHORT, *COST, *off])
    for name in ("actor", "critic"):
        assert digests(safe)[name] == digests(plain)[name]
    for number in plain.iterations:
        for name, column in plain.iteration(number).columns.items():
            assert equal(column, safe.iteration(number).columns[name]), name


def test_the_multiplier_goes_on_exactly(tmp_path: Path) -> None:
    """3 iterations against 2 + resume + 1; it rises, since the cost of about 0.5 exceeds the limit."""
    base = ["algorithm=safe_rlhf", "algorithm.sampling.max_tokens=8", *COST]
    whole, _ = train(tmp_path / "whole", [*base, "iterations=3"])
    parts, _ = train(tmp_path / "parts", [*base, "iterations=2"])
    go_on(parts.path, ["iterations=3"])
    parts = Run(parts.path)
    numbers = [whole.iteration(i).metrics["actor/multiplier"] for i in range(3)]
    assert numbers == [parts.iteration(i).metrics["actor/multiplier"] for i in range(3)]
    assert 1 < numbers[0] < numbers[1] < numbers[2]
    assert digests(parts) == digests(whole)


def first_word(prompt: str, response: str, record: dict[str, Any]) -> float:
    """1 for responses whose first word is of the lower half: draws of a prompt often agree."""
    return float(lower_half("", " ".join(response.split()[:1]), {}))


def test_dynamic_sampling_replaces_what_teaches_nothing(tmp_path: Path) -> None:
    """Prompts in data order, those with equal rewards left out; the same batch on one rank as on two."""
    base = [
        "algorithm=dapo",
        "algorithm.batch.draws=2",
        "algorithm.batch.prompts=4",
        *SHORT,
        "models.reward.function=tests.training.test_algorithms:first_word",
        "algorithm.args.rounds=8",
        "algorithm.advantage.args.overlong_buffer=0",
    ]
    two, _ = train(tmp_path / "two", base)
    one, _ = train(tmp_path / "one", [*base, "placement.pools={all: {ranks: 1, models: [actor, reward]}}"])
    config, position = config_of(two), 0
    prompts = sum(1 for _ in Path(config.data.train).open())
    order = permutation(config.seed, 0, prompts).tolist()
    for number in two.iterations:
        iteration = two.iteration(number)
        keys, reward = group_key(iteration.ids), iteration.columns["reward"]
        assert len(iteration.ids) == 8 and len(keys.unique()) == 4
        assert all(reward[keys == key].unique().numel() == 2 for key in keys.unique())
        rounds = iteration.metrics["actor/rounds"]
        places = [order.index(prompt) for prompt in unpack(iteration.ids)[1].tolist()]
        assert places == sorted(places) and position <= places[0] and places[-1] < position + 4 * rounds
        position += 4 * rounds
        assert rounds > 1 and iteration.facts["data_position"] == position
        assert iteration.metrics["actor/kept_groups"] >= 4
    a, b = two.iteration(0), one.iteration(0)
    assert torch.equal(a.ids, b.ids)
    for name in ("response_ids", "reward", "record"):
        assert equal(a.columns[name], b.columns[name])
    assert a.metrics["actor/loss"] == pytest.approx(b.metrics["actor/loss"], rel=1e-4, abs=1e-6)


POLICY = "random:llama?vocab_size=512&hidden_size=128&layers=4&heads=4&kv_heads=4&seed=0&vocab=words"
AGENTS = [
    *(
        "experiment=propose_judge_revise",
        "protocol=fsdp_plain",
        "data=positivity",
        "run.eval=false",
        "iterations=2",
    ),
    *("algorithm.batch.prompts=4", "algorithm.batch.draws=2", "algorithm.sampling.max_tokens=6"),
    *(
        f"models.{name}.{key}"
        for name in ("proposer", "judge")
        for key in (f"path={POLICY}", "optimizer.lr=1e-3")
    ),
    *("models.calculator.function=tests.training.judges:echo_tool", "models.calculator.args.form=x"),
    *("models.question.args.form='{response}'", "models.quote.args.form='{response}'"),
    *("models.reward.function=tests.training.judges:lower_half", "protocol.generation.max_model_len=192"),
]


def test_agents_propose_judge_and_revise(tmp_path: Path) -> None:
    """Two policies, tools between them, several turns: what was told is part of the text, and of no loss."""
    run, _ = train(tmp_path, [], base=AGENTS)
    iteration = run.iteration(1)
    columns = iteration.columns
    tokenizer = load_tokenizer(resolve_model(POLICY))
    told = 0
    for row in range(len(iteration.ids)):
        one = lambda name, row=row: columns[name].rows(row, row + 1).values.tolist()
        response, mask, advantages = one("response_ids"), one("loss_mask"), one("advantages")
        used, quoted = one("observation_ids"), one("quote.observation_ids")
        verdict = one("judge.response_ids")
        assert (
            quoted
            == tokenizer(
                tokenizer.decode(verdict, skip_special_tokens=True), add_special_tokens=False
            ).input_ids
        )
        assert [t for t, own in zip(response, mask, strict=True) if not own] == used + quoted
        revised = mask[::-1].index(False)  # tokens of the last turn
        judged = response[: len(response) - revised - len(quoted)]
        shown = tokenizer.decode(judged, skip_special_tokens=True)
        assert one("question.prompt_ids") == tokenizer(shown).input_ids
        assert all(a == 0 for a, own in zip(advantages, mask, strict=True) if not own)
        assert all(p == 0 for p, own in zip(one("rollout_log_probs"), mask, strict=True) if not own)
        told += bool(used)
    assert 0 < told < len(iteration.ids), "the tool answers some drafts, not all"
    assert iteration.metrics["proposer/rollout_gap_max"] < 1e-4, "of the proposer's own tokens"
    assert iteration.facts["versions"] | {"proposer": 2, "judge": 2} == iteration.facts["versions"]
    for prefix in ("", "judge."):
        rows = {"reward": columns["reward"], "reward_ok": columns["reward_ok"]}
        mask: Ragged = columns[f"{prefix}response_ids"]
        whole = mask.like(torch.ones(len(mask.values), dtype=torch.bool))
        rows["loss_mask"] = columns["loss_mask"] if not prefix else whole
        made = resolve("hpcflow.algorithms.group_advantages:grpo")(iteration.ids, rows, alone)
        assert equal(made["advantages"], columns[f"{prefix}advantages"])
    assert all(unpack(iteration.ids)[2] < 2)
    assert all(not error for error in texts(columns["observation_error"]))


def test_agents_go_on_exactly(tmp_path: Path) -> None:
    """Replayed from what both policies' updates read: no call is made besides the updates."""
    whole, _ = train(tmp_path / "whole", [], base=AGENTS)
    parts, _ = train(tmp_path / "parts", ["run.checkpoint_every=1"], base=AGENTS)
    shutil.rmtree(parts.path / "checkpoints" / "iteration_1")
    config = config_of(parts)
    said = start(config, parts.path).check().stdout
    assert "iteration 2 replayed" in said and "calls made besides" not in said
    assert digests(Run(parts.path)) == digests(whole)


def test_an_algorithm_of_the_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module and the command of the README."""
    section = (ROOT / "README.md").read_text().partition("## An algorithm of your own")[2]
    module, command = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)[:2]
    (tmp_path / "mine.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = shlex.split(command)[2:]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    # a fork would keep its server's path
    run, _ = train(tmp_path, [*overrides, *SHORT], env=path, forked=False)
    columns = run.iteration(1).columns
    for row, reward in zip(columns["advantages"].tolist(), columns["reward"].tolist(), strict=True):
        assert row == pytest.approx([3 * reward] * len(row))


def test_evaluations_in_between_change_nothing(tmp_path: Path) -> None:
    """Sampled evaluations after each iteration against none: every column and the weights, bitwise."""
    plain, _ = train(tmp_path / "plain", ["iterations=3", "algorithm.sampling.max_tokens=8"])
    often = [
        "run.eval=true",
        "run.eval_every=1",
        "run.eval_draws=4",
        "run.eval_pass=0.6",
        "data.eval_prompts=6",
    ]
    watched, result = train(tmp_path / "watched", ["iterations=3", "algorithm.sampling.max_tokens=8", *often])
    assert digests(watched) == digests(plain)
    for number in plain.iterations:
        for name, column in plain.iteration(number).columns.items():
            assert equal(column, watched.iteration(number).columns[name]), name
    assert [entry["when"] for entry in watched.evals] == ["before", "iteration 1", "iteration 2", "after"]
    for entry in watched.evals:
        assert entry["samples"] == 24 and entry["passing"] == 0.6
        assert 0 <= entry["pass@1"] <= entry["pass@2"] <= entry["pass@4"] <= 1
    assert watched.evals[0]["pass@4"] > watched.evals[0]["pass@1"], "draws differ from each other"
    assert "pass@4" in result.stdout


def test_a_prompt_that_all_draws_agree_on_moves_nothing(tmp_path: Path) -> None:
    """Rewards that are all equal: advantages and the policy's gradient exactly 0, weights as they were but
    for nothing."""
    options = [
        "algorithm=dr_grpo",
        *SHORT,
        *GROUPS,
        "models.reward.function=tests.training.test_algorithms:always",
    ]
    run, _ = train(tmp_path, options)
    assert set(run.iteration(0).columns["advantages"].values.tolist()) == {0.0}
    assert run.iteration(0).metrics["actor/grad_norm"] == 0


def always(prompt: str, response: str, record: dict[str, Any]) -> float:
    return 0.1 + 1e-9 * len(response)
