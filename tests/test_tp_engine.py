"""Tensor parallel 2 on a CPU: the text of one rank, the right law, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine_run import EngineHandle, Run
from tests.law_runs import worst_excess
from tests.laws import LIMIT
from tests.models.random_llama import known_prompts, other_prompts
from tests.near_ties import differing
from tests.tree_engine import tree_settings

pytestmark = pytest.mark.engine

PROMPTS = known_prompts() + other_prompts()
REPLY = 48
LAW_SAMPLES = 400  # of each law


@pytest.fixture(scope="module", autouse=True)
def _unbound_threads() -> Iterator[None]:
    """vLLM binds one rank to a NUMA node, and a small machine has only one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="module")
def plain(engine: Any) -> Run:
    """One rank without speculation."""
    return engine("f1").run(PROMPTS, greedy(logprobs=2))


def greedy(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, **settings)


def checked(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Trees of this shape, with the ranks compared in every step."""
    settings = tree_settings(*shape)
    settings["additional_config"]["vllm_eagle3"]["check_ranks"] = True
    return settings


def run_greedy(plain: Run, handle: EngineHandle) -> Run:
    """Run the prompts; the text must be that of one rank without drafts."""
    run = handle.run(PROMPTS, greedy())
    assert [len(reply) for reply in run.token_ids] == [REPLY] * len(PROMPTS)
    assert len(differing(plain, run.token_ids)) <= 2
    assert run.drafted > 0 and run.accepted > 0
    return run


def acceptance(run: Run) -> float:
    return run.accepted / run.drafted


@pytest.fixture(scope="module")
def one_rank(engine: Any, plain: Run) -> Run:
    """Trees on one rank."""
    return run_greedy(plain, engine("f1", "h1", **tree_settings(4, 6, 16)))


@pytest.fixture(scope="module")
def two_ranks(engine: Any, plain: Run, one_rank: Run) -> EngineHandle:
    """Trees on two ranks that are compared in every step."""
    return engine("f1", "h1", tensor_parallel_size=2, **checked((4, 6, 16)))


def test_trees_on_two_ranks_give_the_text_and_the_acceptance_of_one(
    two_ranks: EngineHandle, plain: Run, one_rank: Run
) -> None:
    run = run_greedy(plain, two_ranks)
    assert acceptance(run) == pytest.approx(acceptance(one_rank), abs=0.02)


def test_two_hundred_unseeded_requests_end(two_ranks: EngineHandle) -> None:
    """Concurrency is the engine's 16 sequences; every request gets all its tokens."""
    from vllm import SamplingParams

    prompts = [[3 + n % 500, 9 + n % 97] for n in range(200)]
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    run = two_ranks.run(prompts, params)
    assert [len(reply) for reply in run.token_ids] == [12] * 200
    assert run.drafted > 0 and run.accepted > 0


def test_the_check_names_a_rank_whose_noise_is_its_own(
    two_ranks: EngineHandle,
) -> None:
    """The last test of this engine, which a failed step stops."""
    from vllm import SamplingParams

    two_ranks.llm.collective_rpc(disturb_noise)
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    with pytest.raises(Exception, match=r"check_ranks: .* of rank 1 differs"):
        two_ranks.run([[5, 6, 7]] * 16, params)


def disturb_noise(worker: Any) -> None:
    """Give the second rank another state of torch's own generator."""
    import torch

    if worker.rank == 1:
        torch.manual_seed(1234)


def test_mixed_batch_follows_every_request_s_own_law(engine: Any) -> None:
    handle = engine(
        "f2", "h4", tensor_parallel_size=2, max_num_seqs=64, **tree_settings(4, 3, 12)
    )
    worst, drafted = worst_excess(handle, LAW_SAMPLES)
    assert drafted > 0
    assert worst < LIMIT


@pytest.fixture(scope="module")
def whole_head(engine: Any, plain: Run, one_rank: Run) -> EngineHandle:
    """Trees, with all of the head on each rank, and no check."""
    return engine(
        "f1",
        "h1",
        tensor_parallel_size=2,
        speculation={"draft_tensor_parallel_size": 1},
        **tree_settings(4, 6, 16),
    )


def test_a_whole_head_on_each_rank_gives_the_same_text(
    whole_head: EngineHandle, plain: Run
) -> None:
    assert whole_head.llm.collective_rpc(head_shapes) == [(512, 8)] * 2
    run_greedy(plain, whole_head)


def head_shapes(worker: Any) -> tuple[int, int]:
    """Rows of the head's output layer, and its query and key heads on this rank."""
    head = worker.model_runner.drafter.model
    attention = head.model.layers[0].self_attn
    heads = attention.num_heads + 2 * attention.num_kv_heads
    return head.lm_head.weight.shape[0], heads


def test_ranks_with_noise_of_their_own_still_follow_the_first(
    whole_head: EngineHandle, plain: Run
) -> None:
    """Nothing hangs, and every rank holds the text that was sent to the user."""
    from vllm import SamplingParams

    whole_head.llm.collective_rpc(disturb_noise)
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    run = whole_head.run([[5, 6, 7, n] for n in range(16)], params)
    assert run.accepted > 0
    # Greedy text afterwards shows that no rank's KV cache went another way.
    run_greedy(plain, whole_head)
