import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.shapes import BYTE_OFFSET, byte_tokenizer
from vllm_eagle3.bench.command import DEMO_PROMPTS
from vllm_eagle3.prompts import (
    Prompt,
    first_turn_ids,
    read_prompt_files,
    read_prompts,
)

HELLO = {"role": "user", "content": "hello"}


def write(folder: Path, name: str, *records: Any) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "record",
    [
        "hello",
        {"turns": ["hello", "and then?"]},
        {"messages": [HELLO, {"role": "assistant", "content": "hi"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}]}
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "hello"},
                {"from": "gpt", "value": "hi"},
            ]
        },
    ],
    ids=["string", "turns", "messages", "parts", "conversations"],
)
def test_first_turn_of_every_format(tmp_path: Path, record: Any) -> None:
    (prompt,) = read_prompts(write(tmp_path, "p.jsonl", record))
    assert prompt.first_turn == (HELLO,)


def test_system_message_belongs_to_the_first_turn(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    record = {"messages": [system, HELLO, {"role": "assistant", "content": "hi"}]}
    (prompt,) = read_prompts(write(tmp_path, "p.jsonl", record))
    assert prompt.first_turn == (system, HELLO)


def test_later_turns_are_kept(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path, "p.jsonl", {"turns": ["a", "b"]}))
    assert [m["content"] for m in prompt.messages] == ["a", "b"]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("first\n\n  second  \n", encoding="utf-8")
    prompts = read_prompts(path)
    assert [p.first_turn[0]["content"] for p in prompts] == ["first", "second"]
    assert [p.source for p in prompts] == [f"{path}:1", f"{path}:3"]


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(["one", {"turns": ["two"]}]), encoding="utf-8")
    prompts = read_prompts(path)
    assert [p.first_turn[0]["content"] for p in prompts] == ["one", "two"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"a\u2028b"\n', encoding="utf-8")
    (prompt,) = read_prompts(path)
    assert prompt.first_turn[0]["content"] == "a\u2028b"


def test_limit_is_per_file(tmp_path: Path) -> None:
    a = write(tmp_path, "a.jsonl", "a1", "a2", "a3")
    b = write(tmp_path, "b.jsonl", "b1", "b2", "b3")
    prompts = read_prompt_files([a, b], limit=2)
    contents = [p.first_turn[0]["content"] for p in prompts]
    assert contents == ["a1", "a2", "b1", "b2"]


def test_limit_stops_before_later_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"good"\nbroken\n', encoding="utf-8")
    assert len(read_prompts(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON"),
        ("7", "got a JSON int"),
        ('{"text": "x"}', r"got keys \['text'\], want one of 'turns'"),
        ('{"turns": []}', "turns: got"),
        ('{"turns": [""]}', "the user says nothing"),
        ('{"turns": [3]}', "content: got 3"),
        ('{"messages": ["x"]}', "messages: want objects"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role: got 'tool'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "says nothing"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "content: got",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert f"{path}:2" in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write(tmp_path, "p.jsonl"))


def test_text_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"p\.txt:2: not UTF-8"):
        read_prompts(path)


def test_json_object_in_a_json_file_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"turns": ["a"]}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"belongs in a \.jsonl file"):
        read_prompts(path)


def test_limit_below_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit: got 0"):
        read_prompts(write(tmp_path, "p.jsonl", "a"), limit=0)


def test_ids_follow_the_chat_template() -> None:
    tokenizer = byte_tokenizer(300)
    ids = first_turn_ids(Prompt((HELLO,), "here"), tokenizer)
    assert tokenizer.decode(ids) == "hello\n"
    assert min(ids) >= BYTE_OFFSET


def test_tokenizer_without_chat_template() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        first_turn_ids(Prompt((HELLO,), "here"), tokenizer)


def test_template_that_refuses_names_the_prompt() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = "{{ raise_exception('no system, please') }}"
    with pytest.raises(ValueError, match=r"here: .*no system, please"):
        first_turn_ids(Prompt((HELLO,), "here"), tokenizer)


def test_demo_prompts_are_varied() -> None:
    prompts = read_prompts(DEMO_PROMPTS)
    assert len(prompts) >= 12
    assert len({prompt.category for prompt in prompts}) >= 6
