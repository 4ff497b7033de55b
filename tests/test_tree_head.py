"""What the head drafts first does not depend on the tree that was drafted before.

Its keys and values come from the target's true features of accepted tokens, never from
what it fed back to itself while a tree grew.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_run import EngineHandle
from tests.models.random_llama import known_prompts, other_prompts
from tests.tree_engine import JudgedStep, judged_steps, tree_settings

pytestmark = pytest.mark.engine

REPLY = 60


def _steps(handle: EngineHandle) -> dict[tuple[int, int], JudgedStep]:
    """(request, tokens emitted before) -> that step."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=REPLY, ignore_eos=True, detokenize=False
    )
    with judged_steps(handle) as steps:
        run = handle.run(known_prompts() + other_prompts(), params)
    assert run.drafted > 0
    assert run.accepted > 0
    requests = {step.req_id for step in steps}
    in_order = sorted(requests, key=lambda req_id: int(req_id.split("-")[0]))
    return {(in_order.index(s.req_id), s.num_before): s for s in steps}


def test_first_drafts_of_chain_and_tree_are_the_same(engine: Any) -> None:
    chain = {"vllm_eagle3": {"shape": "chain"}}
    single = _steps(
        engine("f1", "h1", num_speculative_tokens=1, additional_config=chain)
    )
    tree = _steps(engine("f1", "h1", **tree_settings(4, 6, 16)))
    common = single.keys() & tree.keys()
    assert len(common) > 200
    # A near-tie of the head's first two may go either way.
    differing = [
        place
        for place in common
        if single[place].token_ids[0] != tree[place].token_ids[0]
    ]
    assert len(differing) <= len(common) // 100
    accepted = [
        sum(steps[p].token_ids[0] == steps[p].emitted[0] for p in common)
        for steps in (single, tree)
    ]
    assert accepted[0] > 20
    assert abs(accepted[0] - accepted[1]) <= len(differing)
