"""Replies from several engines on a local Ray, as rows of one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from vllm_eagle3.engine import EngineSpec, Generation, Sampling
from vllm_eagle3.train.ray_engines import RayEngines
from vllm_eagle3.train.regen import Ask, write_replies

pytest.importorskip("ray.data")
NAME = "tests.test_train_ray:Counting"


class Counting:
    """Answers a prompt [.., n] with n + 1, n + 2...; the last request first."""

    def __init__(self, spec: EngineSpec) -> None:
        assert spec.target == "a target"

    def stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]]
    ) -> Iterator[tuple[int, Generation]]:
        for number, (ids, sampling) in reversed(list(enumerate(requests))):
            first = ids[-1] + 1
            tokens = tuple(range(first, first + sampling.max_tokens))
            yield number, Generation(tokens)


@pytest.fixture(scope="module")
def engines() -> Iterator[RayEngines]:
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    yield RayEngines(NAME, EngineSpec("a target"), 2)
    ray.shutdown()


def test_every_prompt_has_its_own_reply_and_a_stopped_run_goes_on(
    engines: RayEngines, tmp_path: Path
) -> None:
    asks = [
        Ask((7, 10 * n), Sampling(0.5, 1 + n % 4), f"kind {n % 3}") for n in range(30)
    ]
    out = tmp_path / "rows.jsonl"
    done: list[tuple[int, int]] = []
    assert write_replies(engines, asks[:11], out, lambda *_: None) == 26
    with out.open("a") as file:
        file.write('{"kind": "torn')
    write_replies(engines, asks, out, lambda *progress: done.append(progress))
    assert done[0] == (12, 30) and done[-1] == (30, 30)
    rows = {row["ids"][1]: row for row in map(json.loads, out.open())}
    assert len(rows) == 30
    for ask in asks:
        row, first = rows[ask.ids[1]], ask.ids[1] + 1
        tokens = ask.sampling.max_tokens
        assert row["ids"] == [*ask.ids, *range(first, first + tokens)]
        assert row["spans"] == [[2, 2 + tokens, 0.5]] and row["kind"] == ask.kind


def test_no_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="ray: got 0 engines"):
        RayEngines(NAME, EngineSpec("a target"), 0)
