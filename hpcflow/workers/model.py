"""What all models have in common: their place in the config, and a sharded network that may be trained."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcflow.config import Config, Loss, ModelSpec
from hpcflow.data.ids import seed_for
from hpcflow.data.models import resolve_model
from hpcflow.data.resolve import resolve
from hpcflow.engines import training_engine
from hpcflow.workers.host import join_pool
from hpcflow.workers.primitive import Context, Primitive, Rows, primitive


class Model:
    """A model of the config on one rank. ``unique`` names this launch."""

    version = 0

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        self.context, self.config, self.unique = context, config, unique

    @property
    def spec(self) -> ModelSpec:
        return self.config.models[self.context.group]

    @classmethod
    def configured(cls, found: dict[str, Primitive], config: Config) -> dict[str, Primitive]:
        """The class's primitives as this config uses them."""
        return found


class Network(Model):
    """A model with weights, sharded over its pool by the training engine.

    ``head``: see the engine. It is trained when the config gives it an optimizer.
    """

    head = "lm"

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        join_pool(context)
        self.folder = resolve_model(self.spec.path)
        protocol = config.protocol.training
        trained = self.spec.optimizer is not None
        with context.span("load"):
            self.engine = training_engine(protocol.engine)(
                self.folder,
                head=self.head,
                trainable=trained,
                protocol=protocol,
                optimizer=self.spec.optimizer,
                temperature=config.algorithm.sampling.temperature or 1.0,
                trust_remote_code=config.trust_remote_code,
            )

    @property
    def version(self) -> int:
        return self.engine.version

    # -- learning

    def update(self, rows: Rows, loss: Loss) -> dict[str, float]:
        """One update: ``epochs`` passes over the batch in global mini-batches. Returns the mean of their metrics."""
        function = functools.partial(resolve(loss.function), **loss.args)
        steps = self.engine.train(rows.columns, self._mini_batches(rows), function, loss.agg)
        names = sorted({name for step in steps for name in step})
        return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}

    def _mini_batches(self, rows: Rows) -> list[torch.Tensor]:
        """Local row numbers of each mini-batch, all epochs one after the other.

        Which samples form a mini-batch depends on their place in the whole batch alone: every ``mini_batches``-th
        prompt (or sample, when there are fewer prompts) is in the same one. So it is the same set however the batch is
        spread over ranks, and each rank has its share of each. The order changes from epoch to epoch.
        """
        sizes = self.config.algorithm.batch
        before = [int.from_bytes(each, "little") for each in self.context.exchange(len(rows).to_bytes(8, "little"))]
        place = sum(before[: self.context.index]) + torch.arange(len(rows))
        if sizes.prompts % sizes.mini_batches == 0:
            place = place // sizes.draws
        parts = [torch.nonzero(place % sizes.mini_batches == k).flatten() for k in range(sizes.mini_batches)]
        chosen = []
        for epoch in range(sizes.epochs):
            order = list(range(sizes.mini_batches))
            if epoch:
                random.Random(seed_for(self.config.seed, self.version, f"epoch {epoch}")).shuffle(order)
            chosen += [parts[k] for k in order]
        return chosen

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A small tensor of every rank, in row order."""
        payload = tensor.contiguous().numpy().tobytes()
        shape = tensor.shape[1:]
        received = self.context.exchange(payload)
        return [
            torch.frombuffer(bytearray(each), dtype=tensor.dtype).view(-1, *shape)
            if each
            else torch.empty((0, *shape), dtype=tensor.dtype)
            for each in received
        ]

    # -- keeping

    @primitive("ONE_TO_ALL")
    def save(self, rows: Rows, folder: str) -> int:
        """Weights, optimizer, version and random state into ``folder``, by all ranks. Returns the version."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self.engine.save(target)
        torch.save(torch.get_rng_state(), self._random_state(target))
        return self.version

    @primitive("ONE_TO_ALL")
    def load(self, rows: Rows, folder: str) -> int:
        """Continue from a folder that any number of ranks has saved. Returns the version."""
        self.engine.load(Path(folder))
        state = self._random_state(Path(folder))
        if state.exists():
            torch.set_rng_state(torch.load(state, weights_only=True))
        return self.version

    def _random_state(self, folder: Path) -> Path:
        return folder / f"random_{self.context.size}_{self.context.index}.pt"

    @primitive("ONE_TO_ALL")
    def weights_digest(self, rows: Rows) -> str:
        """Hex digest of the weights, the same under every layout."""
        return self.engine.weights_digest()

    @primitive("ONE_TO_ALL")
    def memory(self, rows: Rows) -> dict[str, int]:
        """Bytes on this rank."""
        return self.engine.nbytes()


def with_loss(found: dict[str, Primitive], name: str, loss: Loss, needs: Callable[[str], Any]) -> dict[str, Primitive]:
    """``found`` with the columns that a configured loss reads added to primitive ``name``."""
    import dataclasses

    wanted = needs(loss.function)
    extra = tuple(column for column in wanted.always if column not in found[name].reads)
    changed = dataclasses.replace(found[name], reads=found[name].reads + extra, optional=wanted.optional)
    return {**found, name: changed}
