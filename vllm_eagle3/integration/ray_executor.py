"""vLLM's Ray executor, for CPUs too, on a cluster that was looked at first.

    vllm serve TARGET --distributed-executor-backend \\
      vllm_eagle3.integration.ray_executor.RayExecutor

On GPUs it is vLLM's own, which `ray` also names; what is added there is the check of
the cluster (`ray_cluster`). vLLM refuses Ray on a CPU, but only because its platform
names no Ray resource; a worker then takes one CPU of the cluster.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_eagle3.fork_affinity import keep_affinity_over_forks

from . import ray_cluster

# Read by libraries when a process starts, so later settings of vLLM come too late.
START_VARIABLES = ("LD_PRELOAD", "OMP_NUM_THREADS", "KMP_BLOCKTIME", "KMP_TPAUSE")

# What a cluster that we start gives its workers; Ray's own 15 is for background work.
NICENESS_VARIABLE = "RAY_worker_niceness"

logger = logging.getLogger("vllm.vllm_eagle3")


class RayCPUWorkerProc(RayWorkerProc):
    """A worker without devices: Ray has no ids to hand out."""

    def __init__(self, *args: Any, **kwargs: Any):
        _take_usual_priority()  # first, for threads inherit it
        super().__init__(*args, **kwargs)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [0]


class RayExecutor(RayExecutorV2):
    """Workers as Ray actors; see the module."""

    _own_placement = False

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            keep_affinity_over_forks()
            os.environ.setdefault(NICENESS_VARIABLE, "0")
            ray.init(runtime_env=self.parallel_config.ray_runtime_env)
        # One that was given, as under Ray Serve, is not ours to count or to remove.
        self._own_placement = not (
            self.parallel_config.placement_group
            or ray.util.get_current_placement_group()
        )
        with _cpus_as_devices() if current_platform.is_cpu() else nullcontext():
            self._look_at_cluster(current_platform.ray_device_key)
            super()._init_executor()

    def _look_at_cluster(self, resource: str) -> None:
        nodes = ray_cluster.nodes_with(resource)
        ray_cluster.check_versions(nodes, ray_cluster.versions())
        if self._own_placement:
            ray_cluster.check_room(nodes, resource, self.parallel_config.world_size)

    def shutdown(self) -> None:
        """Give the cluster its resources back too, which vLLM keeps."""
        super().shutdown()
        placement = self.parallel_config.placement_group
        if placement and self._own_placement and ray.is_initialized():
            ray.util.remove_placement_group(placement)
            self.parallel_config.placement_group = None

    def _build_runtime_env(self) -> dict:
        runtime_env = super()._build_runtime_env()
        if current_platform.is_cpu():
            inherited = {v: os.environ[v] for v in START_VARIABLES if v in os.environ}
            runtime_env["env_vars"] = inherited | runtime_env["env_vars"]
        return runtime_env

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        if current_platform.is_cpu():
            # The bundle that holds the actor has taken the CPU.
            return {"num_gpus": 0}
        return RayExecutorV2._get_actor_resource_kwargs()


def _take_usual_priority() -> None:
    """Undo Ray's niceness: the engine core polls, and would take the worker's CPU."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        logger.warning(
            "vllm_eagle3: this worker runs at niceness %d, as Ray started it, and may"
            " not change it: slow where the engine shares its CPUs; start Ray's nodes"
            " with %s=0",
            os.getpriority(os.PRIO_PROCESS, 0),
            NICENESS_VARIABLE,
        )


@contextmanager
def _cpus_as_devices() -> Iterator[None]:
    """Meanwhile vLLM's CPU platform names a Ray resource, and workers are ours."""
    platform = type(current_platform)
    stock_key, stock_worker = platform.ray_device_key, ray_executor_v2.RayWorkerProc
    platform.ray_device_key = "CPU"
    ray_executor_v2.RayWorkerProc = RayCPUWorkerProc
    try:
        yield
    finally:
        platform.ray_device_key = stock_key
        ray_executor_v2.RayWorkerProc = stock_worker
