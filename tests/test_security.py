"""Files of others are data: nothing in them runs, and nothing beside them is written.

Heads and targets are read from safetensors alone; no pickle is opened, no code of a
checkpoint is imported, and no path that a config names is touched.
"""

from __future__ import annotations

import ast
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.bigram import VOCAB
from tests.models.head_variants import edit_head

Models = Callable[[str], Path]
PACKAGE = Path(__file__).parents[1] / "vllm_eagle3"


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def trapped_head(models: Models, tmp_path: Path) -> Path:
    """H2 with a pickle, code, and paths in its config; each would leave a mark."""
    folder = tmp_path / "head"
    shutil.copytree(models("h2"), folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "pickle")))
    (folder / "modeling_trap.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'code')!r}).touch()\n"
        "class Config: pass\nclass Model: pass\n"
    )
    edit_head(
        folder,
        {
            "auto_map": {
                "AutoConfig": "modeling_trap.Config",
                "AutoModelForCausalLM": "modeling_trap.Model",
            },
            "_name_or_path": str(tmp_path / "named"),
            "output_dir": str(tmp_path / "output"),
        },
    )
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.engine
def test_an_engine_runs_and_writes_nothing_of_a_head_s(
    trapped_head: Path, models: Models, engine: Any
) -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    folders = [trapped_head, models("f2")]
    before = [snapshot(folder) for folder in folders]
    handle = engine("f2", trapped_head)
    run = handle.run([[9, 65]], SamplingParams(temperature=0, max_tokens=17))
    assert run.accepted == run.drafted > 0
    assert [snapshot(folder) for folder in folders] == before
    assert {path.name for path in trapped_head.parent.iterdir()} == {"head"}
    assert handle.llm.llm_engine.vllm_config.model_config.trust_remote_code is False


def test_a_head_in_a_pickle_is_refused_unread(
    trapped_head: Path, models: Models
) -> None:
    from vllm_eagle3.head_io import read_head

    (trapped_head / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        read_head(trapped_head, models("f2"))
    assert not (trapped_head.parent / "pickle").exists()


def test_our_own_reader_runs_and_writes_nothing_of_a_head_s(
    trapped_head: Path, models: Models
) -> None:
    from vllm_eagle3.head_io import read_head

    before = snapshot(trapped_head)
    assert read_head(trapped_head, models("f2")).config.vocab_size == VOCAB
    assert snapshot(trapped_head) == before
    assert {path.name for path in trapped_head.parent.iterdir()} == {"head"}


def calls(tree: ast.AST) -> list[str]:
    """Dotted names of everything that is called."""
    return [
        ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_source_file_unpickles_trusts_code_or_listens(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for name in calls(tree):
        first, last = name.split(".")[0], name.split(".")[-1]
        assert first not in ("pickle", "cloudpickle", "marshal"), name
        assert name not in ("eval", "exec"), name
        # The soak asks the system for a free port, for the server that it starts.
        assert last not in ("bind", "listen") or path.parent.name == "soak", name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = {
                keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords
            }
            assert safe.get("weights_only") == "True", path
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) != "True", path
