"""Fingerprints see a changed function, and nothing else."""

from __future__ import annotations

import pytest

from vllm_eagle3.integration import fingerprints
from vllm_eagle3.integration.fingerprints import OVERRIDDEN, check, fingerprint

SOURCE = '''
class Runner:
    def step(self, x: int) -> int:
        """Double x."""
        y = 2 * x  # twice
        return y

    def other(self):
        return 1
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "runner.py").write_text(SOURCE)
    return tmp_path


def _after(root, old, new, function="vllm.v1.runner:Runner.step"):
    before = fingerprint(function, root)
    path = root / "v1" / "runner.py"
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    return before, fingerprint(function, root)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 * x", "3 * x"),
        ("x: int)", "x: int = 1)"),
        ("    def step", "    @property\n    def step"),
    ],
)
def test_an_edited_function_is_seen(root, old, new):
    before, after = _after(root, old, new)
    assert before is not None
    assert before != after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # twice", ""),
        ("2 * x", "(2  *  x)"),
        ('"""Double x."""', '"""Twice x."""'),
        ("return 1", "return 2"),
    ],
)
def test_comments_layout_docstrings_and_neighbours_are_not(root, old, new):
    before, after = _after(root, old, new)
    assert before == after


def test_a_missing_function_has_no_fingerprint(root):
    assert fingerprint("vllm.v1.runner:Runner.gone", root) is None
    assert fingerprint("vllm.v1.nothing:Runner.step", root) is None


def test_installed_vllm_is_as_recorded():
    pytest.importorskip("vllm")
    assert check() == []


def test_check_names_what_changed(tmp_path):
    pytest.importorskip("vllm")
    function = OVERRIDDEN[0]
    relative = "/".join(function.partition(":")[0].split(".")[1:]) + ".py"
    copy = tmp_path / relative
    copy.parent.mkdir(parents=True)
    source = (fingerprints.vllm_root() / relative).read_text()
    name = function.rpartition(":")[2].rpartition(".")[2]
    copy.write_text(source.replace(f"def {name}(", f"def {name}(added, "))

    changed = check([function], root=tmp_path)

    assert [(m.function, m.problem) for m in changed] == [(function, "has changed")]
    assert changed[0].version == fingerprints.vllm_version()


def test_check_names_what_was_never_recorded_or_is_gone():
    pytest.importorskip("vllm")
    names = ["vllm.utils.cpu_triton_utils:_ensure_int64", "vllm.envs:no_such_function"]
    problems = [m.problem for m in check(names)]
    assert problems == ["was never recorded", "is gone"]


def test_recording_lists_changes(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(fingerprints, "RECORD", tmp_path / "record.json")
    assert fingerprints.record() == [f"new      {f}" for f in OVERRIDDEN]
    assert fingerprints.record() == []
    assert check() == []
