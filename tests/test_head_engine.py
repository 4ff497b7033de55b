"""Heads of every make in a real engine: run as meant, or left to vLLM.

The heads are H2, exact for the bigram target F2, in another layout, dtype, name or
arrangement: as it is meant, every draft is accepted; misread, hardly any.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bigram_heads import exact_head, greedy_chain
from tests.engine_run import EnginePool, Run
from tests.models.bigram import VOCAB, bigram_table
from tests.models.head_variants import edit_head
from tests.models.random_llama import known_prompts
from tests.models.shapes import HIDDEN, head_config, write_head
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.head_io import write_head as write_any_head
from vllm_eagle3.taps import default_tap_ids
from vllm_eagle3.vocab import DraftVocab

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

Models = Callable[[str], Path]
TAPS = "eagle_aux_hidden_state_layer_ids"
FULL = DraftVocab.full(VOCAB)
# One token from the prompt's pass, then four a step if all three drafts are right.
TOKENS = 1 + 4 * 6
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 1024}


def greedy(max_tokens: int = TOKENS) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths
    ]


def assert_exact(run: Run, prompts: list[list[int]]) -> None:
    """The target's own greedy text, by drafts that were all accepted."""
    table = bigram_table()
    for prompt, reply in zip(prompts, run.token_ids, strict=True):
        assert reply == greedy_chain(table, prompt[-1], TOKENS)
    assert run.drafted == run.accepted == len(prompts) * (TOKENS - 1) // 4 * 3


# ---- works as the checkpoint means it

ALL_NORMS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
}
slow = pytest.mark.slow

# Name -> switches of the head, layout, dtype it is stored in, changes to its files.
WORKING: dict[str, tuple[dict[str, bool], str, torch.dtype, dict[str, Any]]] = {
    # The layout's own name for itself; switches that only weights show.
    "speculators, all norms": (
        ALL_NORMS,
        "speculators",
        torch.float32,
        {"drop": ("norm_before_fc", "fc_norm")},
    ),
    "specforge, fp16, no architectures, 128 positions": (
        {},
        "specforge",
        torch.float16,
        {
            "drop": ("architectures", TAPS),
            "config": {"max_position_embeddings": 128},
        },
    ),
    "zero map, bf16, lm_head of the target, Qwen's name": (
        {},
        "safeailab",
        torch.bfloat16,
        {
            "drop": ("lm_head.weight",),
            "config": {"architectures": ["Qwen2ForCausalLM"]},
            "tensors": {"d2t": torch.zeros(VOCAB, dtype=torch.int64)},
        },
    ),
    **{name: ({name: True}, "safeailab", torch.float32, {}) for name in ALL_NORMS},
    **{
        f"named {name}": (
            {},
            "safeailab",
            torch.float32,
            {"config": {"architectures": [name]}},
        )
        for name in ("LlamaForCausalLM", "Eagle3Speculator", "LlamaForCausalLMEagle3")
    },
    "layer types of the target": (
        {},
        "safeailab",
        torch.float32,
        {"config": {"layer_types": ["full_attention"]}},
    ),
}
QUICK = 3


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[slow] if place >= QUICK else [])
        for place, kind in enumerate(WORKING)
    ],
)
def test_runs_as_the_checkpoint_means_it(
    kind: str, engine: EnginePool, tmp_path: Path
) -> None:
    switches, layout, dtype, edit = WORKING[kind]
    head = exact_head(bigram_table(), **switches).to(dtype)
    write_any_head(tmp_path / "head", head, FULL, layout)
    edit_head(tmp_path / "head", **edit)
    prompts = prompts_of(3, 100, 127, 600)
    run = engine("f2", tmp_path / "head", **SMALL).run(prompts, greedy())
    assert_exact(run, prompts)


@torch.no_grad()
def share_of_right_chains(head: Eagle3DraftHead) -> float:
    """Of three drafts after each token, where attention sees its own place only."""
    table, embedding = bigram_table(), torch.eye(VOCAB)
    before, tokens = torch.arange(VOCAB).roll(1), torch.arange(VOCAB)
    features = head.fuse(embedding[before].repeat(1, len(head.config.tap_ids)))
    right = torch.ones(VOCAB, dtype=torch.bool)
    for _ in range(3):
        hidden = head(
            embedding[tokens][:, None],
            features[:, None],
            torch.zeros(1, dtype=torch.long),
            lambda _layer, _q, _k, v: v,
        )
        drafts = head.logits(hidden)[:, 0].argmax(-1)
        right &= drafts == table[tokens].argmax(-1)
        tokens, features = drafts, head.feedback(hidden)[:, 0]
    return float(right.float().mean())


@pytest.mark.parametrize("switch", ALL_NORMS)
def test_an_ignored_norm_would_show(switch: str) -> None:
    """The heads above are no proof unless this holds."""
    meant = exact_head(bigram_table(), **{switch: True})
    assert share_of_right_chains(meant) == 1.0
    ignored = Eagle3DraftHead(replace(meant.config, **{switch: False}))
    weights = meant.state_dict()
    known = ignored.state_dict()
    ignored.load_state_dict({name: weights[name] for name in known})
    assert share_of_right_chains(ignored) < 0.5


def test_reduced_vocabulary_maps_its_drafts(engine: EnginePool, tmp_path: Path) -> None:
    """48 of 128 ids, no run of the first: accepted is what paper says, no more."""
    table = bigram_table()
    # Half of what the prompts' replies hold, so that some drafts cannot be right.
    prompts = prompts_of(3, 30, 40, 50)
    replies = [greedy_chain(table, prompt[-1], TOKENS) for prompt in prompts]
    seen = sorted({token for reply in replies for token in reply})
    others = [token for token in range(60, VOCAB) if token not in seen]
    vocab = DraftVocab(torch.tensor(sorted((seen[::2] + others)[:48])), VOCAB)
    write_any_head(tmp_path / "head", exact_head(table, vocab), vocab)
    run = engine("f2", tmp_path / "head", **SMALL).run(prompts, greedy())
    assert run.token_ids == replies
    known = [[bool(vocab.t2d[token]) for token in reply] for reply in replies]
    assert run.accepted == sum(accepted_by_hand(row) for row in known) > 0
    assert run.accepted < run.drafted


def accepted_by_hand(known: list[bool]) -> int:
    """Drafts of an exact head that are accepted: those it has a token for."""
    accepted, place = 0, 1
    while place < len(known):
        drafts = known[place : place + 3]
        right = drafts.index(False) if False in drafts else len(drafts)
        accepted += right
        place += right + 1
    return accepted


def tied_target(f2: Path, folder: Path) -> Path:
    """F2 with its embedding as lm_head: it repeats its last token for ever."""
    shutil.copytree(f2, folder)
    return edit_head(
        folder, config={"tie_word_embeddings": True}, drop=("lm_head.weight",)
    )


@pytest.mark.parametrize(
    "size", [48, pytest.param(VOCAB, marks=slow)], ids=["reduced", "without lm_head"]
)
def test_tied_target(
    size: int, models: Models, engine: EnginePool, tmp_path: Path
) -> None:
    """A reduced lm_head stays the head's; a missing one is the tied embedding."""
    target = tied_target(models("f2"), tmp_path / "target")
    vocab = DraftVocab(torch.arange(VOCAB - size, VOCAB), VOCAB)
    head = exact_head(20 * torch.eye(VOCAB), vocab)
    write_any_head(tmp_path / "head", head, vocab)
    dropped = ("lm_head.weight",) if size == VOCAB else ()
    edit_head(tmp_path / "head", {"tie_word_embeddings": True}, drop=dropped)
    prompts = [[5, 90], [7, 8, 127]]
    run = engine(target, tmp_path / "head", **SMALL).run(prompts, greedy())
    assert run.token_ids == [[90] * TOKENS, [127] * TOKENS]
    assert run.drafted == run.accepted > 0


# ---- taps


def test_output_ids_are_the_same_taps(
    models: Models, engine: EnginePool, tmp_path: Path
) -> None:
    """SpecForge's numbering of H1's taps drafts as well as H1; one off would not."""
    prompts, params = known_prompts()[:6], greedy(40)
    base = engine("f1", "h1", **SMALL).run(prompts, params)
    head = tmp_path / "head"
    shutil.copytree(models("h1"), head)
    nested = {"eagle_config": {TAPS: [0, 2, 4]}}
    edit_head(head, nested, drop=(TAPS, "num_aux_hidden_states"))
    run = engine("f1", head, **SMALL).run(prompts, params)
    assert run.token_ids == base.token_ids
    assert (run.drafted, run.accepted) == (base.drafted, base.accepted)
    assert run.accepted > 0.5 * run.drafted


def shallow_target(f1: Path, folder: Path, layers: int) -> Path:
    """The first layers of F1."""
    shutil.copytree(f1, folder)
    edit_head(folder, config={"num_hidden_layers": layers})
    file = folder / "model.safetensors"
    kept = {
        name: weight
        for name, weight in load_file(file).items()
        if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < layers
    }
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def taps_fed(engine: EnginePool, target: Path, head: Path) -> tuple[Any, torch.Tensor]:
    """The run of a prompt, and what its pass hands to fc, [tokens, taps * hidden]."""
    handle = engine(target, head, **SMALL)
    core = handle.llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.drafter.model
    fed: list[torch.Tensor] = []
    hook = model.model.fc.register_forward_pre_hook(
        lambda _module, inputs: fed.append(inputs[0].clone())
    )
    run = handle.run([known_prompts()[2]], greedy(8))
    hook.remove()
    return run, fed[0]


def states_of(target: Path) -> tuple[torch.Tensor, ...]:
    """Residual stream entering each layer, and leaving the last: [tokens, hidden]."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    states: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _m, inputs: states.append(inputs[0][0]))
    model.model.norm.register_forward_pre_hook(
        lambda _m, inputs: states.append(inputs[0][0])
    )
    with torch.no_grad():
        model(torch.tensor([known_prompts()[2]]))
    return tuple(states)


TAP_CASES = [
    pytest.param(1, None),
    pytest.param(2, None, marks=slow),
    pytest.param(3, None, marks=slow),
    pytest.param(4, None, marks=slow),
    pytest.param(5, None, marks=slow),
    pytest.param(6, None),
    pytest.param(6, (2, 6), marks=slow),
    pytest.param(6, (0, 2, 3, 5, 6), marks=slow),
]


@pytest.mark.parametrize(("layers", "written"), TAP_CASES)
def test_captured_layers_are_those_meant(
    layers: int,
    written: tuple[int, ...] | None,
    models: Models,
    engine: EnginePool,
    tmp_path: Path,
) -> None:
    """Ids as written, or the default ones of shallow targets where none are."""
    target = shallow_target(models("f1"), tmp_path / "target", layers)
    ids = written or default_tap_ids(layers)
    torch.manual_seed(0)
    config = head_config(vocab_size=512, kv_heads=2, tap_ids=ids)
    write_head(tmp_path / "head", Eagle3DraftHead(config))
    if written is None:
        dropped = (TAPS, "eagle_config", "num_aux_hidden_states")
        edit_head(tmp_path / "head", drop=dropped)
    run, fed = taps_fed(engine, target, tmp_path / "head")
    assert run.drafted > 0
    states = states_of(target)
    expected = torch.cat([states[i] for i in ids], dim=-1)
    torch.testing.assert_close(fed[: len(expected)], expected, atol=1e-4, rtol=1e-4)


# ---- drafts switched off for some steps


def test_drafting_resumes_after_steps_without(engine: EnginePool) -> None:
    """No drafts above two requests; the last one left is drafted for again."""
    prompts = known_prompts()[:4]
    params = [greedy(n) for n in (8, 8, 8, 40)]
    plain = engine("f1", **SMALL).run(prompts, params)
    schedule = {"num_speculative_tokens_per_batch_size": [(1, 2, 3), (3, 4, 0)]}
    run = engine("f1", "h1", speculation=schedule, **SMALL).run(prompts, params)
    assert run.token_ids == plain.token_ids
    assert run.accepted > 0.5 * run.drafted > 0
    assert run.drafted <= 3 * 32


# ---- another kind of head: vLLM's own chain, one warning


def qwen3(folder: Path) -> dict[str, Any]:
    """Qwen3's attention: normed queries and keys, sharp by their norms."""
    config = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    norms = {
        f"midlayer.self_attn.{name}.weight": torch.full((32,), 20.0)
        for name in ("q_norm", "k_norm")
    }
    edit_head(folder, config, norms)
    return {}


def sliding(folder: Path) -> dict[str, Any]:
    config = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    edit_head(folder, config)
    return {}


def without_taps(folder: Path) -> dict[str, Any]:
    nested = {"eagle_config": {"use_aux_hidden_state": False}}
    edit_head(folder, nested, drop=("fc.weight", TAPS, "num_aux_hidden_states"))
    return {}


def parallel(folder: Path) -> dict[str, Any]:
    mask = {"mask_hidden": torch.zeros(1, 3 * HIDDEN)}
    edit_head(folder, {"mask_token_id": 5, "pard_token": 5}, mask)
    return {"parallel_drafting": True}


# Kind -> (what makes it one, its switches, least share of drafts accepted).
FOREIGN: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, bool], float]] = {
    "self_attn": (qwen3, {}, 1.0),
    "layer_types": (sliding, {}, 1.0),
    "use_aux_hidden_state": (without_taps, {"norm_before_residual": True}, 1.0),
    "mask_token_id": (parallel, {}, 1 / 3),
}


@pytest.mark.parametrize("field", FOREIGN)
def test_head_of_another_kind_keeps_vllms_chain(
    field: str, engine: EnginePool, tmp_path: Path, warnings: list[str]
) -> None:
    make, switches, share = FOREIGN[field]
    write_any_head(tmp_path / "head", exact_head(bigram_table(), **switches), FULL)
    spec = make(tmp_path / "head")
    handle = engine("f2", tmp_path / "head", speculation=spec, **SMALL)
    (warning,) = [m for m in warnings if "vLLM's own chain of 3" in m]
    assert f"{field}: got" in warning or f"{field}: attention of another" in warning
    config = handle.llm.llm_engine.vllm_config
    assert not config.parallel_config.worker_cls.startswith("vllm_eagle3.")
    prompts = prompts_of(3, 40)
    run = handle.run(prompts, greedy())
    table = bigram_table()
    assert run.token_ids == [greedy_chain(table, p[-1], TOKENS) for p in prompts]
    assert run.drafted > 0 and run.accepted >= share * run.drafted
