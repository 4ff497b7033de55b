"""Ranked and sampled drafts in one batch: each request gets its own kind; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.models.bigram import bigram_table
from vllm_eagle3.drafter import HeadOutput, TreeShape, grow
from vllm_eagle3.integration.coupled import Levels
from vllm_eagle3.integration.draft_sampling import DraftSampling, random_stream
from vllm_eagle3.integration.proposer import Eagle3Proposer, Roots

CPU = torch.device("cpu")
LAST = (65, 66, 67, 68, 69)  # last token of each request
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=1.0),
    "seeded": SamplingParams(temperature=1.0, seed=1),
    "hot": SamplingParams(temperature=2.0),
    "cool": SamplingParams(temperature=0.5),
}
SAMPLED = [1, 3]  # rows of the batch


def _advance(level: int, token_ids: torch.Tensor, *_: Any) -> HeadOutput:
    return HeadOutput(torch.zeros(*token_ids.shape, 1), bigram_table()[token_ids])


def _proposer(shape: TreeShape | None, trees_at_once: int) -> Any:
    proposer = object.__new__(Eagle3Proposer)
    requests = {r: SimpleNamespace(sampling_params=p) for r, p in PARAMS.items()}
    fields = {
        "device": CPU,
        "runner": SimpleNamespace(
            requests=requests, input_batch=SimpleNamespace(req_ids=list(PARAMS))
        ),
        "drawn": {"finished": None, "warm": None},
        "last_parents": None,
        "_to_target_ids": None,
        "_tree_shape": shape,
        "plan": None,
        "last_scores": None,
        "_trees_at_once": trees_at_once,
        "_sampling": DraftSampling(None),
        "_draft_noise": random_stream(0, "drafting", CPU),
        "_advance": lambda roots, depth: _advance,
        "_levels": Levels(lambda planned: planned, lambda: None),
    }
    for name, value in fields.items():
        setattr(proposer, name, value)
    return proposer


def _roots() -> Roots:
    logits = bigram_table()[list(LAST)][:, None]
    count = len(LAST)
    metadata = CommonAttentionMetadata(
        query_start_loc=torch.arange(count + 1),
        query_start_loc_cpu=torch.arange(count + 1),
        seq_lens=torch.ones(count),
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=torch.arange(count)[:, None],
        slot_mapping=torch.arange(count),
    )
    output = HeadOutput(torch.zeros(count, 1, 1), logits)
    positions = torch.arange(count)
    return Roots(output, positions, positions + 1, metadata, list(range(count)))


SAMPLING = SimpleNamespace(
    all_greedy=False,
    temperature=torch.tensor([p.temperature for p in PARAMS.values()]),
)


@pytest.mark.parametrize("trees_at_once", [1, 2, 64])
@pytest.mark.parametrize("shape", [None, TreeShape(8, 4, 3)], ids=["chain", "tree"])
def test_every_request_gets_its_own_kind(
    shape: TreeShape | None, trees_at_once: int
) -> None:
    proposer = _proposer(shape, trees_at_once)
    drafts = proposer._grow(4, _roots(), SAMPLING)
    limits = shape or TreeShape.chain(4)
    assert drafts.shape == (len(LAST), limits.num_nodes)
    assert sorted(proposer.drawn) == ["hot", "warm"]
    ranked = grow(_roots().output, _advance, None, limits)
    for row, req_id in enumerate(PARAMS):
        if row not in SAMPLED:
            assert set(drafts[row].tolist()) == set(ranked.token_ids[row].tolist())
            continue
        kept = proposer.drawn[req_id]
        assert kept.token_ids.tolist() == drafts[row].tolist()
        _check_laws(kept, LAST[row], _parents(proposer, row, limits), row)


def _parents(proposer: Any, row: int, limits: TreeShape) -> list[int]:
    if proposer.last_parents is None:
        return list(range(-1, limits.num_nodes - 1))
    return proposer.last_parents[row]


def _check_laws(kept: Any, last: int, parents: list[int], row: int) -> None:
    """The law kept for a node's children is the head's after that node's token."""
    tokens = [last, *kept.token_ids.tolist()]
    temperature = SAMPLING.temperature[row]
    for node in {-1, *parents}:
        want = (bigram_table()[tokens[node + 1]] / temperature).softmax(-1)
        torch.testing.assert_close(kept.q_after(torch.tensor([node]))[0], want)
    for node, parent in enumerate(parents):
        assert parent < node
    assert len(parents) == len(kept.token_ids)


def test_parts_hold_the_rows_of_their_own_requests() -> None:
    part = _roots().part([1, 3])
    assert part.positions.tolist() == [1, 3]
    assert part.seq_lens.tolist() == [2, 4]
    assert part.metadata.block_table_tensor.tolist() == [[1], [3]]
    want = bigram_table()[[66, 68]][:, None]
    assert torch.equal(part.output.logits, want)


def test_greedy_batches_ask_nobody() -> None:
    proposer = _proposer(TreeShape(8, 4, 3), 64)
    proposer.runner.requests["warm"].sampling_params = None  # would be asked
    greedy = SimpleNamespace(all_greedy=True, temperature=None)
    assert proposer._grow(8, _roots(), greedy).shape == (5, 8)
    assert proposer.drawn == {}
    assert np.array(proposer.last_parents).shape == (5, 8)
