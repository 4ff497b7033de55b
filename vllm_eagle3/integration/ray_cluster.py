"""A Ray cluster before an engine starts on it: same packages everywhere, enough room.

Ray itself starts workers wherever there is room. A node with another release of vLLM
or of this package then fails late, inside an actor, or computes something else; a
cluster that is too small lets vLLM wait for half an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PACKAGES = ("vllm-eagle3", "vllm", "torch", "transformers")
# Starting a worker process on a node takes seconds, more on a busy one.
ANSWER_SECONDS = 120


@dataclass(frozen=True)
class Node:
    """A node of the cluster, its resources, and its packages ("" for what it lacks)."""

    id: str
    address: str
    resources: Mapping[str, float]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return f"node {self.address} ({self.id[:8]})"


def nodes_with(resource: str) -> list[Node]:
    """Ask the nodes that can hold workers for their packages.

    Args:
        resource: Ray's name of what a worker needs, such as GPU or CPU.

    Raises:
        ValueError: a node that does not answer.
    """
    alive = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(resource)]
    answers = {n["NodeID"]: _ask(n["NodeID"]) for n in alive}
    return [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            n["Resources"],
            _answer(n, answers[n["NodeID"]]),
        )
        for n in alive
    ]


def check_versions(nodes: Iterable[Node], here: Mapping[str, str]) -> None:
    """Compare every node with the process that starts the engine.

    Raises:
        ValueError: naming each node, each package and the remedy.
    """
    wrong = [
        f"{node}: {package} is {node.versions[package] or 'not installed'}, want "
        f"{wanted} as where the engine starts"
        for node in nodes
        for package, wanted in here.items()
        if node.versions[package] != wanted
    ]
    if wrong:
        raise ValueError(
            f"Ray cluster with mixed packages: {'; '.join(wrong)}. Install the same "
            "releases on every node (pip install PACKAGE==VERSION), then restart Ray "
            "there"
        )


def check_room(nodes: Iterable[Node], resource: str, wanted: int) -> None:
    """Compare what the cluster has in all with what the engine needs.

    Raises:
        ValueError: naming the nodes and the remedy.
    """
    nodes = list(nodes)
    found = sum(node.resources.get(resource, 0) for node in nodes)
    if found >= wanted:
        return
    each = ", ".join(f"{n}: {n.resources.get(resource, 0):g}" for n in nodes) or "none"
    raise ValueError(
        f"tensor_parallel_size x pipeline_parallel_size: {wanted} workers need "
        f"{wanted} {resource}, the Ray cluster has {found:g} ({each}); add nodes with "
        "`ray start --address=...`, or lower tensor_parallel_size"
    )


def versions() -> dict[str, str]:
    """Versions of PACKAGES in this process, "" for one that is not installed."""
    return _version_reader()()


def _version_reader() -> Callable[[], dict[str, str]]:
    """A nested function travels by value, so it runs where this package is missing."""
    packages = PACKAGES

    def read() -> dict[str, str]:
        from importlib import metadata

        found = {}
        for package in packages:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = ""
        return found

    return read


def _ask(node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_version_reader())
    return task.options(num_cpus=0, scheduling_strategy=strategy).remote()


def _answer(node: Mapping[str, Any], reference: Any) -> dict[str, str]:
    try:
        return ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise ValueError(
            f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]}): no answer in "
            f"{ANSWER_SECONDS} s; look at `ray status`, and restart Ray on that node"
        ) from None
