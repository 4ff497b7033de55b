"""Offline batch with EAGLE-3 drafts: python examples/offline.py [--shape tree].

Prints each reply and what speculation brought. Any target and head will do:
    python examples/offline.py --target TARGET --head HEAD
"""

import argparse

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter

from vllm_eagle3 import embedded

PROMPTS = [
    "Name three uses for a paper clip.",
    "Write a function that reverses a list in Python.",
    "What is 17 times 6? Explain your steps.",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--shape", default="chain", choices=["chain", "tree", "auto"])
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--eager", action="store_true", help="start without compiling")
    arguments = parser.parse_args()
    llm = LLM(
        model=str(embedded.resolve_target(arguments.target)),
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=arguments.eager,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(embedded.resolve_head(arguments.head)),
            "num_speculative_tokens": arguments.nodes,
        },
        additional_config={"vllm_eagle3": {"shape": arguments.shape}},
    )
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    for output in llm.generate(PROMPTS, params):
        print(f"\n> {output.prompt}\n{output.outputs[0].text.strip()}")
    counts = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    drafts = counts["vllm:spec_decode_num_drafts"]
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    print(f"\nacceptance length {1 + accepted / drafts:.2f} over {drafts} steps")


if __name__ == "__main__":
    main()
