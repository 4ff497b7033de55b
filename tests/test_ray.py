"""The Ray cluster is looked at before an engine starts: packages, and room."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from vllm_eagle3.integration.ray_cluster import (
    PACKAGES,
    Node,
    check_room,
    check_versions,
    versions,
)

HERE = {"vllm-eagle3": "1.0", "vllm": "0.32.0", "torch": "2.13", "transformers": "5"}


def node(number: int, cpus: float = 4, **changes: str) -> Node:
    found = HERE | {name.replace("_", "-"): v for name, v in changes.items()}
    return Node(f"{number}" * 40, f"10.0.0.{number}", {"CPU": cpus}, found)


def test_this_process_knows_its_packages() -> None:
    found = versions()
    assert set(found) == set(PACKAGES)
    assert all(found.values())


def test_equal_nodes_with_room_are_taken() -> None:
    nodes = [node(1), node(2)]
    check_versions(nodes, HERE)
    check_room(nodes, "CPU", 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm_eagle3": ""}, "vllm-eagle3 is not installed, want 1.0"),
        ({"vllm_eagle3": "0.9"}, "vllm-eagle3 is 0.9, want 1.0"),
        ({"vllm": "0.33.0"}, "vllm is 0.33.0, want 0.32.0"),
    ],
)
def test_mixed_packages_are_refused_with_node_and_remedy(
    changes: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        check_versions([node(1), node(2, **changes)], HERE)
    message = str(refusal.value)
    assert f"node 10.0.0.2 (22222222): {said}" in message
    assert "10.0.0.1" not in message
    assert "pip install" in message


def test_too_small_a_cluster_is_refused_with_nodes_and_remedy() -> None:
    with pytest.raises(ValueError) as refusal:
        check_room([node(1, 2), node(2, 1)], "CPU", 4)
    message = str(refusal.value)
    assert "4 workers need 4 CPU, the Ray cluster has 3" in message
    assert "node 10.0.0.1 (11111111): 2" in message
    assert "lower tensor_parallel_size" in message
