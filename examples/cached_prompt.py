"""Time to first token of a prompt that is in the prefix cache, with and without drafts.

    python examples/cached_prompt.py --methods off,ours:chain:3,ours:tree:8

One engine for each method, in processes of their own, take turns; the medians and the
overhead over the first method are printed. A head's cache entry depends on the token
behind it, so with speculation the last cached token is computed again. Drafts are made
after the token has been sent: `--pause 0` sends the next request while that goes on.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from vllm_eagle3 import embedded
from vllm_eagle3.bench.launch import worker_environ
from vllm_eagle3.bench.methods import parse_methods
from vllm_eagle3.bench.process import WorkerProcess
from vllm_eagle3.engine import EngineMode, EngineSpec, Sampling

ENGINE = "vllm_eagle3.integration.engine:VllmEngine"
ONE_TOKEN = Sampling(max_tokens=1, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--methods", default="off,ours:chain:3,ours:tree:8")
    parser.add_argument("--tokens", type=int, default=500, help="of the prompt")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds before each request"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="start without compiling")
    arguments = parser.parse_args()
    mode = EngineMode(enforce_eager=arguments.eager, block_size=arguments.block_size)
    methods = parse_methods(arguments.methods)
    target = str(embedded.resolve_target(arguments.target))
    head = str(embedded.resolve_head(arguments.head))
    prompt = [5 + 7 * place % 100 for place in range(arguments.tokens)]
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for number, method in enumerate(methods):
            worker = WorkerProcess(
                method.name, ENGINE, worker_environ(method, mode), logs / str(number)
            )
            workers[method.name] = stack.enter_context(worker)
            worker.request_start(
                EngineSpec(
                    target=target,
                    head=head if method.uses_head else None,
                    num_speculative_tokens=method.num_speculative_tokens,
                    dtype=arguments.dtype,
                    max_model_len=arguments.tokens + 64,
                    mode=mode,
                    prefix_caching=True,
                    options=method.options,
                )
            )
            worker.wait_started()
            for _ in range(3):  # fills the cache, and warms up
                worker.generate([prompt], ONE_TOKEN)
        for _ in range(arguments.repeats):
            for name, worker in workers.items():
                time.sleep(arguments.pause)
                seconds[name].append(worker.generate([prompt], ONE_TOKEN).seconds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians[methods[0].name]
    for name, median in medians.items():
        print(f"{name:16} {1000 * median:7.2f} ms  {median / base - 1:+.1%}")


if __name__ == "__main__":
    main()
