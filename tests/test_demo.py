import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench_helpers import fake_head, fake_target
from tests.fake_engine import NAME
from vllm_eagle3.bench.command import DEMO_PROMPTS, run_demo_command
from vllm_eagle3.prompts import read_prompts

ROOT = Path(__file__).parents[1]
COMMON = {"tokens_per_s", "acceptance_length", "new_tokens", "seconds"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory):
    """The demo over a fake engine: (content of demo.json, what was printed)."""
    folder = tmp_path_factory.mktemp("demo")
    target = fake_target(folder / "target", context=2048)
    head = fake_head(folder / "near")
    out = folder / "demo.json"
    with (
        pytest.MonkeyPatch.context() as patch,
        (folder / "printed").open("w") as file,
    ):
        patch.setenv("PYTHONPATH", str(ROOT))
        console = Console(file=file, width=100)
        run_demo_command(str(target), str(head), out, NAME, console)
    return json.loads(out.read_text()), (folder / "printed").read_text(), folder


def test_methods_and_fields(demo) -> None:
    methods = demo[0]["methods"]
    assert set(methods) == {"off", "chain:3", "ours:auto"}
    assert all(set(fields) >= COMMON for fields in methods.values())
    for name in ("chain:3", "ours:auto"):
        assert set(methods[name]) >= {"identical", "near_ties"}


def test_texts_are_accounted_for(demo) -> None:
    prompts = len(read_prompts(DEMO_PROMPTS))
    chain = demo[0]["methods"]["chain:3"]
    assert chain["near_ties"] > 0
    assert chain["identical"] + chain["near_ties"] + chain["different"] == prompts


def test_table_and_verdict_are_printed(demo) -> None:
    printed = demo[1]
    assert "acceptance length" in printed
    # An engine that answers at once is timed too roughly for a speed-up.
    assert "Speculation" in printed or "would be noise" in " ".join(printed.split())


def test_progress_is_printed_without_a_terminal(demo) -> None:
    assert "off: 12/12" in demo[1]


def test_full_results_and_logs_are_kept(demo) -> None:
    names = {path.name for path in (demo[2] / "demo_run").iterdir()}
    assert names == {"results.json", "off.log", "chain-3.log", "ours-auto.log"}


def test_out_that_is_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="want the name of a file"):
        run_demo_command("smollm2", "smollm2", tmp_path, NAME, Console())
