"""Measuring a server: what the load generator is asked for, and what is made of it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_eagle3.bench.server import LOG_NAME, ServerOptions, run_server_command
from vllm_eagle3.cli import main


class FakeLoad:
    """A load generator; `failing` requests of each run fail."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.asked: list[dict[str, str]] = []

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        print("pages of figures")
        pairs = list(arguments[:-1])
        asked = dict(zip(pairs[::2], pairs[1::2], strict=True))
        self.asked.append(asked)
        number = len(self.asked)
        return {
            "completed": int(asked["--num-prompts"]) - self.failing,
            "output_throughput": 100.0 * number,
            **{f"{kind}_ttft_ms": 10.0 * number for kind in ("median", "p99")},
            **{f"{kind}_tpot_ms": 1.0 * number for kind in ("median", "p99")},
        }


def options(folder: Path, **changes: Any) -> ServerOptions:
    prompts = folder / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    return ServerOptions(
        **{
            "url": "http://host:1/",
            "prompts": (str(prompts),),
            "out": folder / "out",
            "batch": "1,4",
            **changes,
        }
    )


def run(options: ServerOptions, load: FakeLoad) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=100)
    results = run_server_command(options, load, console)
    return results, console.file.getvalue()  # type: ignore[attr-defined]


def test_every_number_of_clients_is_measured(tmp_path: Path) -> None:
    load = FakeLoad()
    run(options(tmp_path, temperature="0,1"), load)
    found = [(a["--temperature"], a["--max-concurrency"]) for a in load.asked]
    assert found == [("0", "1"), ("0", "4"), ("1", "1"), ("1", "4")]
    # Enough for every client to come back.
    assert [a["--num-prompts"] for a in load.asked[:2]] == ["3", "8"]
    assert load.asked[0]["--base-url"] == "http://host:1"


def test_prompts_reach_the_generator(tmp_path: Path) -> None:
    load = FakeLoad()
    run(options(tmp_path), load)
    sent = json.loads(Path(load.asked[0]["--dataset-path"]).read_text())
    assert [entry["conversations"][0]["value"] for entry in sent] == [
        *("one", "two", "three")
    ]


def test_figures_are_medians_over_repeats(tmp_path: Path) -> None:
    results, printed = run(options(tmp_path, batch="4", repeats=3), FakeLoad())
    (record,) = results["server"]
    assert (record["clients"], record["tokens_per_s"]) == (4, 200.0)
    assert (record["ttft_ms"], record["tpot_ms"]) == (20.0, 2.0)
    assert record["acceptance_length"] is None
    assert len(record["repeats"]) == 3
    assert "200.0" in printed and "20 (20)" in printed


def test_results_and_log_are_kept(tmp_path: Path) -> None:
    results, printed = run(options(tmp_path), FakeLoad())
    out = tmp_path / "out"
    assert json.loads((out / "results.json").read_text())["server"] == results["server"]
    assert "pages of figures" in (out / LOG_NAME).read_text()
    assert "pages of figures" not in printed


def test_failed_requests_are_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="server: 2 of 3 requests to http://host:1/"):
        run(options(tmp_path), FakeLoad(failing=2))


def test_server_that_is_not_there(tmp_path: Path) -> None:
    def load(_: Sequence[str]) -> dict[str, Any]:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ValueError, match=r"server: measuring .*nobody listens"):
        run_server_command(options(tmp_path), load, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "target: got none, want one with --target, or --server URL"),
        (["--server", "http://host:1", "--head", "h"], "head: got one with --server"),
    ],
)
def test_commands_that_cannot_be_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--out", "/nowhere", "--prompts", "p.txt", *arguments])
    assert message in capsys.readouterr().err
