"""A run: the algorithm's function called once per iteration, everything it did made durable."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from pathlib import Path
from typing import Any

from hpcflow.config import Config
from hpcflow.data.resolve import resolve
from hpcflow.dataflow.assemble import GENERATES, RECORDER, assemble
from hpcflow.dataflow.batch import Batch
from hpcflow.dataflow.group import WorkerGroup
from hpcflow.dataflow.progress import Progress
from hpcflow.dataflow.stopping import Stopping
from hpcflow.dataflow.trace import Node, idle_seconds
from hpcflow.dataflow.world import World
from hpcflow.store.checkpoint import CheckpointDir


class Session:
    """One launch of a run, at the controller."""

    def __init__(self, run: Path, config: Config) -> None:
        self.run, self.config = run, config
        pools, members = assemble(config, str(run), secrets.token_hex(6))
        self.world = World(
            pools, members, watchdog=config.protocol.watchdog_s, column_cap=int(config.protocol.column_cap_gib * 2**30)
        )
        self.world.before_advance = self._record
        self.recorder = self.world.group(RECORDER)
        self.groups = {name: self.world.group(name) for name in members if name != RECORDER}
        self.worker_pools = {name: ranks for name, ranks in pools.items() if name != RECORDER}
        self.progress = Progress(config.iterations, self.world.trace.running)
        flush = self.world.controller.on_turn
        self.stopping = Stopping(lambda: self.world.controller.signals, self.progress.say)
        self.world.controller.on_turn = lambda: (flush(), self.progress.tick(), self.stopping.tick())
        self._recorded: set[str] = set()

    # -- the run

    def train(self) -> None:
        """From the last checkpoint, or from the beginning, to the last iteration; then stop all ranks."""
        first = self._resume()
        self.world.drain()
        self.progress.say(f"{len(self.groups)} models on {sum(map(len, self.worker_pools.values()))} ranks are up")
        if self.config.run.eval and first == 0:
            self._evaluate("before", 0)
        for iteration in range(first, self.config.iterations):
            self._iterate(iteration)
            every = self.config.run.checkpoint_every
            last = iteration == self.config.iterations - 1
            stop = None if last else self.stopping.due()
            if last or stop or (every and (iteration + 1) % every == 0):
                self._checkpoint(iteration)
            if stop:
                raise stop
        if self.config.run.eval and first < self.config.iterations:
            self._evaluate("after", self.config.iterations)
        self.world.close()

    def _iterate(self, iteration: int) -> None:
        sizes = self.config.algorithm.batch
        self.world.iteration, self._recorded = iteration, set()
        self.progress.begin(iteration)
        start = time.time()
        prompts = self._prompts("train", iteration * sizes.prompts, sizes.prompts, sizes.draws)
        resolve(self.config.algorithm.function)(self.world.models, prompts)
        del prompts
        self.world.drain()
        facts = self._facts(self.world.trace.take(), start, time.time())
        metrics = self.recorder.commit(iteration=iteration, facts=facts).get()[0]
        self.progress.end(metrics)
        self.stopping.took(time.time() - start)

    def _prompts(self, source: str, start: int, count: int, draws: int) -> Batch:
        return self._generator().load_prompts(
            source=source, start=start, count=count, draws=draws, rows=count * draws
        )

    def _generator(self) -> WorkerGroup:
        return next(group for group in self.groups.values() if GENERATES in group.primitives)

    # -- recording

    def _record(self, batch: Batch) -> None:
        """Before weights advance: all columns of the batch that are not recorded yet go to the recorder."""
        names = tuple(name for name in batch.columns if name not in self._recorded)
        if not names:
            return
        self._recorded.update(names)
        primitive = dataclasses.replace(self.recorder.primitives["record"], reads=names)
        stamps = batch.select(names).stamps()
        self.recorder.call(primitive, batch, {"iteration": self.world.iteration, "stamps": stamps})

    def _facts(self, nodes: list[Node], start: float, end: float) -> dict[str, Any]:
        """What the run directory keeps of an iteration beside its columns."""
        sizes = self.config.algorithm.batch
        work = [node for node in nodes if node.model != RECORDER]
        ranks = sum(map(len, self.worker_pools.values()))
        metrics = {
            f"{node.model}/{name}": value
            for node in work
            if isinstance(node.value, dict)
            for name, value in node.value.items()
        }
        return {
            "nodes": [node.record() for node in nodes],
            "metrics": metrics,
            "versions": {name: group.version for name, group in self.groups.items()},
            "start": start,
            "wall_s": end - start,
            "idle": idle_seconds(work, self.worker_pools, start, end),
            "accelerator_s": ranks * (end - start),
            "updates": sum(node.advances for node in work),
            "data_position": (self.world.iteration + 1) * sizes.prompts,
            "control_bytes": self.world.controller.engine.control_bytes,
        }

    def _evaluate(self, when: str, iteration: int) -> None:
        """Mean reward on held-out prompts, most likely tokens; changes no state of the training."""
        self.world.iteration = iteration
        batch = self._prompts("eval", 0, self.config.data.eval_prompts, 1)
        batch |= self._generator().generate_sequences(batch, greedy=True)
        judge = next(group for group in self.groups.values() if "compute_reward" in group.primitives)
        batch |= judge.compute_reward(batch)
        primitive = dataclasses.replace(self.recorder.primitives["evaluation"], reads=("reward", "reward_ok"))
        handle = self.recorder.call(primitive, batch, {"when": when, "iteration": iteration})
        entry = handle.get()[0]
        if entry["reward_mean"] is not None:
            self.progress.say(
                f"held-out prompts {when} training: reward {entry['reward_mean']:+.3f} "
                f"(standard error {entry['reward_se']:.3f}, {entry['samples']} prompts)"
            )
        self.world.drain()
        self.world.trace.take()

    # -- checkpoints

    def _trained(self) -> dict[str, WorkerGroup]:
        return {n: g for n, g in self.groups.items() if self.config.models[n].optimizer is not None}

    def _checkpoint(self, iteration: int) -> None:
        """Weights, optimizers, random states and the data position after this iteration."""
        trained, start = self._trained(), time.time()
        sizes = [sum(bytes_of.values()) for g in trained.values() for bytes_of in g.memory().get()]
        needed = math.ceil(1.05 * sum(sizes)) + (1 << 20)
        folder = self.recorder.begin_checkpoint(iteration=iteration, needed=needed).get()[0]
        saved = {name: group.save(folder=f"{folder}/{name}") for name, group in trained.items()}
        meta = {
            "versions": {name: handle.get()[0] for name, handle in saved.items()},
            "digests": {name: group.weights_digest().get()[0] for name, group in trained.items()},
            "data_position": (iteration + 1) * self.config.algorithm.batch.prompts,
        }
        self.recorder.finish_checkpoint(iteration=iteration, meta=meta, keep=self.config.run.keep).wait()
        self.world.drain()
        self.stopping.checkpoint_s = time.time() - start
        self.world.trace.take()

    def _resume(self) -> int:
        """Load the last complete checkpoint, if any. Returns the first iteration to compute."""
        found = CheckpointDir(self.run).latest()
        first = 0 if found is None else found.iteration + 1
        gone = self.recorder.rewind(iteration=first).get()[0]
        if gone:
            self.progress.say(f"iterations {[i + 1 for i in gone]} come after the last checkpoint and are computed again")
        if found is not None:
            for name, group in self._trained().items():
                group.version = group.load(folder=str(found.folder / name)).get()[0]
                self._check_digest(name, group, found.meta)
            self.progress.say(f"continuing after iteration {first} from {found.folder}")
        return first

    def _check_digest(self, name: str, group: WorkerGroup, meta: dict[str, Any]) -> None:
        expected = (meta["versions"][name], meta["digests"][name])
        found = (group.version, group.weights_digest().get()[0])
        if found != expected:
            raise ValueError(f"the checkpoint's {name} is version, digest {expected}; what was loaded is {found}")
