"""Training replies on a Ray cluster, as many engines at once as asked for.

    python examples/ray_data.py --prompts prompts.jsonl --out rows.jsonl --engines 2

The rows are those of `vllm-eagle3 data regen`, in the order of the prompts. With a head
the target answers faster and says the same. `RAY_ADDRESS` names a running cluster;
without it Ray starts one on this machine.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.data
from transformers import AutoTokenizer

from vllm_eagle3 import embedded
from vllm_eagle3.engine import EngineMode, EngineSpec, Sampling
from vllm_eagle3.prompts import first_turn_ids, read_prompt_files
from vllm_eagle3.train.regen import Ask, reply_row


class Writer:
    """One engine in an actor of its own; a batch of prompts to a batch of rows."""

    def __init__(self, spec: EngineSpec, sampling: Sampling) -> None:
        from vllm_eagle3.integration.engine import VllmEngine

        self.engine, self.sampling = VllmEngine(spec), sampling

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        prompts = [ids.tolist() for ids in batch["ids"]]
        replies = self.engine.generate(prompts, self.sampling)
        rows = [
            reply_row(Ask(tuple(ids), self.sampling), reply)
            for ids, reply in zip(prompts, replies, strict=True)
        ]
        counts = self.engine.metrics()
        print(f"{counts.accepted_tokens} of {counts.draft_tokens} drafts accepted")
        return {"row": [json.dumps(row) for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="prompts at a time")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="start without compiling")
    arguments = parser.parse_args()
    target = str(embedded.resolve_target(arguments.target))
    spec = EngineSpec(
        target,
        head=str(embedded.resolve_head(arguments.head)),
        num_speculative_tokens=arguments.nodes,
        dtype=arguments.dtype,
        max_model_len=1024,
        mode=EngineMode(enforce_eager=arguments.eager),
    )
    sampling = Sampling(arguments.temperature, arguments.max_tokens)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = read_prompt_files(arguments.prompts, arguments.limit)

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    rows = ray.data.from_items(
        [{"ids": first_turn_ids(prompt, tokenizer)} for prompt in prompts]
    ).map_batches(
        Writer,
        fn_constructor_args=(spec, sampling),
        batch_size=arguments.batch,
        concurrency=arguments.engines,
        num_cpus=1,
    )
    with arguments.out.open("w", encoding="utf-8") as out:
        out.writelines(row["row"] + "\n" for row in rows.iter_rows())
    print(f"{arguments.out}: {len(prompts)} rows")


if __name__ == "__main__":
    main()
