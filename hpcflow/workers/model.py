"""What all models have in common: their place in the config, and a sharded network that may be trained."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hpcflow.config import Config, Loss, ModelSpec
from hpcflow.data.columns import Columns
from hpcflow.data.ids import seed_for
from hpcflow.data.models import resolve_model
from hpcflow.data.resolve import resolve
from hpcflow.engines import training_engine
from hpcflow.engines.objective import Term
from hpcflow.store.checkpoint import file_digest
from hpcflow.workers.host import join_pool
from hpcflow.workers.primitive import Context, Primitive, Rows, primitive

STATE = "state.json"
Beside = tuple[str, Columns, str, float]
"""A further term of a loss: name of its metric, columns, dotted path of the loss per token, weight."""
Heard = tuple[torch.Tensor, Columns]
"""What a loss was called with: predictions float32 [response tokens], and their rows."""


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

    def mean(self, values: torch.Tensor) -> float:
        """Mean of the values [n] of all ranks; NaN where there are none."""
        parts = torch.stack(
            self.gather(torch.tensor([math.fsum(values.tolist()), len(values)], dtype=torch.float64))
        )
        total, count = parts.view(-1, 2).sum(0).tolist()
        return total / count if count else math.nan


class Network(Model):
    """A model with weights, sharded over its pool by the training engine.

    ``head``: see the engine. It is trained when the config gives it an optimizer. ``state``: numbers that one update
    hands to the next (the coefficient of a penalty, say), the same on all ranks; part of every checkpoint. Only an
    advancing primitive may change them: what is replayed are those alone.
    """

    head = "lm"

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        join_pool(context)
        self.state: dict[str, float] = {}
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future | None = None
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

    def update(
        self, rows: Rows, loss: Loss, beside: Sequence[Beside] = (), heard: list[Heard] | None = None
    ) -> dict[str, float]:
        """One update: ``epochs`` passes over the batch in global mini-batches. Returns the mean of their metrics.

        ``beside``: further terms of the loss, over columns with the same rows in the same mini-batches. ``heard``: a
        list that gets what the model predicted for this rank's part of the first mini-batch, before any step.
        """
        function, chosen = functools.partial(resolve(loss.function), **loss.args), self._mini_batches(rows)
        if heard is not None:
            function = _overheard(function, heard, len(chosen[0]))
        terms = [
            Term(name, columns, chosen, resolve(path), weight=weight)
            for name, columns, path, weight in beside
        ]
        steps = self.engine.train(rows.columns, chosen, function, loss.agg, terms)
        names = sorted({name for step in steps for name in step})
        return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}

    def _mini_batches(self, rows: Rows) -> list[torch.Tensor]:
        """Local row numbers of each mini-batch, all epochs one after the other.

        Which samples form a mini-batch depends on their place in the whole batch alone: every ``mini_batches``-th
        prompt (or sample, when there are fewer prompts) is in the same one. So it is the same set however the batch is
        spread over ranks, and each rank has its share of each. The order changes from epoch to epoch.
        """
        sizes = self.config.algorithm.batch
        before = [
            int.from_bytes(each, "little") for each in self.context.exchange(len(rows).to_bytes(8, "little"))
        ]
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

    # -- keeping

    @primitive("ONE_TO_ALL")
    def save(self, rows: Rows, folder: str) -> tuple[int, str]:
        """Begin to write weights, optimizer, version, state and random state into ``folder``, by all ranks.

        They are copied now and written by a thread while the model goes on; `saved` waits for it. There is one copy at
        a time: a second `save` first waits for the first. Returns the version and the digest of the weights.
        """
        if self._writing is not None:
            self._writing.result()
        taken, target = self.engine.snapshot(), Path(folder)
        random_state, state = torch.get_rng_state(), dict(self.state)

        def write() -> dict[str, str]:
            path, digest = taken.write(target)
            taken.parts.clear()
            torch.save(random_state, self._random_state(target))
            if self.context.index == 0:
                (target / STATE).write_text(json.dumps(state))
            return {f"{target.name}/{path.name}": digest}

        self._writing = self._writer.submit(write)
        return self.version, self.engine.weights_digest()

    @primitive("ONE_TO_ALL")
    def saved(self, rows: Rows) -> dict[str, str]:
        """Wait until this rank has written what `save` began. Returns the digests of its large files by name. OSError
        when it could not be written."""
        writing, self._writing = self._writing, None
        return writing.result() if writing else {}

    @primitive("ONE_TO_ALL")
    def load(self, rows: Rows, folder: str, digests: dict[str, str]) -> tuple[int, str]:
        """Continue from a folder that any number of ranks has saved. Returns the version and the digest of the weights.

        ``digests``: of the folder's files, by name; the ranks share the reading. ValueError names a file whose content
        has another one.
        """
        source = Path(folder)
        for name in sorted(digests)[self.context.index :: self.context.size]:
            found = file_digest(source / name)
            if found != digests[name]:
                raise ValueError(
                    f"{source / name} is damaged: its content has digest {found}, written was {digests[name]}. Move "
                    f"{source.parent} out of {source.parent.parent} and resume: then the checkpoint before it counts"
                )
        self.engine.load(source)
        self.state = json.loads((source / STATE).read_text())
        random_state = self._random_state(source)
        if random_state.exists():
            torch.set_rng_state(torch.load(random_state, weights_only=True))
        return self.version, self.engine.weights_digest()

    def _random_state(self, folder: Path) -> Path:
        return folder / f"random_{self.context.size}_{self.context.index}.pt"

    @primitive("ONE_TO_ALL")
    def memory(self, rows: Rows) -> dict[str, int]:
        """Bytes on this rank."""
        return self.engine.nbytes()


def _overheard(loss: Callable, heard: list[Heard], rows: int) -> Callable:
    """``loss``, whose arguments are appended to ``heard`` until those hold ``rows`` rows."""

    def listening(predictions: torch.Tensor, part: Columns) -> Any:
        if sum(len(each["loss_mask"]) for _, each in heard) < rows:
            heard.append((predictions.detach(), part))
        return loss(predictions, part)

    return listening


def with_loss(
    found: dict[str, Primitive], name: str, loss: Loss, needs: Callable[[str], Any]
) -> dict[str, Primitive]:
    """``found`` with the columns that a configured loss reads added to primitive ``name``."""
    import dataclasses

    wanted = needs(loss.function)
    extra = tuple(column for column in wanted.always if column not in found[name].reads)
    changed = dataclasses.replace(found[name], reads=found[name].reads + extra, optional=wanted.optional)
    return {**found, name: changed}
