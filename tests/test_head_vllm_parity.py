"""Our draft head against vLLM's own module, weights loaded by vLLM's loader.

Only the attention kernel is replaced (it needs a running engine); fusion, norms,
projections, rotary positions, residuals, logits and weight loading are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.head_variants import (
    TARGET_CONFIG,
    VARIANTS,
    VOCAB,
    draft_step,
    edit_head,
    make_head,
)
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.head_io import (
    convert_head,
    read_head,
    serving_overrides,
    write_head,
)
from vllm_eagle3.vocab import DraftVocab

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

LoadHead = Callable[..., Any]


class CausalAttention(torch.nn.Module):
    """Stands in for vLLM's attention kernel: causal over one sequence."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.heads, self.scale = kernel.num_heads, kernel.impl.scale
        self.kv_heads, self.head_dim = kernel.num_kv_heads, kernel.head_size

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        def heads(x: torch.Tensor, count: int) -> torch.Tensor:
            return x.view(-1, count, self.head_dim).transpose(0, 1)[None]

        out = torch.nn.functional.scaled_dot_product_attention(
            heads(q, self.heads),
            heads(k, self.kv_heads),
            heads(v, self.kv_heads),
            is_causal=True,
            enable_gqa=True,
            scale=self.scale,
        )
        return out[0].transpose(0, 1).flatten(1)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The process groups that vLLM's parallel layers want, of one process."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    meeting = tmp_path_factory.mktemp("groups") / "store"

    def start() -> None:
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)

    yield start
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def load_in_vllm(
    small_target: Path, groups: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> LoadHead:
    """A function that has vLLM build and load a head for `target`."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # Stock vLLM, whether or not an earlier test has loaded the plugin.
    integration = "vllm_eagle3.integration"
    monkeypatch.setattr(f"{integration}.engine_config.prepare", lambda *_: None)
    monkeypatch.setattr(f"{integration}.head_fit.head_fields", lambda *_: None)
    # vLLM's loader empties the accelerator's cache; on a CPU its worker stubs that.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    stock = SpeculativeConfig.hf_config_override

    def load(head_dir: Path, overrides: dict[str, Any] | None = None) -> Any:
        def override(hf_config: Any) -> Any:
            # vLLM first calls this with a dummy, to learn the model type.
            if not hf_config.model_type.startswith("dummy_"):
                for name, value in (overrides or {}).items():
                    setattr(hf_config, name, value)
            return stock(hf_config)

        monkeypatch.setattr(
            SpeculativeConfig, "hf_config_override", staticmethod(override)
        )
        config = EngineArgs(
            model=str(small_target),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            dtype="float32",
            speculative_config={
                "method": "eagle3",
                "model": str(head_dir),
                "num_speculative_tokens": 3,
            },
        ).create_engine_config()
        draft = config.speculative_config.draft_model_config
        with set_current_vllm_config(config):
            groups()
            model = get_model(vllm_config=config, model_config=draft)
        for layer in model.model.layers:
            layer.self_attn.attn = CausalAttention(layer.self_attn.attn)
        return model

    return load


@torch.no_grad()
def assert_same(model: Any, head: Eagle3DraftHead, vocab: DraftVocab) -> None:
    """vLLM's module and ours agree on fused features, feedback and logits."""
    ours = draft_step(head)
    fused = model.combine_hidden_states(ours["taps"])
    torch.testing.assert_close(fused, ours["fused"], atol=1e-4, rtol=1e-4)
    ids = torch.zeros(len(fused), dtype=torch.int64)
    hidden, feedback = model(ids, ours["positions"], fused, ours["embeds"])
    torch.testing.assert_close(feedback, ours["feedback"], atol=1e-4, rtol=1e-4)
    logits = model.compute_logits(hidden)
    assert logits.shape[-1] == vocab.target_vocab_size
    drafted = logits[:, vocab.to_target_ids]
    torch.testing.assert_close(drafted, ours["logits"], atol=1e-4, rtol=1e-4)
    assert bool((logits[:, ~vocab.t2d] == float("-inf")).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_vllm_without_overrides(
    variant: str, tmp_path: Path, load_in_vllm: LoadHead
) -> None:
    head, vocab = make_head(**VARIANTS[variant])
    write_head(tmp_path / "head", head, vocab, target_config=TARGET_CONFIG)
    assert_same(load_in_vllm(tmp_path / "head"), head, vocab)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
@pytest.mark.parametrize("variant", ["plain", "everything", "yarn_rope"])
def test_equals_vllm_in_other_layouts(
    variant: str,
    layout: str,
    tmp_path: Path,
    small_target: Path,
    load_in_vllm: LoadHead,
) -> None:
    head, vocab = make_head(**VARIANTS[variant])
    write_head(tmp_path / "head", head, vocab, layout, TARGET_CONFIG)
    overrides = serving_overrides(tmp_path / "head", small_target)
    assert_same(load_in_vllm(tmp_path / "head", overrides), head, vocab)


# What stock vLLM reads differently from what the checkpoint means -> how it is made.
MISREAD: dict[str, dict[str, Any]] = {
    "five taps at top level only": {
        "variant": "five_taps",
        "edit": {"drop": ("num_aux_hidden_states", "eagle_config")},
    },
    "speculators without norm_before_residual": {
        "variant": "plain",
        "layout": "speculators",
        "edit": {"drop": ("norm_before_residual",)},
    },
    "input norm whose switch is not written": {
        "variant": "norm_before_fc",
        "edit": {"drop": ("norm_before_fc",)},
    },
    "tied embeddings flag": {
        "variant": "reduced_vocab",
        "edit": {"config": {"tie_word_embeddings": True}},
    },
    "architecture of another name": {
        "variant": "plain",
        "edit": {"config": {"architectures": ["Qwen2ForCausalLMEagle3"]}},
    },
    "no architecture": {"variant": "plain", "edit": {"drop": ("architectures",)}},
    "layer types of the target": {
        "variant": "two_layers",
        "edit": {"config": {"layer_types": ["full_attention"] * 2}},
    },
    "draft vocabulary size not written": {
        "variant": "reduced_vocab",
        "edit": {"drop": ("draft_vocab_size",)},
    },
    "rope in its old spelling": {
        "variant": "linear_rope",
        "edit": {
            "config": {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "drop": ("rope_parameters",),
        },
    },
}


@pytest.mark.parametrize("fault", MISREAD)
def test_overrides_make_vllm_compute_what_is_meant(
    fault: str, tmp_path: Path, small_target: Path, load_in_vllm: LoadHead
) -> None:
    case = MISREAD[fault]
    head, vocab = make_head(**VARIANTS[case["variant"]])
    folder = tmp_path / "head"
    write_head(folder, head, vocab, case.get("layout", "safeailab"), TARGET_CONFIG)
    edit_head(folder, **case.get("edit", {}))
    loaded = read_head(folder, small_target)
    assert_same(
        load_in_vllm(folder, serving_overrides(folder, small_target)),
        loaded.head,
        loaded.vocab,
    )
    torch.testing.assert_close(
        draft_step(loaded.head)["logits"], draft_step(head)["logits"]
    )


def test_vllm_alone_misreads_a_speculators_default(
    tmp_path: Path, load_in_vllm: LoadHead
) -> None:
    """Were this to pass without overrides, the override would be dead weight."""
    head, vocab = make_head()
    write_head(tmp_path / "head", head, vocab, "speculators", TARGET_CONFIG)
    edit_head(tmp_path / "head", drop=("norm_before_residual",))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(load_in_vllm(tmp_path / "head"), head, vocab)


def test_rotary_table_reaches_the_targets_positions(
    tmp_path: Path, small_target: Path, load_in_vllm: LoadHead
) -> None:
    head, vocab = make_head(max_position_embeddings=128)
    write_head(tmp_path / "head", head, vocab, target_config=TARGET_CONFIG)
    overrides = serving_overrides(tmp_path / "head", small_target)
    model = load_in_vllm(tmp_path / "head", overrides)
    table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    assert table.shape[0] >= TARGET_CONFIG["max_position_embeddings"]


def test_converted_head_has_no_map_of_a_full_vocabulary(
    tmp_path: Path, small_target: Path, load_in_vllm: LoadHead
) -> None:
    """Stock vLLM's loader stops at such a map; ours leaves it out while loading."""
    head, vocab = make_head()
    write_head(tmp_path / "head", head, vocab, target_config=TARGET_CONFIG)
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    edit_head(tmp_path / "head", tensors=zeros)
    convert_head(tmp_path / "head", tmp_path / "converted", "safeailab", small_target)
    assert_same(load_in_vllm(tmp_path / "converted"), head, vocab)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_dtype_differs_from_the_engines(
    dtype: torch.dtype, tmp_path: Path, load_in_vllm: LoadHead
) -> None:
    head, vocab = make_head()
    write_head(tmp_path / "head", head.to(dtype), vocab, target_config=TARGET_CONFIG)
    assert_same(load_in_vllm(tmp_path / "head"), head.to(torch.float32), vocab)
