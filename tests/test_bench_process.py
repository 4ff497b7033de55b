import os
import time
from pathlib import Path

import pytest

from tests.fake_engine import NAME
from vllm_eagle3.bench.process import WorkerError, WorkerProcess
from vllm_eagle3.engine import EngineSpec, Sampling

ROOT = Path(__file__).parents[1]
SAMPLING = Sampling(max_tokens=4)


def worker(folder: Path, engine: str = NAME) -> WorkerProcess:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return WorkerProcess("chain:2", engine, environ, folder / "chain-2.log")


def spec(behaviour: str = "right") -> EngineSpec:
    return EngineSpec("target", head=behaviour, num_speculative_tokens=2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    with worker(tmp_path_factory.mktemp("worker")) as process:
        process.request_start(spec())
        process.wait_started()
        yield process


def test_generations_come_back_in_order(running: WorkerProcess) -> None:
    timed = running.generate([(10,), (20,)], SAMPLING)
    first, second = timed.generations
    assert first.token_ids == (11, 12, 13, 14)
    assert second.token_ids == (21, 22, 23, 24)
    assert timed.new_tokens == 8
    assert timed.seconds > 0


def test_counts_are_those_of_this_batch(running: WorkerProcess) -> None:
    for _ in range(2):
        counts = running.generate([(10,)], SAMPLING).counts
        assert counts.drafts == 2
        assert counts.accepted_per_depth == (1, 1)


def test_log_probabilities_keep_their_token_ids(running: WorkerProcess) -> None:
    sampling = Sampling(max_tokens=2, top_logprobs=2)
    (generation,) = running.generate([(10,)], sampling).generations
    assert generation.top_logprobs is not None
    assert generation.top_logprobs[0][11] == pytest.approx(-0.7)


def test_what_the_engine_prints_goes_to_the_log(running: WorkerProcess) -> None:
    assert "this goes to the log" in running.log_path.read_text()


def test_refused_start_names_method_reason_and_log(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        process.request_start(spec("refuse"))
        with pytest.raises(WorkerError) as error:
            process.wait_started()
    message = str(error.value)
    assert message.startswith("chain:2: ValueError: head: made for another target")
    assert str(process.log_path) in message


def test_crash_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        process.request_start(spec("crash"))
        process.wait_started()
        with pytest.raises(WorkerError, match="exit code 7") as error:
            process.generate([(1,)], SAMPLING)
    assert "about to crash" in str(error.value)


def test_engine_that_cannot_be_imported(tmp_path: Path) -> None:
    with worker(tmp_path, "tests.nowhere:Engine") as process:
        process.request_start(spec())
        with pytest.raises(WorkerError, match=r"No module named 'tests\.nowhere'"):
            process.wait_started()


def test_generate_before_start_is_refused(tmp_path: Path) -> None:
    with (
        worker(tmp_path) as process,
        pytest.raises(WorkerError, match="want 'start' first"),
    ):
        process.generate([(1,)], SAMPLING)


def test_a_worker_ends_with_its_user(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        process.request_start(spec())
        process.wait_started()
    assert process._process.returncode == 0
    assert "closed" in process.log_path.read_text()


def test_a_busy_worker_is_killed_when_its_user_fails(tmp_path: Path) -> None:
    process = worker(tmp_path)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), process:
        process.request_start(spec())
        raise KeyboardInterrupt
    assert process._process.returncode == -9
    assert time.monotonic() - began < 5
