"""Tables, plots and pages, from the results of a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench_helpers import fake_options
from tests.fake_engine import NAME
from vllm_eagle3.bench.command import run_bench_command, run_report_command
from vllm_eagle3.bench.page import markdown, write_into
from vllm_eagle3.bench.plots import draw_all, draw_speed_up
from vllm_eagle3.bench.tables import all_tables, gain_ends
from vllm_eagle3.engine import EngineMode

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark of two tasks, two batch sizes, two temperatures."""
    folder = tmp_path_factory.mktemp("pages")
    prompts = folder / "tasks.jsonl"
    prompts.write_text(
        '{"category": "chat", "turns": ["a"]}\n{"category": "code", "turns": ["b"]}\n'
    )
    options = fake_options(
        folder,
        prompts=(str(prompts),),
        batch="1,2",
        temperature="0,1",
        repeats=5,
        mode=EngineMode(step_times=True),
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        (folder / "printed").open("w") as file,
    ):
        patch.setenv("PYTHONPATH", str(ROOT))
        run_bench_command(options, NAME, Console(file=file, width=120))
    return options.out


@pytest.fixture
def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    found["reliability"] = [
        {
            "temperature": 0,
            "bins": [{"nodes": 7, "predicted": 0.5, "accepted": 0.25}],
            "expected_calibration_error": 0.25,
        }
    ]
    return found


def test_plots_and_page_lie_beside_the_results(out: Path) -> None:
    names = {path.name for path in out.iterdir()}
    plots = {"speed_up_by_batch.png", "acceptance_by_depth.png", "step_times.png"}
    assert names >= {"results.json", "report.html", "acceptance_by_task.png", *plots}
    assert all((out / name).read_bytes().startswith(PNG) for name in plots)


def test_page_needs_no_other_file(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 4
    assert page.count("src=") == 4 and "href" not in page
    assert "Where the advantage ends" in page
    assert "prompt_ids_sha256" in page


def test_every_figure_is_drawn(results: dict[str, Any]) -> None:
    plots = draw_all(results)
    assert len(plots) == 5
    assert all(png.startswith(PNG) for png in plots.values())


def test_crossover_is_marked(results: dict[str, Any]) -> None:
    runs = [r for r in results["runs"] if r["temperature"] == 0 and "counts" in r]
    for run, speed_up in zip(runs, (1.5, 0.5), strict=True):
        run.update(speed_up=speed_up, speed_up_interval=[speed_up - 0.1, speed_up])
    (panel,) = draw_speed_up({"runs": runs}).axes
    stars = [line for line in panel.lines if line.get_marker() == "*"]
    # 1.5 at batch 1 and 0.5 at batch 2 meet 1 half way, on a log scale.
    assert stars[0].get_xdata()[0] == pytest.approx(2**0.5)


def test_tables_hold_what_was_measured(results: dict[str, Any]) -> None:
    tables = {table.title.split(",")[0]: table for table in all_tables(results)}
    tasks = tables["Acceptance length by task"]
    assert tasks.header == ("method", "chat", "code")
    assert tasks.rows[0][1].startswith("2.00")
    depths = tables["Acceptance at each depth"]
    assert depths.rows == (("chain:2", "0.50", "1.00"),)
    steps = tables["Milliseconds of a step"]
    assert steps.rows[0][2:] == ("2.00", "20.00", "0.00", "1.00", "23.00")
    confidence = tables["Confidence of the head against acceptance"]
    assert confidence.rows == (("0", "7", "0.250"),)


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [
        ({1: 1.5, 4: 0.5}, "at a batch of about 2"),
        ({1: 1.5, 4: 1.1}, "not by 4"),
        ({1: 0.9, 4: 0.8}, "pays at none of 1 to 4"),
        ({1: 0.9}, "pays at none of 1"),
        ({1: None, 4: None}, "not known: too few repeats"),
    ],
)
def test_where_the_advantage_ends(speed_ups: dict, expected: str) -> None:
    runs = [{"batch": b, "speed_up": value} for b, value in speed_ups.items()]
    assert gain_ends(runs) == expected


def test_markdown_says_what_was_run(results: dict[str, Any]) -> None:
    text = markdown(results)
    assert "2 prompts, up to 6 new tokens, 5 interleaved repeats" in text
    assert "| method | 1 | 2 |" in text


def test_report_goes_between_the_marks(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = (f"<!-- {word}: vllm-eagle3 report -->" for word in ("begin", "end"))
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    with (tmp_path / "printed").open("w") as file:
        run_report_command(out, page, Console(file=file))
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n") and text.endswith(f"{end}\nafter\n")
    assert "old" not in text and "Where the advantage ends" in text


def test_file_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="wants one line <!-- begin"):
        write_into(page, "tables")
    assert page.read_text() == "text"


def test_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report: cannot read"):
        run_report_command(tmp_path, None, Console())


def test_a_servers_results_have_no_report(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"server": []}')
    with pytest.raises(ValueError, match=r"results\.json is of a server"):
        run_report_command(tmp_path, None, Console())


def test_docs_page_has_its_marks(results: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "throughput.md"
    page.write_text((ROOT / "docs" / "throughput.md").read_text())
    write_into(page, markdown(results))
    assert "chain:2" in page.read_text()
