"""A Ray cluster of two nodes on this machine, one CPU each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 100 * 2**20
# Ray gives up on a node or a worker after 30 and 60 s, which a busy machine may need.
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start the cluster and join it; `cluster.add_node` may add more."""
    os.environ.update(PATIENCE)
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes(timeout=240)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
