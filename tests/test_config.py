"""Composition, validation and hashes of configs."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow import config as c
from hpcflow.compose import overlay
from hpcflow.schema import ConfigError

TINY = ["experiment=tiny"]


@pytest.fixture(scope="module")
def tiny():
    return c.compose(TINY)


def keys(error):
    return {p.key for p in error.value.problems}


def test_quickstart_has_the_settings_that_were_seen_to_learn():
    config = c.compose(["experiment=ppo_quickstart", "iterations=2", "placement=split"])
    algorithm, critic = config.algorithm, config.models["critic"]
    assert (config.iterations, config.placement.name, config.world_size) == (2, "split", 4)
    assert (algorithm.batch.prompts, algorithm.batch.draws, algorithm.batch.mini_batches) == (32, 1, 2)
    assert algorithm.advantage.args == {
        "gamma": 1.0,
        "lam": 0.95,
        "kl_coef": 0.02,
        "kl": "k1",
        "whiten": True,
    }
    assert algorithm.value_loss.args == {"clip": 0.2} and config.data.system == ""
    assert critic.optimizer == c.Optimizer(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, clip_norm=1.0)
    assert config.models["reference"].optimizer is None
    assert config.data.train.startswith("/") and config.data.train.endswith(
        "configs/prompts/positivity_train.jsonl"
    )


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("model", ["smollm2_135m", "tiny"])
@pytest.mark.parametrize("placement", ["colocate", "split", "standalone"])
@pytest.mark.parametrize("data", ["positivity", "reasoning_gym"])
def test_every_combination_of_groups_composes_and_survives_yaml(tmp_path, algorithm, model, placement, data):
    config = c.compose([f"algorithm={algorithm}", f"model={model}", f"placement={placement}", f"data={data}"])
    (tmp_path / "config.yaml").write_text(c.dump(config))
    assert c.load(tmp_path / "config.yaml") == config
    assert c.from_dict(c.to_dict(config)) == config
    verifier = {"positivity": "vader_sentiment", "reasoning_gym": "reasoning_gym"}[data]
    assert config.models["reward"].function == f"hpcflow.data.verifiers:{verifier}"
    placed = [model for pool in config.placement.pools.values() for model in pool.models]
    assert sorted(placed) == sorted(config.algorithm.models)


def test_ranks_follow_the_order_of_the_pools(tiny):
    pools = {
        "b": c.Pool(ranks=3, models=["actor"]),
        "a": c.Pool(ranks=1, models=["critic", "reference", "reward"]),
    }
    placement = dataclasses.replace(tiny.placement, pools=pools)
    assert placement.ranks() == {"b": range(2, 5), "a": range(5, 6)}
    assert dataclasses.replace(tiny, placement=placement).world_size == 6


def test_a_model_that_the_algorithm_does_not_call_leaves_its_pool():
    config = c.compose([*TINY, "algorithm=grpo", "placement=standalone"])
    assert list(config.placement.pools) == ["actor", "reference", "reward"] and config.world_size == 5
    config = c.compose([*TINY, "algorithm=grpo", "placement=split"])
    assert config.placement.pools["value"].models == ["reward"]


@pytest.mark.parametrize(
    "override, key, works",
    [
        ("placment=split", "placment", "placement"),
        ("placement=splt", "placement", "placement=split"),
        ("modle=tiny", "modle", "model"),
        ("algorithm.batch.promts=3", "algorithm.batch.promts", "algorithm.batch.prompts"),
        ("+algorithm.batch.promts=3", "algorithm.batch.promts", "algorithm.batch.prompts"),
        ("++models.actor.optimiser.lr=1", "models.actor.optimiser", "models.actor.optimizer"),
        ("algorithm.batch.prompts=0", "algorithm.batch.prompts", "algorithm.batch.prompts=32"),
        ("algorithm.batch.prompts=1.5", "algorithm.batch.prompts", "algorithm.batch.prompts=32"),
        ("iterations=true", "iterations", "iterations=1"),
        ("iterations=", "iterations", "iterations=1"),
        ("seed=-1", "seed", "seed=0"),
        ("seed=2147483648", "seed", "seed=0"),
        ("algorithm.sampling.top_p=0", "algorithm.sampling.top_p", "algorithm.sampling.top_p=1.0"),
        ("algorithm.sampling.top_p=nan", "algorithm.sampling.top_p", "algorithm.sampling.top_p=1.0"),
        ("models.actor.optimizer.lr=inf", "models.actor.optimizer.lr", "models.actor.optimizer.lr=1e-06"),
        ("models.actor.optimizer.lr=1e300", "models.actor.optimizer.lr", "models.actor.optimizer.lr=1e-06"),
        ("algorithm.sampling.temperature=1e9", "algorithm.sampling.temperature", "temperature=1.0"),
        ("protocol.training.explode_norm=1e9", "protocol.training.explode_norm", "explode_norm=0.0"),
        ("protocol.watchdog_s=0.5", "protocol.watchdog_s", "protocol.watchdog_s=600.0"),
        ("models.reward.timeout_s=1e-9", "models.reward.timeout_s", "models.reward.timeout_s=30.0"),
        ("models.actor.optimizer.betas=[0.9]", "models.actor.optimizer.betas", "[0.9, 0.95]"),
        ("models.actor.optimizer.betas=[0.9,x]", "models.actor.optimizer.betas[1]", "[0.9, 0.95]"),
        ("protocol.training.dtype=fp16", "protocol.training.dtype", "protocol.training.dtype=bfloat16"),
        ("protocol.training=3", "protocol.training", "protocol.training={}"),
        ("trust_remote_code=yes_please", "trust_remote_code", "trust_remote_code=false"),
        ("algorithm.sampling.stop=[1]", "algorithm.sampling.stop[0]", "algorithm.sampling.stop=[]"),
        ("~algorithm.function", "algorithm.function", "algorithm.function="),
        ("placement.pools.all.ranks=0", "placement.pools.all.ranks", "placement.pools.all.ranks=1"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_one_that_works(override, key, works):
    with pytest.raises(ConfigError) as error:
        c.compose([*TINY, override])
    assert keys(error) == {key}
    assert works in error.value.problems[0].works


def test_all_wrong_keys_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        c.compose([*TINY, "iterations=a", "seed=1.5", "run.kep=1", "protocol.training=x"])
    assert keys(error) == {"iterations", "seed", "run.kep", "protocol.training"}


@pytest.mark.parametrize(
    "override, says",
    [
        ("a=[", "not an override"),
        ("iterations", "not an override"),
        ("seed=1,2", "works: seed=1"),
        ("~nothing.here", "nothing.here"),
        ("name=${nothing}", "nothing"),
    ],
)
def test_what_is_no_override_is_one_message(override, says):
    with pytest.raises(ValueError, match=None) as error:
        c.compose([*TINY, override])
    assert says in str(error.value)


def test_the_last_choice_of_a_group_wins():
    config = c.compose([*TINY, "placement=split", "iterations=1", "placement=standalone", "iterations=7"])
    assert (config.placement.name, config.iterations) == ("standalone", 7)


def test_pools_given_as_a_whole_replace_those_of_the_placement():
    config = c.compose(
        [
            *TINY,
            "placement.pools={a: {ranks: 2, models: [actor, critic]}, "
            "b: {ranks: 1, models: [reference, reward]}}",
        ]
    )
    assert list(config.placement.pools) == ["a", "b"]


def test_own_configs_are_searched_first(tmp_path):
    (tmp_path / "placement").mkdir()
    (tmp_path / "placement" / "mine.yaml").write_text("name: mine\npools: {x: {ranks: 1, models: [actor]}}\n")
    (tmp_path / "placement" / "split.yaml").write_text(
        "name: my split\npools: {x: {ranks: 5, models: [actor]}}\n"
    )
    assert c.compose([*TINY, "placement=mine"], tmp_path).placement.name == "mine"
    assert c.compose([*TINY, "placement=split"], tmp_path).placement.pools["x"].ranks == 5
    assert c.compose([*TINY, "placement=colocate"], tmp_path).placement.name == "colocate"
    assert c.compose([*TINY, "placement=split"]).placement.name == "split"
    with pytest.raises(ValueError, match="no such folder"):
        c.compose(TINY, tmp_path / "nothing")


def test_a_mistake_in_a_users_own_file_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.yaml").write_text("dir: runs\nkeeep: 3\n")
    with pytest.raises(ConfigError) as error:
        c.compose([*TINY, "run=mine"], tmp_path)
    assert keys(error) == {"run.keeep"}
    (tmp_path / "run" / "broken.yaml").write_text("dir: [\n")
    with pytest.raises(ValueError, match="broken.yaml"):
        c.compose([*TINY, "run=broken"], tmp_path)


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    assert c.compose([*TINY, "data.train=mine.jsonl"]).data.train == str(tmp_path / "mine.jsonl")
    assert c.compose([*TINY, "data.train=nothing.jsonl"]).data.train == "nothing.jsonl"
    assert c.compose([*TINY, "data.train=configs/prompts/positivity_eval.jsonl"]).data.train.startswith("/")


SAME = [
    "iterations=9",
    "name=other",
    "run.keep=5",
    "models.reward.timeout_s=3",
    "models.reward.retries=0",
    "data.eval_prompts=3",
    "data.eval=null",
    "cluster.threads_per_rank=2",
]
CHANGES = {
    "algorithm": [
        "seed=1",
        "algorithm.batch.prompts=4",
        "models.actor.optimizer.lr=2e-3",
        "data.system=x",
        "algorithm.advantage.args.lam=0.5",
        "algorithm=grpo",
        "data=reasoning_gym",
        "model=smollm2_135m",
    ],
    "protocol": [
        "protocol.training.micro_batch=2",
        "protocol=fsdp_vllm",
        "protocol.generation.dtype=bfloat16",
    ],
    "placement": ["placement=split", "placement.pools.all.ranks=3"],
}


@pytest.mark.parametrize("override", SAME)
def test_what_is_not_trained_differently_leaves_all_hashes(tiny, override):
    assert c.hashes(c.compose([*TINY, override])) == c.hashes(tiny)


@pytest.mark.parametrize("name, override", [(n, o) for n, many in CHANGES.items() for o in many])
def test_a_change_of_one_object_leaves_the_others_hashes(tiny, name, override):
    before, after = c.hashes(tiny), c.hashes(c.compose([*TINY, override]))
    assert {key for key in before if before[key] != after[key]} == {name}


def test_hashes_do_not_depend_on_the_working_directory_or_model_order(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = c.compose(TINY)
    assert c.hashes(there) == c.hashes(tiny)
    backwards = dataclasses.replace(there, models=dict(reversed(there.models.items())))
    assert c.hashes(backwards) == c.hashes(tiny)
    swapped = dataclasses.replace(
        there.placement,
        pools={"x": c.Pool(ranks=1, models=["actor"]), "y": c.Pool(ranks=1, models=["critic"])},
        written=None,
    )
    other = dataclasses.replace(swapped, pools=dict(reversed(swapped.pools.items())))
    assert (
        c.hashes(dataclasses.replace(there, placement=swapped))["placement"]
        != c.hashes(dataclasses.replace(there, placement=other))["placement"]
    )


def test_overlay_changes_only_what_is_given(tmp_path):
    base = tmp_path / "config.yaml"
    config = c.compose([*TINY, "algorithm=grpo", "algorithm.batch.draws=2", "placement=standalone", "seed=5"])
    base.write_text(c.dump(config))
    assert overlay(base, []) == config
    changed = overlay(base, ["placement=split", "iterations=9", "protocol.training.micro_batch=2"])
    assert (changed.placement.name, changed.iterations, changed.seed) == ("split", 9, 5)
    assert changed.algorithm == config.algorithm and changed.protocol.training.micro_batch == 2
    assert changed.placement.pools["value"].models == ["reward"]
    assert c.hashes(changed)["algorithm"] == c.hashes(config)["algorithm"]
    assert c.hashes(changed)["placement"] == c.hashes(c.compose(["placement=split"]))["placement"]
    pooled = overlay(base, ["placement.pools={one: {ranks: 1, models: [actor, reference, reward]}}"])
    assert list(pooled.placement.pools) == ["one"] and pooled.placement.written is None
    assert overlay(base, ["experiment=tiny"]) == config
    wider = overlay(base, ["placement.pools.actor.ranks=4"])
    assert (
        wider.placement.pools["actor"].ranks == 4
        and c.hashes(wider)["placement"] != c.hashes(config)["placement"]
    )


@pytest.mark.parametrize(
    "override", ["experiment=ppo_quickstart", "~placement.pools.all", "placement=splt", "run.kep=2"]
)
def test_overlay_refuses_what_it_cannot_apply(tmp_path, tiny, override):
    base = tmp_path / "config.yaml"
    base.write_text(c.dump(tiny))
    with pytest.raises(ValueError, match=override.lstrip("~").partition("=")[0]):
        overlay(base, [override])


@pytest.mark.parametrize(
    "text, says",
    [("a: [", "not a readable"), ("3", "holds int"), ("", "holds NoneType"), ("name: x", "algorithm=")],
)
def test_load_refuses_what_is_no_config(tmp_path, text, says):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        c.load(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="not a readable"):
        c.load(tmp_path / "nothing.yaml")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_junk_anywhere_is_a_config_error_or_a_valid_config(tiny, data):
    tree = c.to_dict(tiny)
    node = tree
    while True:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(junk)
            break
        node = node[key]
    try:
        config = c.from_dict(tree)
    except ConfigError as error:
        assert all(p.key and p.works for p in error.problems)
    else:
        assert c.from_dict(c.to_dict(config)) == config


def test_config_and_check_import_neither_torch_nor_hydra_before_they_must():
    code = (
        "import sys, hpcflow.config; assert not {'torch', 'hydra'} & sys.modules.keys();"
        "import hpcflow.check; hpcflow.check.check(hpcflow.config.compose(['experiment=tiny']));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
