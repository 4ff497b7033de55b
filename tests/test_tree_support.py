"""Engines that cannot hold trees draft chains, and say why in one line."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_eagle3.config import KEY, read_options
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.integration.tree_support import why_no_trees


def settings(**changed: Any) -> SimpleNamespace:
    """What is read of an engine's configuration; by default it can hold trees."""
    model = {
        "model": "some/vlm",
        "use_mla": False,
        "is_multimodal_model": False,
        "has_inner_state": False,
        "is_hybrid": False,
        "uses_mrope": False,
        "enable_sleep_mode": False,
        "sleep_preserve_parameter_names": [],
    }
    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "use_ubatching": False,
        "distributed_executor_backend": "uni",
        "data_parallel_size": 1,
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
    }
    connector = changed.pop("kv_transfer_config", None)
    scheduler_cls = changed.pop("scheduler_cls", None)
    options = changed.pop("options", {"shape": "tree", "top_k": 4})
    unknown = changed.keys() - model.keys() - parallel.keys()
    assert not unknown, unknown
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{name: changed.get(name, value) for name, value in model.items()}
        ),
        parallel_config=SimpleNamespace(
            **{name: changed.get(name, value) for name, value in parallel.items()}
        ),
        kv_transfer_config=connector,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=16,
            parallel_drafting=False,
            draft_sample_method="greedy",
        ),
        scheduler_config=SimpleNamespace(
            scheduler_cls=scheduler_cls,
            async_scheduling=False,
            max_num_batched_tokens=2048,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)
        ),
        additional_config={KEY: options, "other": 1},
    )


def test_an_ordinary_engine_holds_trees() -> None:
    assert why_no_trees(settings()) == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"use_mla": True}, "MLA"),
        ({"has_inner_state": True}, "recurrent"),
        ({"is_hybrid": True}, "recurrent"),
        ({"uses_mrope": True}, "M-RoPE"),
        ({"kv_transfer_config": "one"}, "KV connector"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"use_ubatching": True}, "DBO"),
    ],
    ids=str,
)
def test_each_obstacle_is_named(changed: dict[str, Any], why: str) -> None:
    assert why in why_no_trees(settings(**changed))


def test_such_an_engine_drafts_short_chains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(use_mla=True)
    prepare(config, monkeypatch, caplog)
    assert "chains of 5 in this engine, not trees: the target caches" in caplog.text
    assert config.speculative_config.num_speculative_tokens == 5
    # Every process reads the options again, and must come to the same shape.
    again = read_options(config.additional_config).tree_shape(5)
    assert again is not None and (again.num_nodes, again.top_k) == (5, 1)
    assert config.additional_config["other"] == 1
    assert config.parallel_config.worker_cls.startswith("vllm_eagle3.")


def test_auto_without_trees_chooses_between_chains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(use_mla=True, options={"shape": "auto"})
    prepare(config, monkeypatch, caplog)
    assert not caplog.text
    again = read_options(config.additional_config)
    assert again.shape == "auto"
    assert again.tree_shape(5) == TreeShape.chain(5)
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.scheduler_config.scheduler_cls.endswith("Eagle3Scheduler")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"data_parallel_size": 2}, "ranks of data parallelism"),
        ({"scheduler_cls": "their.Scheduler"}, "vLLM's own scheduler"),
    ],
)
def test_auto_without_a_budget_is_a_short_chain(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    why: str,
) -> None:
    config = settings(options={"shape": "auto"}, **changed)
    prepare(config, monkeypatch, caplog)
    assert f"chains of 3 in this engine, whatever they bring: {why}" in (
        caplog.text.replace("the budget needs ", "")
    )
    again = read_options(config.additional_config)
    assert (again.shape, again.tree_shape(3)) == ("chain", TreeShape.chain(3))


@pytest.mark.parametrize("shape", ["auto", "chain", "tree", "off"])
def test_a_target_that_reads_more_than_text_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shape: str
) -> None:
    config = settings(is_multimodal_model=True, options={"shape": shape})
    with pytest.raises(ValueError, match=r"model: got some/vlm, which reads more.*own"):
        prepare(config, monkeypatch, caplog)


def prepare(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    from vllm_eagle3.integration import engine_config

    monkeypatch.setattr(engine_config.head_fit, "foreign_reason", lambda spec: "")
    monkeypatch.setattr(engine_config, "refuse_unfollowed", lambda spec, shape: None)
    monkeypatch.setattr(engine_config.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, engine_config.logger.name):
        engine_config.prepare(config, unsupported="")
