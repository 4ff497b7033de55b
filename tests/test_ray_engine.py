"""Engines on a Ray cluster of two nodes: the same text, and clean failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_run import EngineHandle, Run
from tests.models.random_llama import known_prompts, other_prompts
from tests.near_ties import differing
from tests.ray_nodes import two_nodes
from tests.tree_engine import tree_settings

pytest.importorskip("ray")
pytest.importorskip("vllm")

from vllm_eagle3.integration.engine_config import RAY_EXECUTOR as EXECUTOR

pytestmark = pytest.mark.engine

PROMPTS = known_prompts() + other_prompts()
# The monitor looks every five seconds.
FAILURE_SECONDS = 60


def greedy(**settings: Any) -> Any:
    from vllm import SamplingParams

    settings = {"max_tokens": 40} | settings
    return SamplingParams(temperature=0, ignore_eos=True, **settings)


@pytest.fixture(scope="module")
def plain(engine: Any) -> Run:
    """In this process, without speculation."""
    return engine("f1").run(PROMPTS, greedy(logprobs=2))


@pytest.fixture(scope="module")
def cluster(plain: Run) -> Iterator[Any]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_ranks(engine: Any, cluster: Any) -> EngineHandle:
    """One rank on each node, compared in every step."""
    settings = tree_settings(4, 6, 16)
    settings["additional_config"]["vllm_eagle3"]["check_ranks"] = True
    return engine(
        "f1",
        "h1",
        tensor_parallel_size=2,
        distributed_executor_backend=EXECUTOR,
        **settings,
    )


def run_equal(plain: Run, handle: EngineHandle) -> None:
    run = handle.run(PROMPTS, greedy())
    assert len(differing(plain, run.token_ids)) <= 2
    assert run.drafted > 0 and run.accepted > 0


def test_two_nodes_give_the_text_of_one_process(
    two_ranks: EngineHandle, plain: Run
) -> None:
    run_equal(plain, two_ranks)


def test_the_plugin_is_at_work_in_the_actors_of_both_nodes(
    two_ranks: EngineHandle,
) -> None:
    actors = two_ranks.llm.collective_rpc(describe_actor)
    assert len({node for node, _, _ in actors}) == 2
    assert {worker for _, worker, _ in actors} == {"Eagle3CPUWorker"}
    assert all(active for _, _, active in actors)


def describe_actor(worker: Any) -> tuple[str, str, bool]:
    """Its node, the class of its worker, and whether the hooks are active there."""
    import ray

    from vllm_eagle3.integration import plugin

    hooks = {status.name: status.active for status in plugin._status}
    node = ray.get_runtime_context().get_node_id()
    return node, type(worker.worker).__name__, hooks["engine hooks"]


def test_actors_have_the_priority_of_the_engine(two_ranks: EngineHandle) -> None:
    """Ray starts workers at niceness 15, where a polling engine takes their CPUs."""
    niceness = two_ranks.llm.collective_rpc(niceness_of_actor)
    assert niceness == [os.getpriority(os.PRIO_PROCESS, 0)] * 2


def niceness_of_actor(worker: Any) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_killed_worker_ends_the_engine_in_bounded_time(
    two_ranks: EngineHandle,
) -> None:
    """The last test of this engine."""
    import ray

    executor = two_ranks.llm.llm_engine.engine_core.engine_core.model_executor
    second = executor.ray_worker_handles[1].actor
    killer = threading.Timer(1.0, ray.kill, [second])
    begin = time.monotonic()
    killer.start()
    with pytest.raises(Exception):  # noqa: B017 (of vLLM, and not one class)
        two_ranks.run(PROMPTS, greedy(max_tokens=400))
    assert time.monotonic() - begin < FAILURE_SECONDS
    assert executor.is_failed


@pytest.mark.slow
def test_one_rank_gives_the_text_too(engine: Any, cluster: Any, plain: Run) -> None:
    handle = engine(
        "f1",
        "h1",
        num_speculative_tokens=4,
        distributed_executor_backend=EXECUTOR,
    )
    run_equal(plain, handle)


def test_more_ranks_than_the_cluster_has_cpus_are_refused(
    engine: Any, cluster: Any
) -> None:
    with pytest.raises(ValueError, match="4 workers need 4 CPU, the Ray cluster has 2"):
        engine(
            "f1", "h1", tensor_parallel_size=4, distributed_executor_backend=EXECUTOR
        )


def test_vllm_s_own_ray_is_refused_on_a_cpu_with_ours_as_the_remedy(
    engine: Any,
) -> None:
    with pytest.raises(ValueError, match=f'got "ray" on a CPU.*want {EXECUTOR}'):
        engine("f1", "h1", distributed_executor_backend="ray")


OTHER_RELEASE = "Metadata-Version: 2.1\nName: vllm-eagle3\nVersion: 9.9\n"
# Python runs it at start. What is installed in the environment is hidden.
WITHOUT_PACKAGE = """
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_distributions
PathFinder.find_distributions = lambda context: (
    () if context.name == "vllm-eagle3" else found(context)
)
sys.modules["vllm_eagle3"] = None
"""


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("vllm_eagle3-9.9.dist-info/METADATA", OTHER_RELEASE, r"9\.9"),
        ("sitecustomize.py", WITHOUT_PACKAGE, "not installed"),
    ],
    ids=["another release", "none"],
)
def test_a_node_with_another_release_or_none_is_refused(
    file: str, text: str, said: str, engine: Any, cluster: Any, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    odd = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(ValueError, match=rf"node .*: vllm-eagle3 is {said}, want"):
            engine("f1", "h1", distributed_executor_backend=EXECUTOR)
    finally:
        cluster.remove_node(odd)
