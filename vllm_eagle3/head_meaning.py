"""What a head's checkpoint means, in this package's terms, with every doubt noted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.head_layouts import Layout
from vllm_eagle3.vocab import DraftVocab

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing noticed about a head.

    ok: as it should be, or a harmless difference. warning: works as the checkpoint
    means it, but not by stock defaults or not without cost. error: cannot work.
    `foreign` marks an error of this package alone: vLLM itself may run such a head.
    """

    severity: Severity
    field: str
    message: str
    foreign: bool = False

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.message}"


@dataclass
class HeadMeaning:
    """A head's configuration and weights in this package's terms, with findings."""

    layout: Layout
    flat: dict[str, Any]  # config.json at one level
    weights: dict[str, torch.Tensor]  # by name in Eagle3DraftHead
    d2t: torch.Tensor | None = None  # int64 [draft_vocab], offsets
    t2d: torch.Tensor | None = None  # bool [target_vocab]
    embed_tokens: torch.Tensor | None = None  # [vocab, hidden], the checkpoint's own
    config: DraftHeadConfig | None = None  # None after an error in config.json
    vocab: DraftVocab | None = None
    findings: list[Finding] = field(default_factory=list)

    def note(self, severity: Severity, name: str, message: str) -> None:
        self.findings.append(Finding(severity, name, message))

    def note_foreign(self, name: str, message: str) -> None:
        self.findings.append(Finding("error", name, message, foreign=True))

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == "error"]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.weights.values()}
