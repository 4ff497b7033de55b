"""One table of every runtime patch to vLLM. The same changes as diffs: `patches/`.

A patch is applied only where its self-test shows the defect on the installed vLLM,
so it disappears by itself once upstream is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_eagle3.integration import cpu_fixes, lifted


@dataclass(frozen=True)
class Patch:
    """One thing we change in vLLM at run time.

    Attributes:
        diff: file below patches/vllm-<release>/ with the same change.
        functions: vLLM functions that it wraps or replaces, as `module:qualname`.
        for_baselines: also given to stock baselines, so that they are lossless.
        concerns: whether this platform can have the defect.
        applies: self-test, true while the installed vLLM has the defect.
        apply: wraps the functions; called once per process.
    """

    name: str
    upstream: str
    reason: str
    removal: str
    diff: str
    functions: tuple[str, ...]
    for_baselines: bool
    concerns: Callable[[], bool]
    applies: Callable[[], bool]
    apply: Callable[[], None]


class PatchStatus(NamedTuple):
    name: str
    active: bool
    reason: str


_COMMUNICATOR = (
    "vllm.distributed.device_communicators.base_device_communicator:"
    "DeviceCommunicatorBase"
)

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cpu-expand-batch-to-tokens",
        upstream="vllm-project/vllm#55005",
        reason="temperature, top-k and top-p of speculative tokens are read from "
        "uninitialised memory on a CPU, so sampled text follows a wrong law",
        removal="a release whose CPU expand kernel writes its result back",
        diff="0001-cpu-expand-batch-to-tokens.patch",
        functions=("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
        for_baselines=True,
        concerns=cpu_fixes.runs_on_cpu,
        applies=cpu_fixes.expansion_broken,
        apply=cpu_fixes.fix_expansion,
    ),
    Patch(
        name="cpu-seeded-chunked-prefill",
        upstream="none in vllm; RBLN-SW/vllm-rbln#1025 is the same defect",
        reason="a request with a seed and a prompt longer than one chunk stops the "
        "engine on a CPU: its random generator has no offset to rewind",
        removal="a release that rewinds CPU generators without an offset",
        diff="0002-cpu-seeded-chunked-prefill.patch",
        functions=(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        ),
        for_baselines=True,
        concerns=cpu_fixes.runs_on_cpu,
        applies=cpu_fixes.seeded_chunks_broken,
        apply=cpu_fixes.fix_seeded_chunks,
    ),
    Patch(
        name="cpu-padded-drafts",
        upstream="vllm-project/vllm#46533 (Triton kernels only)",
        reason="on a CPU a padded draft (id -1) can be accepted above temperature 0: "
        "a one-token prompt that joins a running batch then continues from a token "
        "that it never had",
        removal="a release whose CPU kernel refuses negative draft ids",
        diff="0003-cpu-padded-drafts.patch",
        functions=("vllm.utils.cpu_triton_utils:_rejection_random_sample_kernel_impl",),
        for_baselines=False,
        concerns=cpu_fixes.runs_on_cpu,
        applies=cpu_fixes.padding_broken,
        apply=cpu_fixes.fix_padding,
    ),
    Patch(
        name="sampling-parameters",
        upstream="vllm-project/vllm#42744",
        reason="min_p, logit_bias and custom logits processors are refused beside "
        "speculation, also where a verifier samples with all of them",
        removal="a release that loads all processors beside speculation",
        diff="0004-sampling-parameters.patch",
        functions=(
            "vllm.sampling_params:SamplingParams._validate_spec_decode",
            "vllm.v1.sample.logits_processor:build_logitsprocs",
        ),
        for_baselines=False,
        concerns=lifted.always,
        applies=lifted.refused,
        apply=lifted.lift,
    ),
    Patch(
        name="cpu-lora-base-rows",
        upstream="vllm-project/vllm#48421",
        reason="on a CPU a request without a LoRA adapter gets the last loaded one's "
        "weights in every step that it shares with a request that has an adapter",
        removal="a release whose PyTorch LoRA ops skip rows of index -1",
        diff="0005-cpu-lora-base-rows.patch",
        functions=(
            "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand",
            "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand_slice",
        ),
        for_baselines=True,
        concerns=cpu_fixes.is_cpu,
        applies=cpu_fixes.base_rows_broken,
        apply=cpu_fixes.fix_base_rows,
    ),
    Patch(
        name="cpu-uneven-exchange",
        upstream="vllm-project/vllm#57837",
        reason="on a CPU data-parallel engines that share experts stop at the first "
        "request: ranks cannot exchange different numbers of rows",
        removal="a release whose CpuCommunicator has all_gatherv and reduce_scatterv",
        diff="0006-cpu-uneven-exchange.patch",
        functions=(
            f"{_COMMUNICATOR}.all_gatherv",
            f"{_COMMUNICATOR}.reduce_scatterv",
        ),
        for_baselines=True,
        concerns=cpu_fixes.is_cpu,
        applies=cpu_fixes.uneven_exchange_missing,
        apply=cpu_fixes.add_uneven_exchange,
    ),
)

_applied: set[str] = set()


def apply_all() -> list[PatchStatus]:
    """Apply every patch that this vLLM needs; idempotent, never raises."""
    return _apply(PATCHES)


def apply_cpu_fixes() -> list[PatchStatus]:
    """Apply only what stock baselines may have; idempotent, never raises."""
    return _apply([patch for patch in PATCHES if patch.for_baselines])


def _apply(patches: Sequence[Patch]) -> list[PatchStatus]:
    return [PatchStatus(patch.name, *_apply_one(patch)) for patch in patches]


def _apply_one(patch: Patch) -> tuple[bool, str]:
    if patch.name in _applied:
        return True, patch.reason
    # Anything may go wrong in a vLLM that we do not know, and a plugin must not stop
    # it from starting; the status carries the error to the log and to `doctor`.
    try:
        if not patch.concerns():
            return False, "not needed on this platform"
        if not patch.applies():
            return False, "not needed: this vLLM passes the self-test"
        patch.apply()
    except Exception as error:
        return False, f"failed: {type(error).__name__}: {error}"
    _applied.add(patch.name)
    return True, patch.reason
