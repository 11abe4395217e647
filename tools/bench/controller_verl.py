"""The controller benchmark on verl's RayWorkerGroup, in an interpreter that has verl and Ray (see
controller.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import time

os.environ.update(
    OMP_NUM_THREADS="1",
    CUDA_VISIBLE_DEVICES="",
    RAY_DEDUP_LOGS="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)

import ray
import torch
from measure import FLOAT_COLUMNS, INT_COLUMNS, ROW_TOKENS, measure, print_result
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class Probe(Worker):
    """The same three methods as in controller_hpcflow.py, under verl's dispatch modes."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.made: dict[int, DataProto] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, index: DataProto) -> DataProto:
        rows = len(index)
        if rows not in self.made:
            shape = (rows, ROW_TOKENS)
            self.made[rows] = {
                **{name: torch.ones(shape, dtype=torch.int64) for name in INT_COLUMNS},
                **{name: torch.ones(shape) for name in FLOAT_COLUMNS},
            }
        return DataProto.from_dict(tensors=self.made[rows])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def consume(self, data: DataProto) -> float:
        return float(data.batch["values"][:, 0].sum())


class Verl:
    """See `measure.Backend`. A's output is collected by the controller and dispatched to B: verl's blocking
    path, which for this batch is not slower than its futures."""

    def __init__(self, workers: int, groups: int) -> None:
        ray.init(
            num_cpus=4 * workers * groups,
            object_store_memory=3 << 30,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        self.groups = [self._group(workers) for _ in range(groups)]
        for group in self.groups:
            group.ping()

    def _group(self, workers: int) -> RayWorkerGroup:
        pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Probe), device_name="cpu"
        )

    def ping(self) -> None:
        self.groups[0].ping()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def move(self, rows: int) -> float:
        index = DataProto.from_dict(tensors={"index": torch.arange(rows)})
        return sum(self.groups[1].consume(self.groups[0].make(index)))

    def stop(self) -> None:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("--workers", int), ("--calls", int), ("--repeats", int)):
        parser.add_argument(name, type=kind, required=True)
    parser.add_argument("--mb", type=float, nargs="*", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = Verl(args.workers, 2 if args.mb else 1)
    print_result(measure(backend, args.calls, args.mb, args.repeats))
    backend.stop()


if __name__ == "__main__":
    main()
