"""What our runtime patches do to vLLM on a CPU, and the self-tests that ask for them.

Each fix is a pair: `..._broken()` shows the defect on the installed vLLM, `fix_...()`
wraps the function that has it. Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

_SAMPLER = "vllm.v1.sample.rejection_sampler."
# Attribute of a runner between sample_tokens and _bookkeeping_sync.
_SAVED = "_vllm_eagle3_generator_states"


def is_cpu() -> bool:
    """True when vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def runs_on_cpu() -> bool:
    """True when vLLM runs on a CPU and replaces its Triton kernels by C++ ones."""
    from vllm.triton_utils import HAS_TRITON

    return is_cpu() and not HAS_TRITON


def expansion_broken() -> bool:
    """True when a parameter per request does not arrive at the request's tokens."""
    from vllm.utils import cpu_triton_utils

    _load_cpu_ops()
    per_request = torch.tensor([0.7, 0.0, 1.3])
    per_token = torch.full((4,), math.nan)
    ends = torch.tensor([1, 2, 4], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(per_token, per_request, ends, 0, 1)
    want = torch.tensor([0.7, 1.0, 1.3, 1.3])
    return not torch.equal(per_token, want)


def fix_expansion() -> None:
    _replace_kernel("expand_kernel", "_expand_kernel_impl", _expansion)


def _expansion(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def expand(
        output: torch.Tensor,  # [num_tokens]
        input_val: torch.Tensor,  # [batch]
        cu_num_tokens: torch.Tensor,  # [batch], end of each request's tokens
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: int | None = None,
    ) -> None:
        # The C++ op knows int64 only, so floats are expanded here.
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        counts = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1).long())
        output.copy_(values.repeat_interleave(counts))

    return expand


def padding_broken() -> bool:
    """True when a padded draft (id -1) can be accepted at a temperature above zero."""
    from vllm.utils import cpu_triton_utils

    _load_cpu_ops()
    vocab = 4
    # The stock kernel reads the number in front of a row for id -1: certain here.
    probs = torch.ones(3, vocab)[1:2]
    output = torch.full((1, 2), -1, dtype=torch.int32)
    cpu_triton_utils._rejection_random_sample_kernel_impl(
        output,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([-1], dtype=torch.int32),
        None,
        probs,
        torch.tensor([[2]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([False]),
        1,
        vocab,
        NO_DRAFT_PROBS=True,
    )
    return output.tolist() != [[3, -1]]


def fix_padding() -> None:
    _replace_kernel(
        "rejection_random_sample_kernel",
        "_rejection_random_sample_kernel_impl",
        _refuse_padding,
    )


def _refuse_padding(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def sample(
        output_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,  # [num_tokens]
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        recovered_token_ids: torch.Tensor,
        uniform_probs: torch.Tensor,  # [num_tokens]
        *rest: Any,
        **options: Any,
    ) -> None:
        # No ratio reaches an infinite threshold, and id 0 is safe to look up.
        padded = draft_token_ids < 0
        stock(
            output_token_ids,
            cu_num_draft_tokens,
            draft_token_ids.clamp(min=0),
            draft_probs,
            target_probs,
            bonus_token_ids,
            recovered_token_ids,
            uniform_probs.masked_fill(padded, math.inf),
            *rest,
            **options,
        )

    return sample


def seeded_chunks_broken() -> bool:
    """True when bookkeeping rewinds a CPU generator by an offset it does not have."""
    import numpy as np
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=1, generators={0: torch.Generator()}),
        discard_request_mask=SimpleNamespace(np=np.array([True])),
        use_async_scheduling=True,
        _get_nans_in_logits=lambda logits: {},
    )
    try:
        GPUModelRunner._bookkeeping_sync(runner, None, None, None, None, 0)
    except RuntimeError as error:
        return "offset" in str(error)
    except AttributeError:
        # It went on to what the stand-in lacks: generators are no obstacle.
        return False
    return False


def fix_seeded_chunks() -> None:
    """Put back the generators of prompt chunks, whose sampled token is thrown away.

    One draw per finished prompt, whatever the chunks, is what makes a seeded
    request's text independent of chunking.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    runner.sample_tokens = _saving_generators(runner.sample_tokens)
    runner._bookkeeping_sync = _restoring_generators(runner._bookkeeping_sync)


def _saving_generators(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        discarded = self.discard_request_mask.np
        states = {
            row: generator.get_state()
            for row, generator in self.input_batch.generators.items()
            if row < self.input_batch.num_reqs and discarded[row]
        }
        setattr(self, _SAVED, states)
        return stock(self, *args, **kwargs)

    return sample_tokens


def _restoring_generators(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {}
        for row, state in getattr(self, _SAVED, {}).items():
            hidden[row] = generators.pop(row)
            hidden[row].set_state(state)
        setattr(self, _SAVED, {})
        try:
            return stock(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    return bookkeeping_sync


def base_rows_broken() -> bool:
    """True when a row without an adapter (index -1) gets that of the last slot."""
    from vllm.lora.ops.torch_ops import lora_ops

    one, row = torch.ones(1, 1), torch.zeros(1, 1)
    lora_ops.bgmv_expand(one, torch.ones(1, 1, 1), row, torch.tensor([-1]))
    return bool(row.any())


def fix_base_rows() -> None:
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        fixed = _expanding_adapter_rows(getattr(lora_ops, name))
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, fixed)


def _expanding_adapter_rows(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def expand(
        inputs: torch.Tensor,  # [rows, rank]
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,  # [rows], -1 without an adapter
        *rest: Any,
        **options: Any,
    ) -> None:
        without = (lora_indices_tensor < 0).unsqueeze(1)
        inputs = inputs.masked_fill(without, 0)
        stock(
            inputs, lora_b_weights, output_tensor, lora_indices_tensor, *rest, **options
        )

    return expand


def uneven_exchange_missing() -> bool:
    """True when engines that share experts cannot exchange rows on a CPU."""
    from vllm.distributed.device_communicators import (
        base_device_communicator,
        cpu_communicator,
    )

    base = base_device_communicator.DeviceCommunicatorBase
    return cpu_communicator.CpuCommunicator.all_gatherv is base.all_gatherv


def add_uneven_exchange() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv = _all_gatherv
    communicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],  # [rows of this rank, ...] each
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks, in the order of the ranks."""
    assert dim == 0, "rows are exchanged along dimension 0"
    if isinstance(input_, list):
        return [_gather_rows(self, rows, sizes) for rows in input_]
    return _gather_rows(self, input_, sizes)


def _gather_rows(
    self: Any, rows: torch.Tensor, sizes: list[int] | None
) -> torch.Tensor:
    sizes = sizes or [len(rows)] * self.world_size
    # Gloo gathers equally many rows of each rank.
    sent = rows.new_zeros(max(sizes), *rows.shape[1:])
    sent[: len(rows)] = rows
    parts = [torch.empty_like(sent) for _ in sizes]
    torch.distributed.all_gather(parts, sent, group=self.device_group)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _reduce_scatterv(
    self: Any,
    input_: torch.Tensor,  # [rows of all ranks, ...]
    dim: int = -1,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """The sum over the ranks, of this rank's own rows."""
    assert dim == 0, "rows are exchanged along dimension 0"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def _load_cpu_ops() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def _replace_kernel(
    kernel: str, name: str, wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Wrap a C++ kernel's Python caller in vLLM, before or after it is registered."""
    from vllm.utils import cpu_triton_utils

    fixed = wrap(getattr(cpu_triton_utils, name))
    setattr(cpu_triton_utils, name, fixed)
    dispatcher = sys.modules.get("vllm.triton_utils.dispatcher")
    if dispatcher is not None and _SAMPLER + kernel in dispatcher._registry:
        dispatcher.register_kernels({_SAMPLER + kernel: fixed})
