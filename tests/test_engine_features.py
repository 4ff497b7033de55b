"""What surrounds speculation: caches, small steps, aborts, adapters, other weights.

Each with a chain and with trees, against the same engine without speculation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bigram_heads import greedy_chain
from tests.engine_run import EngineHandle, EnginePool, Run
from tests.models.bigram import bigram_table
from tests.models.head_variants import edit_head
from tests.models.random_llama import known_prompts
from tests.models.shapes import HIDDEN
from tests.near_ties import differing
from tests.tree_engine import counter, judged_steps, tree_settings

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

Models = Callable[[str], Path]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "tree": tree_settings(4, 6, 16),
}
BLOCK = 32
REPLY = 40


def greedy(max_tokens: int = REPLY, **settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        **settings,
    )


# ---- the prefix cache

CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
# Ends of 32, 33, 64 and 128 tokens among them, each twice, admitted together.
TWICE = [prompt for prompt in known_prompts() for _ in range(2)]


def _rounds(handle: EngineHandle, params: Any) -> tuple[list[Run], list[int]]:
    """The same batch three times, and the tokens that the cache gave each time."""
    runs, hits = [], [counter(handle, "vllm:prefix_cache_hits")]
    for _ in range(3):
        runs.append(handle.run(TWICE, params))
        hits.append(counter(handle, "vllm:prefix_cache_hits"))
    return runs, [b - a for a, b in pairwise(hits)]


@pytest.fixture(scope="module")
def plain(engine: EnginePool) -> tuple[list[Run], list[int]]:
    return _rounds(engine("f1", **CACHED), greedy(logprobs=2))


@pytest.fixture(scope="module", params=SHAPES)
def cached(
    request: pytest.FixtureRequest, engine: EnginePool, plain: Any
) -> EngineHandle:
    return engine("f1", "h1", **CACHED, **SHAPES[request.param])


def test_cache_hits_are_those_of_a_plain_engine_less_a_token(
    cached: EngineHandle, plain: tuple[list[Run], list[int]]
) -> None:
    references, wanted = plain
    runs, hits = _rounds(cached, greedy())
    for reference, run in zip(references, runs, strict=True):
        assert not differing(reference, run.token_ids)
    for want, got in zip(wanted[1:], hits[1:], strict=True):
        assert want > 0
        # More where a prompt ends with its block, of which only one token is computed.
        assert want - len(TWICE) <= got <= want + (BLOCK - 1) * len(TWICE)
    # What the head reads of the cache is as good as what it computed.
    # The texts are the same, so accepted drafts say in how many steps they came.
    first, last = runs[0], runs[-1]
    assert first.accepted > 0
    assert last.accepted > 0.95 * first.accepted


def test_aborted_requests_leave_their_neighbours_alone(
    cached: EngineHandle, plain: tuple[list[Run], list[int]]
) -> None:
    engine, prompts = cached.llm.llm_engine, known_prompts()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, greedy())
    replies: dict[str, list[int]] = {}
    for step in range(400):
        if step == 4:
            engine.abort_request([f"r{i}" for i in range(0, len(prompts), 2)])
        for output in engine.step():
            if output.finished:
                replies[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    wanted = {f"r{i}": plain[0][0].token_ids[2 * i] for i in range(1, len(prompts), 2)}
    assert replies == wanted


# ---- steps with room for few tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_that_wait_for_their_turn(
    shape: str, engine: EnginePool, plain: tuple[list[Run], list[int]]
) -> None:
    """8 tokens a step for 6 requests: prompts in pieces, drafts that have to wait."""
    handle = engine(
        "f1", "h1", max_num_batched_tokens=8, max_num_seqs=6, **SHAPES[shape]
    )
    prompts = known_prompts()[:6]
    run = handle.run(prompts, [greedy(n) for n in (40, 12, 30, 20, 40, 9)])
    reference = Run(
        [plain[0][0].token_ids[2 * i] for i in range(6)],
        [plain[0][0].gaps[2 * i] for i in range(6)],
        0,
        0,
    )
    assert not differing(reference, run.token_ids)
    assert run.accepted > 0


# ---- company and weights, with a head that is always right


def test_acceptance_is_the_same_in_any_company_until_the_weights_change(
    engine: EnginePool, models: Models, tmp_path: Path, warnings: list[str]
) -> None:
    handle = engine("f2", "h2", **tree_settings(2, 3, 8))
    table, length = bigram_table(), 25
    alone: list[list[int]] = []
    for size in (1, 2, 7, 16):
        prompts = [[9, 70 + i] for i in range(size)]
        with judged_steps(handle) as steps:
            run = handle.run(prompts, greedy(length))
        assert run.token_ids == [greedy_chain(table, p[-1], length) for p in prompts]
        emitted: dict[int, list[int]] = {}
        for step in steps:
            request = int(step.req_id.split("-")[0])
            emitted.setdefault(request, []).append(len(step.emitted))
        together = [emitted[request] for request in sorted(emitted)]
        assert together[: len(alone)] == alone
        alone = together
        assert run.accepted > len(prompts) * length / 2

    # The head shares the embedding and the output layer, which change with the
    # target's; the final norm it has for itself. The least likely token comes now.
    shutil.copytree(models("f2"), tmp_path / "next")
    edit_head(tmp_path / "next", tensors={"model.norm.weight": -torch.ones(HIDDEN)})
    handle.llm.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(tmp_path / "next")}
    )
    assert [m for m in warnings if "draft head still follows the old ones" in m]
    run = handle.run([[9, 70]], greedy(length))
    assert run.token_ids == [greedy_chain(-table, 70, length)]
    assert run.drafted > 0
    assert run.accepted < length / 4


# ---- adapters


def _adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of F1 that changes its text."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in (0, 2, 4):
        for name, rows in (("q_proj", HIDDEN), ("v_proj", 64), ("o_proj", HIDDEN)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            weights[prefix + "lora_A.weight"] = torch.randn(
                8, HIDDEN, generator=generator
            )
            weights[prefix + "lora_B.weight"] = 0.01 * torch.randn(
                rows, 8, generator=generator
            )
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _with_adapters(
    handle: EngineHandle, adapters: Sequence[Path]
) -> dict[str, list[list[int]]]:
    """Replies to the same prompts without, and with each adapter, all in one batch."""
    from vllm.lora.request import LoRARequest

    requests = [None] + [
        LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1)
    ]
    prompts = known_prompts()[:4]
    outputs = handle.llm.generate(
        [{"prompt_token_ids": p} for p in prompts for _ in requests],
        greedy(30),
        lora_request=requests * len(prompts),
        use_tqdm=False,
    )
    replies = [list(output.outputs[0].token_ids) for output in outputs]
    names = ["base", *(path.name for path in adapters)]
    return {name: replies[i :: len(requests)] for i, name in enumerate(names)}


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_adapters_of_the_target_share_a_batch(
    engine: EnginePool, tmp_path: Path
) -> None:
    adapters = [_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    handle = engine("f1", **LORA)
    plain = _with_adapters(handle, adapters)
    alone = handle.run(known_prompts()[:4], greedy(30))
    assert alone.token_ids == plain["base"]
    assert plain["base"] != plain["a"] != plain["b"] != plain["base"]
    for shape in SHAPES.values():
        handle = engine("f1", "h1", **LORA, **shape)
        with judged_steps(handle) as steps:
            assert _with_adapters(handle, adapters) == plain
        assert sum(len(step.emitted) - 1 for step in steps) > 60


# ---- quantised targets


def _quantise(f1: Path, folder: Path) -> Path:
    """F1 with its layers in eight bits, a scale for each output channel."""
    shutil.copytree(f1, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [n for n in weights if "proj" in n]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[name + "_scale"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    edit_head(folder, config={"quantization_config": scheme})
    return folder


def test_quantised_target_with_a_head_that_is_not(
    engine: EnginePool, models: Models, tmp_path: Path
) -> None:
    target = _quantise(models("f1"), tmp_path / "target")
    # vLLM's kernel for CPUs with AMX takes no float32.
    dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    plain = engine(target, dtype=dtype).run(known_prompts(), greedy(logprobs=2))
    for shape in SHAPES.values():
        run = engine(target, "h1", dtype=dtype, **shape).run(known_prompts(), greedy())
        assert not differing(plain, run.token_ids)
        assert run.accepted > 0
