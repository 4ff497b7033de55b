"""Reading prompt files.

The format follows from the file's name and keys:

    *.jsonl   one JSON object or string a line
    *.json    one JSON array of them
    other     plain text, one prompt a line

    {"turns": ["first", "second"]}                          MT-bench, Spec-Bench
    {"messages": [{"role": "user", "content": "..."}]}      OpenAI
    {"conversations": [{"from": "human", "value": "..."}]}  ShareGPT
    "just a prompt"                                         a JSON string
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, str]  # {"role": ..., "content": ...}

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_FORMATS = "'turns', 'messages' or 'conversations'"


class ChatTokenizer(Protocol):
    """What we need of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(
        self,
        conversation: list[Message],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """A conversation as it was read; `source` is `file:line` for messages to users."""

    messages: tuple[Message, ...]
    source: str
    category: str = ""

    @property
    def first_turn(self) -> tuple[Message, ...]:
        """The messages up to and including the first one of the user."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("user") + 1]


def read_prompt_files(
    paths: Sequence[str | Path], limit: int | None = None
) -> list[Prompt]:
    """Read files one after the other; `limit` is per file, so that all have a share.

    Raises:
        ValueError: a file that is missing, empty or not understood, with its line.
    """
    prompts: list[Prompt] = []
    for path in paths:
        prompts += read_prompts(path, limit)
    if not prompts:
        raise ValueError("prompts: got no files, want at least one")
    return prompts


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read one file; see the module for formats and `read_prompt_files` for errors."""
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit: got {limit}, want at least 1")
    prompts: list[Prompt] = []
    for source, record in _records(path):
        prompts.append(parse_prompt(record, source))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValueError(f"prompts: {path} holds no prompt")
    return prompts


def first_turn_ids(prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
    """Token ids of the first turn in the target's chat template, ready for a reply.

    Raises:
        ValueError: a tokenizer without chat template, or a template that refuses.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "target: its tokenizer has no chat template; add chat_template.jinja to "
            "the target's directory"
        )
    # Templates raise whatever their author chose (TemplateError mostly).
    try:
        ids = tokenizer.apply_chat_template(
            list(prompt.first_turn),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:
        raise ValueError(
            f"{prompt.source}: the target's chat template refuses it: {error}"
        ) from error
    return [int(token) for token in ids]


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    text = _read_text(path)
    if path.suffix == ".json":
        yield from _array_records(path, text)
        return
    # Only \n ends a line: JSON strings may hold other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            source = f"{path}:{number}"
            is_json = path.suffix == ".jsonl"
            yield source, _load(line, source) if is_json else line.strip()


def _array_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    array = _load(text, str(path))
    if not isinstance(array, list):
        raise ValueError(
            f"{path}: got a JSON {type(array).__name__}, want an array of prompts; "
            "one object a line belongs in a .jsonl file"
        )
    for number, record in enumerate(array, start=1):
        yield f"{path}, item {number}", record


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"prompts: cannot read {path} ({error.strerror}); give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text ({error.reason})") from error


def _load(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not valid JSON ({error})") from error


def parse_prompt(record: Any, source: str) -> Prompt:
    if isinstance(record, str):
        return _checked([("user", record)], source, "")
    if not isinstance(record, dict):
        raise ValueError(
            f"{source}: got a JSON {type(record).__name__}, want an object with "
            f"{_FORMATS}, or a string"
        )
    category = str(record.get("category") or "")
    return _checked(_turns(record, source), source, category)


def _turns(record: dict[str, Any], source: str) -> list[tuple[Any, Any]]:
    """Pairs (role, content) of a record, unchecked."""
    for key, role, content in (
        ("messages", "role", "content"),
        ("conversations", "from", "value"),
    ):
        if key in record:
            items = _list(record[key], key, source)
            if not all(isinstance(item, dict) for item in items):
                raise ValueError(f"{source}: {key}: want objects, one a message")
            return [(item.get(role), item.get(content)) for item in items]
    if "turns" in record:
        turns = _list(record["turns"], "turns", source)
        return [("user", turn) for turn in turns]
    raise ValueError(f"{source}: got keys {sorted(record)}, want one of {_FORMATS}")


def _list(value: Any, key: str, source: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{source}: {key}: got {value!r}, want a non-empty list")
    return value


def _checked(turns: list[tuple[Any, Any]], source: str, category: str) -> Prompt:
    messages = []
    for role, content in turns:
        if role not in _ROLES:
            raise ValueError(
                f"{source}: role: got {role!r}, want one of {', '.join(_ROLES)}"
            )
        messages.append({"role": _ROLES[role], "content": _text(content, source)})
    asked = [m["content"].strip() for m in messages if m["role"] == "user"]
    if not asked or not asked[0]:
        raise ValueError(f"{source}: the user says nothing; want a first user message")
    return Prompt(tuple(messages), source, category)


def _text(content: Any, source: str) -> str:
    """A message's text; OpenAI's list of parts is joined if all parts are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p.get("text") for p in content if isinstance(p, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "".join(texts)
    raise ValueError(f"{source}: content: got {content!r}, want text")
