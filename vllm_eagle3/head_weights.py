"""Judge a head's tensors: its vocabulary map, and each weight against config.json."""

from __future__ import annotations

import torch

from vllm_eagle3.draft_head import DraftHeadConfig, Eagle3DraftHead
from vllm_eagle3.head_meaning import HeadMeaning
from vllm_eagle3.vocab import DraftVocab


def read_vocab(meaning: HeadMeaning, config: DraftHeadConfig) -> None:
    size, d2t = config.draft_vocab_size, meaning.d2t
    if size >= config.vocab_size and (d2t is None or not bool(d2t.any())):
        if size > config.vocab_size:
            meaning.note(
                "error",
                "draft_vocab_size",
                f"got {size}, want at most the target's {config.vocab_size}",
            )
            return
        meaning.vocab = DraftVocab.full(config.vocab_size)
        return
    if d2t is None:
        meaning.note(
            "error",
            "d2t",
            f"missing, but the head scores {size} of {config.vocab_size} token ids; "
            "without the map its tokens are unknown. Export the head with d2t",
        )
        return
    if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        meaning.note(
            "error",
            "d2t",
            f"got {d2t.dtype} {list(d2t.shape)}, want int64 [{size}] "
            "(draft_vocab_size); config.json and weights are of different heads",
        )
        return
    try:
        meaning.vocab = DraftVocab.from_d2t(d2t, config.vocab_size)
    except ValueError as error:
        meaning.note("error", "d2t", str(error))
        return
    _compare_maps(meaning, meaning.vocab)


def _compare_maps(meaning: HeadMeaning, vocab: DraftVocab) -> None:
    t2d = meaning.t2d
    if t2d is not None and t2d.shape != (vocab.target_vocab_size,):
        meaning.note(
            "error",
            "t2d",
            f"got {list(t2d.shape)}, want [{vocab.target_vocab_size}] "
            "(the target's vocabulary)",
        )
    elif t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        meaning.note(
            "error",
            "d2t",
            "d2t and t2d name different token ids; d2t holds offsets "
            "(target_id = draft_id + d2t[draft_id]), is it of another head?",
        )
    elif not vocab.is_full and not bool(vocab.d2t.any()):
        # All zeros is what a map looks like that nobody filled.
        meaning.note(
            "error" if t2d is None else "warning",
            "d2t",
            f"all zeros: the head's tokens would be the ids 0..{len(vocab) - 1}; "
            + (
                "export the head with its map, or with t2d if that is meant"
                if t2d is None
                else "t2d confirms it"
            ),
        )


def compare_weights(meaning: HeadMeaning, config: DraftHeadConfig) -> None:
    """Note every weight that is missing, unused, misshapen, or no plain number."""
    try:
        with torch.device("meta"):
            wanted = Eagle3DraftHead(config).state_dict()
    except ValueError as error:
        meaning.note("error", "config.json", str(error))
        return
    for name in sorted(set(meaning.weights) - set(wanted)):
        meaning.note(
            "error", name, "unused: no part of an EAGLE-3 head with these switches"
        )
    for name in sorted(set(wanted) - set(meaning.weights)):
        _note_missing(meaning, config, name)
    for name in sorted(set(wanted) & set(meaning.weights)):
        weight, shape = meaning.weights[name], wanted[name].shape
        if weight.shape != shape:
            message = f"got {list(weight.shape)}, want {list(shape)} by config.json"
            meaning.note("error", name, message)
        elif weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            meaning.note_foreign(
                name,
                f"got {weight.dtype}, want float32, float16 or bfloat16; "
                "this package does not run quantised heads",
            )
        elif not bool(torch.isfinite(weight).all()):
            meaning.note("error", name, "holds NaN or infinity; training diverged")


def _note_missing(meaning: HeadMeaning, config: DraftHeadConfig, name: str) -> None:
    if name.endswith("o_proj.bias"):
        meaning.note(
            "error",
            name,
            "missing, but attention_bias gives the output projection one too (vLLM "
            "would read uninitialised memory); store zeros if it has none",
        )
    elif name != "lm_head.weight":
        meaning.note("error", name, "missing; export the head again")
    elif config.draft_vocab_size == config.vocab_size:
        meaning.note("ok", name, "not stored; the target's lm_head is used")
    else:
        meaning.note(
            "error",
            name,
            f"missing, and the target's lm_head scores {config.vocab_size} ids, "
            f"the head {config.draft_vocab_size}; export the head again",
        )
