"""Walk along a text as a speculating engine does, and count what it would count.

    text      ... p0 p1 | a  b  c  d  e  f | tail        2 drafts a step
    prefill             a                                emits the first token, no draft
    step 1    drafts after a: b c, both right            emits b c d
    step 2    drafts after d: e right, x wrong           emits e f
    counted   2 drafts, 4 draft tokens, 3 accepted       acceptance length 2.5

A step is counted whole, also where it runs beyond the end of the reply, because the
engine counts it before it cuts the text: hence the tail.
"""

from __future__ import annotations

import torch

from ..acceptance import DraftCounts


def walk(
    hits: torch.Tensor,  # [tokens, num_drafts], bool
    num_prompt_tokens: int,
    num_reply_tokens: int,
) -> DraftCounts:
    """What vLLM's counters would show for this text.

    Args:
        hits: whether the draft at a depth, begun at an index (context up to there,
            next token known), equals the text.
        num_prompt_tokens, num_reply_tokens: of the text; the reply follows the prompt.
    """
    num_drafts = hits.shape[1]
    accepted_from = hits.long().cumprod(1).sum(1).tolist()
    drafts, per_depth = 0, [0] * num_drafts
    emitted = 1  # by the prefill
    while emitted < num_reply_tokens:
        accepted = accepted_from[num_prompt_tokens - 1 + emitted - 1]
        for depth in range(accepted):
            per_depth[depth] += 1
        drafts += 1
        emitted += accepted + 1
    return DraftCounts(drafts, drafts * num_drafts, sum(per_depth), tuple(per_depth))
