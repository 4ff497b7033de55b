"""Engines on the machines of a Ray cluster, driven as if they were one.

Ray Data hands out the requests, restarts an engine that dies and asks what it had not
answered again. Rows are still written in one place, so stopping and going on is the
same as with one engine.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..engine import Engine, EngineSpec, Generation, Sampling

# Requests an actor answers in one go: what a restart may repeat.
_BATCH = 256


class RayEngines:
    """`Engine.stream` over `count` engines; the part of `Engine` that writing needs.

    `RAY_ADDRESS` names a running cluster; without it Ray starts one on this machine.

    Args:
        engine: `module:class` of the engine, made in each actor from `spec`.
        count: engines at a time; each has a GPU of its own where the cluster has any.
    """

    def __init__(self, engine: str, spec: EngineSpec, count: int) -> None:
        if count < 1:
            raise ValueError(f"ray: got {count} engines, want at least 1")
        self.engine, self.spec, self.count = engine, spec, count

    def stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]]
    ) -> Iterator[tuple[int, Generation]]:
        """As `Engine.stream`; requests are read to the end first.

        Raises:
            ValueError: Ray is not installed.
        """
        items = [
            {"request": json.dumps([number, list(ids), asdict(sampling)])}
            for number, (ids, sampling) in enumerate(requests)
        ]
        if not items:
            return
        ray = _ray()
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        batch = min(_BATCH, -(-len(items) // self.count))
        replies = ray.data.from_items(items).map_batches(
            _Answerer,
            fn_constructor_args=(self.engine, self.spec),
            batch_size=batch,
            concurrency=min(self.count, -(-len(items) // batch)),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in replies.iter_rows():
            number, token_ids = json.loads(row["reply"])
            yield number, Generation(tuple(token_ids))


class _Answerer:
    """One engine in an actor; a batch of requests to a batch of replies."""

    def __init__(self, engine: str, spec: EngineSpec) -> None:
        module, _, name = engine.partition(":")
        self.engine: Engine = getattr(importlib.import_module(module), name)(spec)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        requests = [json.loads(text) for text in batch["request"]]
        numbers = [number for number, _, _ in requests]
        pairs = ((ids, Sampling(**sampling)) for _, ids, sampling in requests)
        replies = [
            json.dumps([numbers[place], list(reply.token_ids)])
            for place, reply in self.engine.stream(pairs)
        ]
        return {"reply": replies}


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(
            f"ray: cannot be imported ({error}); pip install 'ray[data]', or leave "
            "out --ray-engines"
        ) from error
    return ray
