"""Write the user's turns of the recipe: varied, and none from a benchmark.

    python recipes/smollm2/prompts.py --count 3000 --seed 1 --out prompts.jsonl
    vllm-eagle3 data regen --target smollm2 --prompts prompts.jsonl --out rows.jsonl

Most turns are the target's own: it continues an opening that fixes the kind ("A bakery
sells", "Write an email"). Code stubs are signatures with docstrings of the standard
library and of installed packages; digests ask for a summary of what the target itself
wrote in `rows.jsonl.gz`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_eagle3.embedded import resolve_target
from vllm_eagle3.engine import EngineMode, EngineSpec, Sampling
from vllm_eagle3.integration.engine import VllmEngine
from vllm_eagle3.train.regen import opening_of_a_user_turn

ROWS = Path(__file__).parent / "rows.jsonl.gz"
# Mozilla licence: left out, so that the rows are free of its terms.
LEFT_OUT = {"tqdm", "hypothesis", "pathspec"}

# Share of the draws, of every kind.
SHARES = {
    "math": 22,
    "writing": 14,
    "reasoning": 7,
    "stem": 15,
    "qa": 6,
    "code": 9,
    "chat": 6,
    "news": 5,
    "stub": 11,
    "digest": 5,
}
OPENINGS = json.loads((Path(__file__).parent / "openings.json").read_text())
STUB_REQUESTS = (
    "Complete the code I provided.\n\n",
    "Complete this function.\n\n",
    "Finish the Python function below.\n\n",
    "Write the body of this function:\n\n",
    "",
)
DIGEST_REQUESTS = (
    "Summarize: ",
    "Rewrite this text in simpler words:\n\n",
    "Summarize the following text in a few sentences:\n\n",
)
LENGTHS = {"news": 320}  # tokens of a turn; others
LENGTH = 150


def main() -> None:
    args = _arguments()
    target = resolve_target("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    mode = EngineMode(enforce_eager=True)
    engine = VllmEngine(EngineSpec(str(target), max_num_seqs=96, mode=mode))
    draws = list(islice(_draws(args.seed, tokenizer), args.count))
    template = opening_of_a_user_turn(tokenizer)
    open_draws = [draw for draw in draws if draw[2]]
    requests = (
        (
            template + tokenizer(text, add_special_tokens=False)["input_ids"],
            Sampling(0.9, LENGTHS.get(kind, LENGTH)),
        )
        for kind, text, _ in open_draws
    )
    with args.out.open("w", encoding="utf-8") as lines:
        for kind, text, unfinished in draws:
            if not unfinished:
                lines.write(_line(kind, text))
        for number, reply in engine.stream(requests):
            kind, opening, _ = open_draws[number]
            if len(reply.token_ids) == LENGTH:
                continue  # cut off in the middle of a sentence
            written = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
            lines.write(_line(kind, opening + written.rstrip()))


def _draws(seed: int, tokenizer: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield (kind, text, whether the target is to go on writing it)."""
    rng = random.Random(seed)
    stubs, texts = _stubs(), _own_texts(tokenizer)
    while True:
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        if kind == "stub":
            yield kind, rng.choice(STUB_REQUESTS) + rng.choice(stubs), False
        elif kind == "digest":
            yield kind, rng.choice(DIGEST_REQUESTS) + rng.choice(texts), False
        else:
            yield kind, _opening(kind, rng), True


def _opening(kind: str, rng: random.Random) -> str:
    names = OPENINGS["names"]
    return rng.choice(OPENINGS[kind]).format(
        n=rng.choice(names), m=rng.choice(names), k=rng.randint(2, 60)
    )


def _stubs() -> list[str]:
    """Signature and docstring of public functions, without their bodies."""
    found = set()
    for place in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(place))
        for path in [*root.glob("*.py"), *root.glob("*/*.py")]:
            if path.relative_to(root).parts[0] not in LEFT_OUT:
                found.update(_stubs_of(path))
    return sorted(found)


def _stubs_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if doc and 40 < len(doc) < 420:
            text = doc.replace("\n", "\n    ")
            arguments = ast.unparse(node.args)
            yield f'def {node.name}({arguments}):\n    """{text}\n    """\n'


def _own_texts(tokenizer: Any) -> list[str]:
    with gzip.open(ROWS, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        tokenizer.decode(row["ids"][start:end], skip_special_tokens=True).strip()
        for row in rows
        for start, end, _ in row["spans"]
        if end - start > 140
    ]


def _line(kind: str, text: str) -> str:
    message = {"role": "user", "content": text}
    return json.dumps({"messages": [message], "category": kind}) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
