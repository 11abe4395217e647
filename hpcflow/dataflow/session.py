"""A run: the algorithm's function called once per iteration, everything it did made durable."""

from __future__ import annotations

import dataclasses
import secrets
import time
from pathlib import Path
from typing import Any

from hpcflow import run_folder
from hpcflow.config import Config
from hpcflow.data.resolve import resolve
from hpcflow.dataflow.assemble import GENERATES, RECORDER, assemble
from hpcflow.dataflow.checkpointing import Checkpoints
from hpcflow.dataflow.group import WorkerGroup
from hpcflow.dataflow.progress import Progress
from hpcflow.dataflow.prompts import Stream
from hpcflow.dataflow.recovery import Recovery
from hpcflow.dataflow.stopping import Stopping
from hpcflow.dataflow.trace import Node, idle_seconds
from hpcflow.dataflow.world import World
from hpcflow.mpi.controller import WorkerError
from hpcflow.workers.primitive import RECOVERED


class Session:
    """One launch of a run, at the controller."""

    def __init__(self, run: Path, config: Config) -> None:
        self.run, self.config = run, config
        pools, members = assemble(config, str(run), secrets.token_hex(6))
        self.world = World(
            pools,
            members,
            watchdog=config.protocol.watchdog_s,
            column_cap=int(config.protocol.column_cap_gib * 2**30),
        )
        self.recorder = self.world.group(RECORDER)
        self.groups = {name: self.world.group(name) for name in members if name != RECORDER}
        self.worker_pools = {name: ranks for name, ranks in pools.items() if name != RECORDER}
        self.progress = Progress(config.iterations, self.world.trace.running)
        flush = self.world.controller.on_turn
        self.stopping = Stopping(lambda: self.world.controller.signals, self.progress.say)
        self.world.controller.on_turn = lambda: (flush(), self.progress.tick(), self.stopping.tick())
        trained = {
            name: group for name, group in self.groups.items() if config.models[name].optimizer is not None
        }
        self.checkpoints = Checkpoints(self.recorder, trained, config.run.keep)
        self.recovery = Recovery(run, self.world, trained, self.progress.say)
        sizes = config.algorithm.batch
        self.stream = Stream(self._generator().load_prompts, "train", sizes.prompts, sizes.draws)

    # -- the run

    def train(self) -> None:
        """From the last checkpoint, or from the beginning, to the last iteration; then stop all ranks."""
        try:
            with run_folder.written(self.run):
                self._train()
        except WorkerError as error:
            try:
                decided = self.recovery.failed(error)
            except Exception as second:  # the error that stopped the run is the one to report
                decided = f"(what to run again could not be decided: {second})"
            raise WorkerError(f"{error}\n{decided}".rstrip()) from None

    def _train(self) -> None:
        first = self._resume()
        self.world.drain()
        self.progress.say(
            f"{len(self.groups)} models on {sum(map(len, self.worker_pools.values()))} ranks are up"
        )
        if first not in run_folder.evaluated(self.run):
            self._evaluate(first)
        for iteration in range(first, self.config.iterations):
            self._iterate(iteration)
            every = self.config.run.checkpoint_every
            last = iteration == self.config.iterations - 1
            stop = None if last else self.stopping.due()
            if last or stop or (every and (iteration + 1) % every == 0):
                self._checkpoint(iteration, now=bool(last or stop))
            if stop:
                raise stop
            self._evaluate(iteration + 1)
        self.world.close()

    def _iterate(self, iteration: int) -> None:
        self.recovery.begin(iteration)
        self.progress.begin(iteration)
        start = time.time()
        self._compute()
        self.world.drain()
        facts = self._facts(self.world.trace.take(), start, time.time())
        metrics = self.recorder.commit(iteration=iteration, facts=facts).get()[0]
        self.recovery.end()
        self.progress.end(metrics)
        self.checkpoints.finish()
        self.world.trace.take()
        self.stopping.took(time.time() - start)

    def _compute(self) -> None:
        """The algorithm's function, once."""
        algorithm = self.config.algorithm
        resolve(algorithm.function)(self.world.models, self.stream.next(), **algorithm.args)

    def _generator(self) -> WorkerGroup:
        return next(group for group in self.groups.values() if GENERATES in group.primitives)

    def _facts(self, nodes: list[Node], start: float, end: float) -> dict[str, Any]:
        """What the run directory keeps of an iteration beside its columns."""
        work = [node for node in nodes if node.model != RECORDER]
        ranks = sum(map(len, self.worker_pools.values()))
        metrics = self.recovery.kept_metrics | {
            f"{node.model}/{name}": value
            for node in work
            if isinstance(node.value, dict)
            for name, value in node.value.items()
            if name != RECOVERED
        }
        return {
            "nodes": [node.record() for node in nodes],
            "kept": self.recovery.kept,
            "metrics": metrics,
            "versions": {name: group.version for name, group in self.groups.items()},
            "start": start,
            "wall_s": end - start,
            "idle": idle_seconds(work, self.worker_pools, start, end),
            "accelerator_s": ranks * (end - start),
            "updates": sum(node.advances for node in work),
            "data_position": self.stream.position,
            "control_bytes": self.world.controller.engine.control_bytes,
        }

    def _evaluation_due(self, done: int) -> str | None:
        """What the evaluation of the state after ``done`` iterations is called; None when there is none."""
        run = self.config.run
        if self.config.data.eval is None:
            return None
        if done in (0, self.config.iterations):
            return ("after" if done else "before") if run.eval else None
        return f"iteration {done}" if run.eval_every and done % run.eval_every == 0 else None

    def _evaluate(self, iteration: int) -> None:
        """Where it is due after so many iterations: reward on held-out prompts, of the most likely tokens or of
        several draws. Changes no state of the training."""
        when = self._evaluation_due(iteration)
        if when is None:
            return
        self.world.iteration, draws = iteration, self.config.run.eval_draws
        prompts = Stream(self._generator().load_prompts, "eval", self.config.data.eval_prompts, draws).next()
        batch = self._generator().generate_sequences(prompts, greedy=draws == 1, purpose="eval")
        judge = next(group for group in self.groups.values() if "compute_reward" in group.primitives)
        batch |= judge.compute_reward(batch)
        primitive = dataclasses.replace(self.recorder.primitives["evaluation"], reads=("reward", "reward_ok"))
        passing = self.config.run.eval_pass if draws > 1 else None
        handle = self.recorder.call(
            primitive, batch, {"when": when, "iteration": iteration, "passing": passing}
        )
        entry = handle.get()[0]
        if entry["reward_mean"] is not None:
            self.progress.say(
                f"held-out prompts, {when}: reward {entry['reward_mean']:+.3f} "
                f"(standard error {entry['reward_se']:.3f}, {entry['samples']} responses)"
                + "".join(
                    f"  {name} {value:.3f}" for name, value in entry.items() if name.startswith("pass@")
                )
            )
        self.world.drain()
        self.world.trace.take()

    # -- keeping and going on

    def _checkpoint(self, iteration: int, now: bool) -> None:
        """Begin a checkpoint of the state after this iteration; ``now``: and wait for its end."""
        start = time.time()
        self.checkpoints.begin(iteration, self.stream.position)
        if now:
            self.checkpoints.finish()
            self.stopping.checkpoint_s = time.time() - start
        self.world.drain()
        self.world.trace.take()

    def _resume(self) -> int:
        """Take up what earlier launches left. Returns the first iteration to compute."""
        self.progress.say(self.checkpoints.require_space())
        point = self.recovery.resume()
        self.stream.position = point.position
        self.world.drain()
        self.world.trace.take()
        for iteration in range(point.loaded, point.first):
            self.progress.begin(iteration)
            self.recovery.replay(iteration, self._compute)
        if point.loaded < point.first:
            self._checkpoint(point.first - 1, now=True)  # replayed once is enough, whatever happens next
        return point.first
