"""Every field of `speculative_config` is followed, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.engine_run import EnginePool, Run, llm_settings
from tests.models.random_llama import known_prompts
from tests.near_ties import differing
from tests.tree_engine import tree_settings

pytest.importorskip("vllm")

Models = Callable[[str], Path]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "tree": tree_settings(4, 6, 16),
}
SCHEDULE = {"num_speculative_tokens_per_batch_size": [(1, 2, 3), (3, 4, 0)]}


def configured(models: Models, speculation: dict[str, Any], **settings: Any) -> Any:
    """The configuration that an engine would start with."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = llm_settings(
        str(models("f1")), str(models("h1")), speculation=speculation, **settings
    )
    return EngineArgs(**arguments).create_engine_config()


UNFOLLOWED = [
    (
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
        "chain",
        r"rejection_sample_method: got 'synthetic', want 'standard': .* own law",
    ),
    ({"rejection_sample_method": "block"}, "tree", "rejection_sample_method: got 'bl"),
    (
        {"enable_adaptive_verification": True},
        "chain",
        "enable_adaptive_verification: got True, want False",
    ),
    (
        {"use_local_argmax_reduction": True},
        "tree",
        "use_local_argmax_reduction: got True, want False",
    ),
    (
        {"suffix_decoding_max_tree_depth": 3},
        "chain",
        "suffix_decoding_max_tree_depth: got 3, want 24: .* leave it out",
    ),
    ({"max_model_len": 100}, "tree", "max_model_len: got 100, want the target's 512"),
    (SCHEDULE, "tree", r'per_batch_size: got \[.*\] with shape "tree", want shape "ch'),
]


@pytest.mark.parametrize(("speculation", "shape", "message"), UNFOLLOWED, ids=str)
def test_what_would_be_ignored_is_refused(
    models: Models, speculation: dict[str, Any], shape: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        configured(models, speculation, **SHAPES[shape])


def test_schedule_is_refused_beside_a_budget(models: Models) -> None:
    with pytest.raises(ValueError, match='shape "auto" follows the load by itself'):
        configured(models, SCHEDULE, additional_config={})


def test_defaults_given_by_name_are_no_reason_to_refuse(models: Models) -> None:
    given = {"rejection_sample_method": "standard", "max_model_len": 512}
    config = configured(models, given, **SHAPES["tree"])
    assert config.parallel_config.worker_cls.startswith("vllm_eagle3.")


def test_followed_fields_are_fields_of_vllm() -> None:
    from vllm.config import SpeculativeConfig

    from vllm_eagle3.integration.speculative_options import FOLLOWED

    assert {field.name for field in fields(SpeculativeConfig)} >= FOLLOWED


# ---- followed, beside trees as well

FOLLOWED_ONES: list[dict[str, Any]] = [
    {"disable_padded_drafter_batch": True},
    {"disable_eagle_block_drop": True},
    {"attention_backend": "CPU_ATTN"},
    {"enforce_eager": True},
]
CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def plain(engine: EnginePool) -> Run:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2
    )
    return engine("f1", **CACHED).run(known_prompts(), params)


@pytest.mark.engine
@pytest.mark.parametrize("speculation", FOLLOWED_ONES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_followed_leaves_the_text_alone(
    engine: EnginePool, plain: Run, shape: str, speculation: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False
    )
    handle = engine("f1", "h1", speculation=speculation, **CACHED, **SHAPES[shape])
    for _ in range(2):
        run = handle.run(known_prompts(), params)
        assert not differing(plain, run.token_ids)
        assert run.accepted > 0.3 * run.drafted / (1 if shape == "chain" else 4) > 0
