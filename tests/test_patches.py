"""Each patch: the defect on stock vLLM, cured at run time, cured by the diff."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_eagle3.integration import fingerprints, patches
from vllm_eagle3.integration.patches import PATCHES

REPOSITORY = Path(__file__).parents[1]
DIFFS = REPOSITORY / "patches" / "vllm-0.32.0"
NAMES = [patch.name for patch in PATCHES]

on_cpu = pytest.mark.skipif(
    not PATCHES[0].concerns(), reason="these defects are of vLLM's CPU kernels"
)


def _probe(models, *flags: str, pythonpath: Path | None = None) -> dict[str, str]:
    paths = [str(REPOSITORY)] + ([str(pythonpath)] if pythonpath else [])
    environment = os.environ | {
        "VLLM_EAGLE3": "0",
        "PYTHONPATH": os.pathsep.join(reversed(paths)),
    }
    [root] = {models(name).parent for name in ("f1", "f2", "h2")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.patch_probes", str(root), *flags],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock(models):
    return _probe(models)


@pytest.fixture(scope="module")
def patched(models):
    return _probe(models, "--patched")


@pytest.fixture(scope="module")
def with_diffs(models, tmp_path_factory):
    overlay = tmp_path_factory.mktemp("overlay")
    _link_vllm(overlay)
    for diff in sorted(DIFFS.glob("*.patch")):
        _patch(overlay, diff)
    return _probe(models, pythonpath=overlay)


def _link_vllm(overlay: Path) -> None:
    """A vllm package of links to the installed one; files to be patched are copies."""
    root = fingerprints.vllm_root()
    touched = {
        line.removeprefix("+++ b/vllm/").strip()
        for diff in DIFFS.glob("*.patch")
        for line in diff.read_text().splitlines()
        if line.startswith("+++ b/")
    }
    folders = {parent for path in touched for parent in Path(path).parents}
    for folder in sorted(folders):
        (overlay / "vllm" / folder).mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for entry in (root / folder).iterdir():
            relative = folder / entry.name
            copy = overlay / "vllm" / relative
            if str(relative) in touched:
                shutil.copy(entry, copy)
            elif relative not in folders and entry.name != "__pycache__":
                copy.symlink_to(entry)


def _patch(overlay: Path, diff: Path) -> None:
    subprocess.run(
        ["patch", "-p1", "--forward", "--fuzz=0", "-i", str(diff)],
        cwd=overlay,
        check=True,
        capture_output=True,
    )


@on_cpu
@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_stock_vllm_has_the_defect(stock, name):
    assert stock[name] != "ok"


@on_cpu
@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_run_time_patch_cures_it(patched, name):
    assert patched[name] == "ok"


@on_cpu
@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_diff_cures_it(with_diffs, name):
    assert with_diffs[name] == "ok"


@on_cpu
@pytest.mark.engine
def test_engine_law_fails_on_stock_vllm_and_holds_with_the_patches(stock, patched):
    assert stock["sampled-law"].startswith("chi-squared excess")
    assert patched["sampled-law"] == "ok"


def test_every_patch_has_its_diff_and_the_reverse():
    assert {patch.diff for patch in PATCHES} == {p.name for p in DIFFS.glob("*.patch")}


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_diff_says_where_it_comes_from_and_when_it_goes(patch):
    header = (DIFFS / patch.diff).read_text().partition("\n--- a/")[0]
    for field in ("Subject:", "Reason:", "Remove:", "Test:"):
        assert f"{field} " in header
    assert f"Upstream: {patch.upstream}" in header


@on_cpu
def test_patches_apply_once_and_for_good():
    first, second = patches.apply_all(), patches.apply_all()
    assert first == second
    assert [(status.name, status.active) for status in first] == [
        (name, True) for name in NAMES
    ]


@on_cpu
def test_a_patch_that_is_not_needed_or_breaks_is_reported(monkeypatch):
    def fail():
        raise AttributeError("no such kernel")

    table = [
        PATCHES[0].__class__(**(vars(PATCHES[0]) | changes))
        for changes in (
            {"name": "elsewhere", "concerns": lambda: False},
            {"name": "fixed", "applies": lambda: False},
            {"name": "broken", "applies": fail},
        )
    ]
    monkeypatch.setattr(patches, "PATCHES", tuple(table))

    statuses = patches.apply_all()

    assert [status.active for status in statuses] == [False, False, False]
    assert [status.reason for status in statuses] == [
        "not needed on this platform",
        "not needed: this vLLM passes the self-test",
        "failed: AttributeError: no such kernel",
    ]


def test_baselines_get_what_keeps_their_text_right_and_no_more():
    names = {patch.name for patch in PATCHES if patch.for_baselines}
    assert names == {
        "cpu-expand-batch-to-tokens",
        "cpu-seeded-chunked-prefill",
        "cpu-lora-base-rows",
        "cpu-uneven-exchange",
    }
