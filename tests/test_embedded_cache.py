"""Whole or absent: what a cached directory may look like after any mishap."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_eagle3 import whole_dir
from vllm_eagle3.whole_dir import build, is_whole

RECIPE = {"version": 1}


def fill(content: Path, scratch: Path) -> None:
    (scratch / "download").write_text("temporary")
    (content / "weights").write_text("right")


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if not p.name.endswith(".lock")}


def test_a_build_is_whole_and_leaves_nothing_beside_it(tmp_path):
    place = tmp_path / "deep" / "model"

    build(place, RECIPE, fill, 0)

    assert is_whole(place, RECIPE)
    assert names(place) == {"weights", whole_dir.MANIFEST}
    assert names(place.parent) == {"model"}


def test_a_whole_directory_is_not_built_again(tmp_path):
    build(tmp_path / "model", RECIPE, fill, 0)

    def refuse(content, scratch):
        raise AssertionError("built again")

    build(tmp_path / "model", RECIPE, refuse, 0)


@pytest.mark.parametrize("failure", [ValueError("no network"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(tmp_path, failure):
    def fail(content, scratch):
        fill(content, scratch)
        raise failure

    with pytest.raises(type(failure)):
        build(tmp_path / "model", RECIPE, fail, 0)
    assert names(tmp_path) == set()


def test_what_a_killed_build_left_is_cleared(tmp_path):
    (tmp_path / ".model.partial-x1" / "content").mkdir(parents=True)

    build(tmp_path / "model", RECIPE, fill, 0)

    assert names(tmp_path) == {"model"}


@pytest.mark.parametrize("text", ["wrong", "longer than it was"])
def test_a_changed_file_is_noticed_and_renewed(tmp_path, text):
    place = tmp_path / "model"
    build(place, RECIPE, fill, 0)
    (place / "weights").write_text(text)

    assert not is_whole(place, RECIPE)
    build(place, RECIPE, fill, 0)

    assert (place / "weights").read_text() == "right"
    assert names(tmp_path) == {"model"}


def test_another_recipe_renews(tmp_path):
    place = tmp_path / "model"
    build(place, RECIPE, fill, 0)

    build(place, {"version": 2}, fill, 0)

    assert is_whole(place, {"version": 2})


@pytest.mark.parametrize("manifest", ["", "[]", '{"files": 3}'])
def test_a_broken_manifest_is_not_whole(tmp_path, manifest):
    (tmp_path / whole_dir.MANIFEST).write_text(manifest)

    assert not is_whole(tmp_path, RECIPE)


def test_files_of_others_are_never_replaced(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")

    with pytest.raises(ValueError, match=r"model: holds something .* --out DIR"):
        build(tmp_path / "model", RECIPE, fill, 0)
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_too_small_a_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=10 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    with pytest.raises(ValueError, match=r"10 MiB free, want 500 MiB"):
        build(tmp_path / "model", RECIPE, fill, 500 << 20)
    assert names(tmp_path) == set()


def test_a_disk_that_fills_up_meanwhile_is_a_clear_error(tmp_path):
    def full(content, scratch):
        fill(content, scratch)
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"No space left on device.*XDG_CACHE_HOME"):
        build(tmp_path / "model", RECIPE, full, 0)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("call", "nth"), [("mkdir", 2), ("fsync", 1), ("fsync", 4), ("replace", 2)]
)
def test_a_disk_that_is_full_at_any_step_loses_nothing(
    tmp_path, monkeypatch, call, nth
):
    """Files are flushed and renamed; there the kernel says it at the latest."""
    build(tmp_path / "model", RECIPE, fill, 0)
    real, calls = getattr(os, call), []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ValueError, match=r"No space left on device.*XDG_CACHE"):
            build(tmp_path / "model", {"version": 2}, fill, 0)

    # What was there is there, unless the new one has been put in its place already.
    assert is_whole(tmp_path / "model", {"version": 2} if nth == 4 else RECIPE)
    assert names(tmp_path) == {"model"}
    build(tmp_path / "model", {"version": 2}, fill, 0)
    assert is_whole(tmp_path / "model", {"version": 2})


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ValueError, match=r"cannot be written .* --out DIR"):
        build(tmp_path / "file" / "model", RECIPE, fill, 0)


def slow_fill(content: Path, scratch: Path) -> None:
    with (content.parents[1] / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.5)
    fill(content, scratch)


def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "model", RECIPE, slow_fill, 0)
    processes = [context.Process(target=build, args=arguments) for _ in range(2)]

    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "x"
    assert is_whole(tmp_path / "model", RECIPE)
