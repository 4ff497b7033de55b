"""What each CPU defect does to a user, as a program that runs in a process of its own.

    python -m tests.patch_probes FIXTURE_MODELS [--patched]

Prints one JSON object: probe name -> "ok" or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch

from tests.engine_run import EnginePool
from tests.law_runs import worst_excess
from tests.laws import LIMIT, MIXED, chi_squared_excess
from tests.models.random_llama import known_prompts

VOCAB = 8


def expansion() -> str:
    """Text sampled with speculation follows each request's own parameters."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    worst = {}
    for name, drafts_have_probs in (("greedy", False), ("probabilistic", True)):
        first, laws = _first_tokens(logits, drafts_have_probs)
        worst[name] = max(
            chi_squared_excess(ids, law) for ids, law in zip(first, laws, strict=True)
        )
    bad = {name: value for name, value in worst.items() if value > LIMIT}
    return f"chi-squared excess {bad}" if bad else "ok"


def _first_tokens(
    logits: torch.Tensor, drafts_have_probs: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """First sampled token of each kind of request in one mixed batch, and its law."""
    kinds = [(0.5, VOCAB, 1.0), (1.5, VOCAB, 1.0), (1.0, 3, 1.0), (1.0, VOCAB, 0.6)]
    kinds.append((0.0, VOCAB, 1.0))
    each = 4000
    batch = each * len(kinds)
    t, k, p = (torch.tensor(column).repeat(each) for column in zip(*kinds, strict=True))
    q = torch.linspace(0, 2, VOCAB).softmax(0)
    drafts = torch.multinomial(q, batch, replacement=True).to(torch.int32)
    if not drafts_have_probs:
        drafts = torch.full((batch,), int(logits.argmax()), dtype=torch.int32)
    output = _verify(
        logits.repeat(2 * batch, 1),
        drafts,
        q.repeat(batch, 1) if drafts_have_probs else None,
        temperature=t.float(),
        top_k=k.to(torch.int32),
        top_p=p.float(),
    )
    samples = [output[i :: len(kinds), 0].long() for i in range(len(kinds))]
    return samples, [_law(logits, *kind) for kind in kinds]


def _law(logits: torch.Tensor, t: float, k: int, p: float) -> torch.Tensor:
    if t == 0:
        return torch.nn.functional.one_hot(logits.argmax(), VOCAB).double()
    values, order = logits.double().sort(descending=True)
    values[k:] = -torch.inf
    probs = (values / t).softmax(0)
    probs[probs.cumsum(0) - probs >= p] = 0
    return torch.zeros(VOCAB).double().scatter(0, order, probs / probs.sum())


def padding() -> str:
    """A padded draft is never accepted, wherever it stands in the batch."""
    batch = 64
    # All mass on the last token: in front of each row lies a probability of 1.
    logits = torch.full((2 * batch, VOCAB), -50.0)
    logits[:, -1] = 50.0
    drafts = torch.full((batch,), -1, dtype=torch.int32)
    output = _verify(logits, drafts, None, temperature=torch.ones(batch))
    wrong = int((output != torch.tensor([VOCAB - 1, -1])).any(1).sum())
    return f"{wrong} of {batch} padded drafts accepted" if wrong else "ok"


def _verify(
    logits: torch.Tensor,  # [2 * batch, VOCAB]: target and bonus row of each request
    drafts: torch.Tensor,  # [batch], one draft each
    draft_probs: torch.Tensor | None,  # [batch, VOCAB]
    temperature: torch.Tensor,  # [batch]
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """vLLM's own rejection sampler -> [batch, 2], -1 where there is no token."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    batch = drafts.numel()
    rows = torch.arange(2 * batch, dtype=torch.int32)
    sampling = SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=bool((temperature > 0).all()),
        top_p=top_p,
        top_k=top_k,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(batch),
        presence_penalties=torch.zeros(batch),
        repetition_penalties=torch.ones(batch),
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    metadata = SpecDecodeMetadata(
        draft_token_ids=drafts,
        num_draft_tokens=[1] * batch,
        cu_num_draft_tokens=torch.arange(1, batch + 1, dtype=torch.int32),
        cu_num_sampled_tokens=torch.arange(2, 2 * batch + 2, 2, dtype=torch.int32),
        target_logits_indices=rows[0::2],
        bonus_logits_indices=rows[1::2],
        logits_indices=rows,
    )
    sampler = RejectionSampler(Sampler())
    return sampler(metadata, draft_probs, logits, sampling).sampled_token_ids


def parameters() -> str:
    """An engine that samples row by row may have min-p, logit bias and the user's."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import build_logitsprocs

    spec = SimpleNamespace(verifies_by_sampling=True)
    SamplingParams(min_p=0.5, logit_bias={1: 2.0})._validate_spec_decode(spec)
    config = SimpleNamespace(
        speculative_config=spec, scheduler_config=SimpleNamespace(max_num_seqs=4)
    )
    built = build_logitsprocs(config, torch.device("cpu"), False, False, ())
    names = {type(processor).__name__ for processor in built.all}
    wanted = {"MinPLogitsProcessor", "LogitBiasLogitsProcessor"}
    return "ok" if wanted <= names else f"loaded only {sorted(names)}"


def base_rows() -> str:
    """In a step with an adapter's row, the base model's row keeps its own output."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(8, 4, "cpu")
    down, up = torch.ones(1, 1, 1, 3), torch.ones(1, 1, 4, 1)
    wrong = []
    for is_prefill in (False, True):
        mapping = LoRAMapping((0, 7), (0, 7), is_prefill)
        wrapper.update_metadata(mapping, [7], max_loras=1, vocab_size=8)
        linear, logits, x = torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 3)
        wrapper.add_lora_linear(linear, x, (down,), (up,), 1.0, (4,))
        wrapper.add_lora_logits(logits, x, down, up, 1.0)
        want = torch.tensor([[0.0] * 4, [3.0] * 4])
        wrong += [y.tolist() for y in (linear, logits) if not torch.equal(y, want)]
    return f"outputs {wrong}" if wrong else "ok"


def seeded_chunks(engine: EnginePool) -> str:
    """A seeded request's text does not depend on how its prompt was chunked."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, detokenize=False
    )
    prompts = known_prompts()[-2:]  # 128 and 300 tokens
    texts = [
        engine("f1", max_num_batched_tokens=budget).run(prompts, params).token_ids
        for budget in (64, 512)
    ]
    return "ok" if texts[0] == texts[1] else f"texts differ: {texts}"


def sampled_law(engine: EnginePool) -> str:
    """The engine's own sampled text follows the closed-form law of F2."""
    # Temperatures alone: garbage in top-k would stop stock vLLM with an index error.
    handle = engine("f2", "h2", max_num_seqs=64)
    worst, drafted = worst_excess(handle, samples=300, laws=MIXED[:3])
    if not drafted:
        return "nothing was drafted"
    return f"chi-squared excess {worst}" if worst > LIMIT else "ok"


SHARES = [2, 1]  # rows of each rank


def uneven_exchange() -> str:
    """Two ranks with different numbers of rows gather all rows and share out sums."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _exchange, (folder,), nprocs=len(SHARES), start_method="fork"
        )
    return "ok"


def _exchange(rank: int, folder: str) -> None:
    """One rank; raises where it receives something else."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=len(SHARES)
    )
    group = torch.distributed.group.WORLD
    ranks = CpuCommunicator(group, torch.device("cpu"), group, unique_name="dp")
    rows = torch.arange(6.0).view(3, 2)
    mine = rows.split(SHARES)[rank]
    gathered = ranks.all_gatherv([mine, mine.long()], dim=0, sizes=SHARES)
    torch.testing.assert_close(gathered, [rows, rows.long()])
    shared = ranks.reduce_scatterv(rows + rank, dim=0, sizes=SHARES)
    torch.testing.assert_close(shared, 2 * mine + 1)
    whole = ranks.reduce_scatterv(ranks.all_gatherv(rows), dim=0)
    torch.testing.assert_close(whole, 2 * rows)


def _outcome(probe: Callable[[], str]) -> str:
    """What the probe says; an error of vLLM is an outcome like any other."""
    try:
        return probe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(models: str, *flags: str) -> None:
    if "--patched" in flags:
        from vllm_eagle3.integration import patches

        patches.apply_all()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    engine = EnginePool(lambda name: Path(models) / name)
    probes: dict[str, Callable[[], str]] = {
        "cpu-expand-batch-to-tokens": expansion,
        "cpu-padded-drafts": padding,
        "sampling-parameters": parameters,
        "cpu-lora-base-rows": base_rows,
        "cpu-uneven-exchange": uneven_exchange,
        "sampled-law": lambda: sampled_law(engine),
        # The last one: on stock vLLM it leaves a dead engine behind.
        "cpu-seeded-chunked-prefill": lambda: seeded_chunks(engine),
    }
    outcomes = {name: _outcome(probe) for name, probe in probes.items()}
    print(json.dumps(outcomes), flush=True)
    # A dead in-process engine can hang at exit.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
