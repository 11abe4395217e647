"""A Hydra launcher: ``app.py -m hydra/launcher=hpcflow lr=1,2,3`` runs each point as one heterogeneous
Slurm job.

The task function runs on every rank of the job's MPI world; what rank 0 returns counts. A point that fails
is reported and does not end the others. ``hpcflow train -m`` needs no plugin: see `hpcflow.slurm.sweep`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

log = logging.getLogger(__name__)


# Hydra runs this file outside of sys.modules when it looks for plugins, where a dataclass cannot be made.
CONFIG = {
    "_target_": "hydra_plugins.hpcflow_launcher.launcher.HetLauncher",
    "config": ["cluster=cpu_nodes", "placement=split"],  # hpcflow's overrides: what a job asks for
    "at_once": 4,
}
ConfigStore.instance().store(group="hydra/launcher", name="hpcflow", node=CONFIG, provider="hpcflow")


class HetLauncher(Launcher):
    """Submits the points of a sweep, ``at_once`` at a time, and waits for all of them."""

    def __init__(self, config: Sequence[str], at_once: int) -> None:
        self.words, self.at_once = list(config), at_once
        self.hydra_context: HydraContext
        self.task_function: TaskFunction
        self.config: DictConfig

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hydra.core.global_hydra import GlobalHydra

        from hpcflow.config import compose
        from hpcflow.slurm.executor import HetExecutor

        state = Singleton.get_state()
        GlobalHydra.instance().clear()  # hpcflow composes its own config
        executor = HetExecutor(
            Path(self.config.hydra.sweep.dir).absolute() / ".submitit" / "%j", compose(self.words)
        )
        Singleton.set_state(state)
        jobs: list[Any] = []
        for index, overrides in enumerate(job_overrides):
            while sum(not job.done(force_check=True) for job in jobs) >= self.at_once:
                time.sleep(2)  # asks Slurm for states
            jobs.append(executor.submit(self, list(overrides), initial_job_idx + index, state))
            log.info("job %s: %s", jobs[-1].job_id, " ".join(overrides))
        return [self._ended(job, overrides) for job, overrides in zip(jobs, job_overrides, strict=True)]

    def _ended(self, job: Any, overrides: Sequence[str]) -> JobReturn:
        try:
            return job.result()
        except Exception as error:
            log.error("job %s (%s) failed: %s", job.job_id, " ".join(overrides), error)
            failed = JobReturn(overrides=overrides, status=JobStatus.FAILED)
            failed.return_value = error
            return failed

    def __call__(self, overrides: list[str], index: int, state: dict[type, Singleton]) -> JobReturn:
        """One rank of one point."""
        import submitit

        Singleton.set_state(state)
        setup_globals()
        assert self.hydra_context.config_loader is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra.job):
            config.hydra.job.id = submitit.JobEnvironment().job_id
            config.hydra.job.num = index
        HydraConfig.instance().set_config(config)
        OmegaConf.set_readonly(config.hydra, None)
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        _ = done.return_value  # raises here what the function raised, so that the job fails
        return done
