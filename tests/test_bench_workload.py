from pathlib import Path

from vllm_eagle3.bench.workload import (
    MIXED,
    make_batches,
    staggered,
    task_names,
)
from vllm_eagle3.prompts import read_prompts

TWO_TASKS = ("chat", "chat", "chat", "code", "code")


def test_batches_hold_one_task_and_take_turns() -> None:
    batches = make_batches(TWO_TASKS, 1)
    assert [batch.task for batch in batches] == ["chat", "code", "chat", "code", "chat"]
    assert [batch.prompts for batch in batches] == [(0,), (3,), (1,), (4,), (2,)]


def test_last_batch_of_a_task_is_filled_up_with_its_first_prompts() -> None:
    first, code, second = make_batches(TWO_TASKS, 2)
    assert (first.prompts, second.prompts) == ((0, 1), (2, 0))
    assert (code.task, code.prompts) == ("code", (3, 4))


def test_batches_that_a_task_cannot_fill_are_mixed() -> None:
    batches = make_batches(TWO_TASKS, 4)
    assert {batch.task for batch in batches} == {MIXED}
    assert [batch.prompts for batch in batches] == [(0, 3, 1, 4), (2, 0, 3, 1)]


def test_one_task_fills_any_batch() -> None:
    (batch,) = make_batches(("chat", "chat"), 5)
    assert (batch.task, batch.prompts) == ("chat", (0, 1, 0, 1, 0))


def write(path: Path, *lines: str) -> tuple[str, list]:
    path.write_text("\n".join(lines))
    return str(path), read_prompts(path)


def test_tasks_are_files_where_there_are_several(tmp_path: Path) -> None:
    chat = write(tmp_path / "chat.jsonl", '{"category": "x", "turns": ["a"]}')
    code = write(tmp_path / "code.txt", "b", "c")
    assert task_names([chat, code]) == ("chat", "code", "code")


def test_tasks_are_categories_where_there_is_one_file(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", '{"category": "x", "turns": ["a"]}', '"b"')
    assert task_names([file]) == ("x", "p")


def test_waves_are_more_requests_of_the_same_batch_size():
    (batch,) = make_batches(("chat", "chat"), 2, waves=3)
    assert batch.prompts == (0, 1, 0, 1, 0, 1)
    assert batch.at_once == 2


def test_staggered_requests_end_one_after_the_other():
    assert staggered(48, at_once=4, num_requests=10) == [12, 24, 36, 48] + [48] * 6
    assert staggered(2, at_once=4, num_requests=4) == [1, 1, 2, 2]
    assert staggered(48, at_once=1, num_requests=2) == [48, 48]
