"""Record what a budget has to know: python examples/record.py FOLDER --prompts FILE...

Answers the prompts at several batch sizes with an engine that records, for
`vllm-eagle3 simulate --record FOLDER`. A server with the same option records its own
traffic.
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_eagle3 import embedded
from vllm_eagle3.prompts import read_prompt_files


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=4, help="first N of each file")
    parser.add_argument("--batch", default="1,2,4,8,16,32,64")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--eager", action="store_true", help="start without compiling")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.batch.split(",")]
    llm = LLM(
        model=str(embedded.resolve_target(arguments.target)),
        dtype=arguments.dtype,
        enforce_eager=arguments.eager,
        max_model_len=1024,
        max_num_seqs=max(sizes),
        speculative_config={
            "method": "eagle3",
            "model": str(embedded.resolve_head(arguments.head)),
            "num_speculative_tokens": 16,
        },
        additional_config={"vllm_eagle3": {"record": str(arguments.folder)}},
    )
    params = SamplingParams(
        temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True
    )
    prompts = read_prompt_files(arguments.prompts, arguments.limit)
    conversations = [list(prompt.first_turn) for prompt in prompts]
    for size in sizes:
        # Each at least once, since the drafts of few texts say little.
        batch = list(islice(cycle(conversations), max(size, len(conversations))))
        for first in range(0, len(batch), size):
            llm.chat(batch[first : first + size], params, use_tqdm=False)


if __name__ == "__main__":
    main()
