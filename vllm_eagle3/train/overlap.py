"""Keep benchmarks out of training data: drop what shares 13 words in a row with them.

The usual test of contamination (GPT-3, appendix C): texts are compared as words in
lower case without punctuation. An item of fewer than 13 words cannot be told from
everyday speech that way; such items are counted, so that nobody takes them for
checked.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..prompts import Prompt, parse_prompt, read_prompt_files

GRAM = 13
_WORD = re.compile(r"\w+")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Overlap:
    """What became of a file's lines."""

    kept: int
    dropped: int


class Excluded:
    """The word sequences of some benchmark prompts.

    Args:
        files: prompt files; all turns of all prompts count.

    Raises:
        ValueError: a file that is missing or not understood.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        texts = [text for prompt in read_prompt_files(files) for text in _texts(prompt)]
        self._grams = {gram for text in texts for gram in _grams(text)}
        self.num_items = len(texts)
        self.num_short = sum(len(_words(text)) < GRAM for text in texts)

    def share(self, texts: Iterable[str]) -> bool:
        """Whether any of `texts` has 13 words in a row of a benchmark."""
        return any(gram in self._grams for text in texts for gram in _grams(text))


def drop_overlapping(
    source: Path, out: Path, excluded: Excluded, decode: Decode
) -> Overlap:
    """Copy the lines of a row or prompt file that share nothing with `excluded`.

    Lines are copied as they are. A line with "ids" is a row, whose whole text counts,
    reply included; any other is a prompt.

    Args:
        source: .jsonl or .jsonl.gz.
        out: written whole or not at all; plain.
        decode: token ids to text, with the target's tokenizer.

    Raises:
        ValueError: `source` is missing, or a line is neither.
    """
    kept = dropped = 0
    partial = out.with_name(f".{out.name}.partial")
    with partial.open("w", encoding="utf-8") as lines:
        for number, line in enumerate(_lines(source), 1):
            if excluded.share(_line_texts(line, f"{source}:{number}", decode)):
                dropped += 1
            else:
                kept += 1
                lines.write(line)
    os.replace(partial, out)
    return Overlap(kept, dropped)


def _lines(source: Path) -> Iterator[str]:
    if not source.is_file():
        raise ValueError(f"dedup: no file {source}")
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield line if line.endswith("\n") else line + "\n"


def _line_texts(line: str, where: str, decode: Decode) -> list[str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    if isinstance(record, dict) and "ids" in record:
        return [decode(record["ids"])]
    return _texts(parse_prompt(record, where))


def _texts(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages]


def overlaps(excluded: Excluded, prompt: Prompt) -> bool:
    """Whether a prompt shares words with the benchmarks."""
    return excluded.share(_texts(prompt))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(text: str) -> Iterator[tuple[Any, ...]]:
    words = _words(text)
    return (tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1))
