"""H2, the exact head of the bigram target F2, in the shapes other trainers give heads.

Each is made so that every draft is right if, and only if, the engine reads the
checkpoint as it is meant: an ignored norm or switch leaves a feature of wrong scale
behind, and the drafts after it are wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.models.bigram import NORM_GAIN, TAP_IDS, VOCAB
from tests.models.shapes import HIDDEN, head_config
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.vocab import DraftVocab

EYE = torch.eye(HIDDEN)
# What the checkpoint's norms multiply by; far from one, so that it shows.
SCALE = -5.0


@torch.no_grad()
def exact_head(
    table: torch.Tensor,  # [last, next]
    vocab: DraftVocab | None = None,
    **switches: Any,
) -> Eagle3DraftHead:
    """The head whose drafts after a token are argmax(table[token])."""
    vocab = vocab or DraftVocab.full(VOCAB)
    config = head_config(vocab_size=VOCAB, kv_heads=4, tap_ids=TAP_IDS)
    config = replace(config, draft_vocab_size=len(vocab), **switches)
    head = Eagle3DraftHead(config)
    for weight in head.parameters():
        if weight.ndim == 2:
            weight.zero_()
    forget_feature(head)
    head.lm_head.weight.copy_(table.T[vocab.to_target_ids] / NORM_GAIN)
    if config.norm_before_fc or config.fc_norm:
        _undo_input_norms(head)
    if config.norm_before_residual:
        # The residual is the normed feature: make that one-hot again.
        head.fc.weight.mul_(abs(SCALE))
        head.layers[0].hidden_norm.weight.fill_(1 / NORM_GAIN)
        head.layers[0].self_attn.v_proj.weight[:, HIDDEN:] = -EYE
    if config.norm_output:
        # The stream holds |SCALE| one-hots; only the normed output is one-hot.
        head.layers[0].self_attn.v_proj.weight[:, :HIDDEN].mul_(abs(SCALE))
        head.norm.weight.fill_(1 / NORM_GAIN)
        head.lm_head.weight.mul_(NORM_GAIN)
    return head


def forget_feature(head: Eagle3DraftHead) -> None:
    """Attention at its own place adds the token's embedding, less the feature."""
    head.fc.weight[:, :HIDDEN] = EYE
    attention = head.layers[0].self_attn
    attention.q_proj.weight[:, :HIDDEN] = 100.0 / NORM_GAIN
    attention.k_proj.weight[:, :HIDDEN] = 100.0 / NORM_GAIN
    attention.v_proj.weight[:, :HIDDEN] = EYE / NORM_GAIN
    attention.v_proj.weight[:, HIDDEN:] = -EYE / NORM_GAIN
    attention.o_proj.weight.copy_(EYE)


def _undo_input_norms(head: Eagle3DraftHead) -> None:
    """Have fc turn what the norms made of the first tap into its one-hot again."""
    taps = torch.cat([EYE[:1]] * len(head.config.tap_ids), dim=-1)
    if head.config.norm_before_fc:
        head.input_norm.weight.fill_(SCALE)
    if head.config.fc_norm:
        for norm in head.fc_norm:
            norm.weight.fill_(SCALE)
    head.fc.weight.div_(head.fuse(taps)[0, 0])


def greedy_chain(table: torch.Tensor, last: int, length: int) -> list[int]:
    """The tokens that follow `last`, each the likeliest after the one before."""
    tokens = []
    for _ in range(length):
        last = int(table[last].argmax())
        tokens.append(last)
    return tokens
