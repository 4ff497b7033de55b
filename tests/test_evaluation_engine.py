"""`eval` on real engines: in float32 the prediction is what the engine counts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.models import random_llama
from vllm_eagle3 import cli, preload
from vllm_eagle3.bench import plan

pytestmark = pytest.mark.engine
# H1 knows 40 tokens of each reply by heart and nothing of what follows.
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]
) -> dict[str, Any]:
    """What `eval --json` prints for prompts that H1 knows, in two files."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("eval")
    files = []
    for name, numbers in {"a": "0\n1\n2\n", "b": "3\n4\n"}.items():
        files.append(folder / f"{name}.txt")
        files[-1].write_text(numbers)
    known = random_llama.known_prompts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preload, "restart_with_preload", lambda: None)
        patch.setattr(
            plan,
            "first_turn_ids",
            lambda prompt, _: known[int(prompt.messages[0]["content"])],
        )
        command = ["eval", "--target", str(models("f1")), "--head", str(models("h1"))]
        command += ["--prompts", *map(str, files), "--draft-tokens", "3", "--json"]
        command += ["--max-tokens", str(MAX_TOKENS), "--dtype", "float32"]
        command += ["--max-model-len", "512", "--check"]
        printed = io.StringIO()
        with redirect_stdout(printed), pytest.raises(SystemExit) as done:
            cli.main(command)
    assert done.value.code == 0
    return json.loads(printed.getvalue())


def parts(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results, *results["by_prompts"].values()]


def test_prediction_is_what_the_engine_counts(results: dict[str, Any]) -> None:
    assert len(parts(results)) == 3
    for part in parts(results):
        assert part["same_text"] == part["prompts"]
        assert part["predicted_acceptance_length"] == part["measured_acceptance_length"]
        assert part["n_alpha"] == part["measured_n_alpha"]
        assert part["predicted_interval"] == part["measured_interval"]


def test_some_drafts_are_accepted_and_some_refused(results: dict[str, Any]) -> None:
    for part in parts(results):
        # 40 tokens in steps of four, and 20 alone, make about 2.
        assert 1.5 < part["measured_acceptance_length"] < 3
        low, high = part["predicted_interval"]
        assert low <= part["predicted_acceptance_length"] <= high


def test_trainers_head_and_the_engines_compute_the_same(results: dict) -> None:
    assert results["check"] == {"rows": 4, "steps": 3, "first_difference": None}
