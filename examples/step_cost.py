"""What a step costs, by its rows and the context: python examples/step_cost.py

One engine drafts trees; before they are verified they are cut to the wanted size, so
that a step has 1, 5, 9, ... rows. Prints medians in milliseconds, batch 1:

    target    the target's pass over the root and the nodes, T(rows)
    logits    its output layer
    verify    sampling or matching, and moving the accepted KV into place
    first     the head's pass over the new rows
    growth    the levels of the tree, ranking, and its order
    other     everything else between the start and the end of a step

With an acceptance length AL a tree of N nodes gains at most
AL x step(1) / step(1 + N), where a plain step needs neither `first` nor `growth`.

    python examples/step_cost.py --rows 1,9 --contexts 512 --target T --head H --eager
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from vllm_eagle3 import embedded, preload

PARTS = ("target", "logits", "verify", "first", "growth", "other")


class Meter:
    """Cuts the trees of an engine to `rows` - 1 nodes, and times its steps by part.

    Attributes:
        steps: part -> seconds, of each step that had exactly so many rows.
    """

    def __init__(self, llm: Any) -> None:
        self.rows, self.steps = 1, []
        self._spent: dict[str, float] = defaultdict(float)
        self._seen = 0
        client = llm.llm_engine.engine_core
        core = client.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._time(runner, "_model_forward", "target")
        self._time(runner.model, "compute_logits", "logits")
        self._time(runner, "_sample", "verify")
        self._time(runner.drafter, "propose", "first")
        self._time(runner.drafter, "_grow", "growth", within="first")
        self._prepare, runner._prepare_inputs = runner._prepare_inputs, self._count
        update = core.scheduler.update_draft_token_ids
        self._update, core.scheduler.update_draft_token_ids = update, self._cut
        self._step, client.get_output = client.get_output, self._time_step

    def _time(self, owner: Any, method: str, part: str, within: str = "") -> None:
        stock = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = stock(*args, **kwargs)
            passed = time.perf_counter() - start
            self._spent[part] += passed
            self._spent[within] -= passed
            return result

        setattr(owner, method, timed)

    def _count(self, scheduled: Any, *args: Any) -> Any:
        self._seen = scheduled.total_num_scheduled_tokens
        return self._prepare(scheduled, *args)

    def _cut(self, drafts: Any) -> None:
        kept = self.rows - 1
        tokens = [tokens[:kept] for tokens in drafts.draft_token_ids]
        parents = [parents[:kept] for parents in drafts.parents]
        self._update(replace(drafts, draft_token_ids=tokens, parents=parents))

    def _time_step(self) -> Any:
        self._spent.clear()
        self._seen, start = 0, time.perf_counter()
        outputs = self._step()
        step = time.perf_counter() - start
        if self._seen == self.rows:
            parts = {part: self._spent[part] for part in PARTS[:-1]}
            self.steps.append(
                parts | {"other": step - sum(parts.values()), "step": step}
            )
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--rows", default="1,5,9,17,33")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--steps", type=int, default=30, help="measured steps each")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--eager", action="store_true", help="start without compiling")
    arguments = parser.parse_args()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    contexts = [int(context) for context in arguments.contexts.split(",")]
    llm = start(arguments, max(sizes) - 1, max(contexts))
    meter = Meter(llm)
    print("context  rows" + "".join(f"{name:>8}" for name in (*PARTS, "step")))
    for context in contexts:
        for meter.rows in sizes:
            measure(llm, meter, context, arguments)
            medians = (
                statistics.median(step[part] for step in meter.steps)
                for part in (*PARTS, "step")
            )
            line = "".join(f"{1e3 * seconds:8.2f}" for seconds in medians)
            print(f"{context:7} {meter.rows:5}{line}", flush=True)


def start(arguments: argparse.Namespace, nodes: int, context: int) -> Any:
    """An engine in this process whose trees fill the largest step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    shape = {"top_k": arguments.top_k, "depth": min(arguments.depth, nodes)}
    return LLM(
        model=str(embedded.resolve_target(arguments.target)),
        max_model_len=context + 256,
        max_num_seqs=1,
        enforce_eager=arguments.eager,
        speculative_config={
            "method": "eagle3",
            "model": str(embedded.resolve_head(arguments.head)),
            "num_speculative_tokens": nodes,
        },
        additional_config={"vllm_eagle3": {"shape": "tree", **shape}},
    )


def measure(llm: Any, meter: Meter, context: int, arguments: Any) -> None:
    """Generate behind the same prompt until enough steps were timed."""
    from vllm import SamplingParams

    meter.steps.clear()
    params = SamplingParams(
        temperature=arguments.temperature, max_tokens=64, ignore_eos=True
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [3 + 7 * i % (vocab - 3) for i in range(context)]}
    while len(meter.steps) < arguments.steps:
        llm.generate([prompt], params, use_tqdm=False)


if __name__ == "__main__":
    preload.restart_with_preload()
    main()
