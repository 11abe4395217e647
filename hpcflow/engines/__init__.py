"""Engines: how a model computes on the ranks of its pool. They know nothing of algorithms and nothing of MPI.

torch.distributed's default group is the pool. A training engine scores and trains token sequences; a
generation engine samples them. Engines are named in a config and imported only when asked for, because vLLM
and transformers take seconds to import.
"""

from __future__ import annotations

from hpcflow.data.resolve import resolve

TRAINING_ENGINES = {"fsdp": "hpcflow.engines.fsdp:FSDPEngine"}
GENERATION_ENGINES = {
    "plain": "hpcflow.engines.plain:PlainEngine",
    "vllm": "hpcflow.engines.vllm:VLLMEngine",
}


def training_engine(name: str) -> type:
    """The class of the training engine called ``name``. ValueError lists the valid names."""
    return _engine("protocol.training.engine", name, TRAINING_ENGINES)


def generation_engine(name: str) -> type:
    """The class of the generation engine called ``name``. ValueError lists the valid names."""
    return _engine("protocol.generation.engine", name, GENERATION_ENGINES)


def _engine(key: str, name: str, known: dict[str, str]) -> type:
    if name not in known:
        raise ValueError(f"{key}={name}: there is no such engine; valid names: {', '.join(sorted(known))}")
    return resolve(known[name])
