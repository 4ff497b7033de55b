"""Ray's executor against vLLM's own processes: the same work, in turns.

    LD_PRELOAD=$(python -m vllm_eagle3.preload) python examples/compare_executors.py

Every run is a process of its own; the order of the two changes from turn to turn.
Prints tokens per second and acceptance length of each run, and the ratio of medians.
`--tensor-parallel-size 2 --temperature 1 --requests 200` is a test of endurance too:
no request has a seed, and all must end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

EXECUTORS = {"mp": "mp", "ray": "vllm_eagle3.integration.ray_executor.RayExecutor"}
MARK = "measured "


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--shape", default="tree", choices=["chain", "tree"])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--executors", nargs="+", default=list(EXECUTORS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--measure", choices=EXECUTORS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One engine, warmed up, then all requests."""
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    from vllm_eagle3 import embedded

    llm = LLM(
        model=str(embedded.resolve_target(arguments.target)),
        dtype=arguments.dtype,
        max_model_len=512,
        max_num_seqs=arguments.concurrency,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        tensor_parallel_size=arguments.tensor_parallel_size,
        distributed_executor_backend=EXECUTORS[arguments.measure],
        speculative_config={
            "method": "eagle3",
            "model": str(embedded.resolve_head(arguments.head)),
            "num_speculative_tokens": arguments.nodes,
        },
        additional_config={"vllm_eagle3": {"shape": arguments.shape}},
    )
    params = SamplingParams(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [
        {"prompt_token_ids": [3 + n % 97, 5 + n % 89, 7 + n % 83]}
        for n in range(arguments.requests)
    ]
    llm.generate(prompts[: arguments.concurrency], params, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counts = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    prefix = "vllm:spec_decode_num_"
    accepted, drafts = counts[f"{prefix}accepted_tokens"], counts[f"{prefix}drafts"]
    return {"tokens/s": tokens / seconds, "acceptance length": 1 + accepted / drafts}


def run(executor: str) -> dict[str, float]:
    """`measure` in a process of its own, with as many threads whatever starts them."""
    threads = max(1, (os.cpu_count() or 1) // arguments.tensor_parallel_size)
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
    }
    command = [sys.executable, *sys.argv, "--measure", executor]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{executor}: exit status {done.returncode}\n{done.stdout}")
    return json.loads(lines[-1].removeprefix(MARK))


def main() -> None:
    rates: dict[str, list[float]] = {name: [] for name in arguments.executors}
    for turn in range(arguments.turns):
        for name in arguments.executors[:: -1 if turn % 2 else 1]:
            found = run(name)
            rates[name].append(found["tokens/s"])
            print(name, *(f"{what} {v:.2f}" for what, v in found.items()), flush=True)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    print("medians", *(f"{name} {rate:.2f}" for name, rate in medians.items()))
    if medians.keys() >= EXECUTORS.keys():
        print(f"ray / mp {medians['ray'] / medians['mp']:.3f}")


if __name__ == "__main__":
    arguments = parse()
    if arguments.measure:
        print(MARK + json.dumps(measure(arguments)), flush=True)
    else:
        main()
