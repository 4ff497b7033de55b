"""What a training run depends on: read from YAML, overridden with `--set a.b=c`.

The defaults are the paper's: fused low, mid and high taps, seven steps of
training-time test weighted 0.8^k, soft cross-entropy, no feature loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from ..taps import default_tap_ids
from ..validation import explain

Taps = Literal["fused", "top", "none"] | tuple[int, ...]


class LossConfig(BaseModel):
    """Which loss; see `losses` for the formulas.

    Attributes:
        preset: `coverage` counts mass outside the draft vocabulary as refused;
            `reference` is the loss of the reference trainer (see
            `losses.position_weights`).
        kind: `soft_ce`, or `lk_hybrid` (LK losses, arXiv 2602.23881).
        eta: how quickly `lk_hybrid` turns from cross-entropy to acceptance.
        feature_weight: weight of EAGLE-1's feature regression, which EAGLE-3 drops.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: Literal["coverage", "reference"] = "coverage"
    kind: Literal["soft_ce", "lk_hybrid"] = "soft_ce"
    eta: float = Field(default=3.0, ge=0)
    feature_weight: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _reference_is_what_it_says(self) -> LossConfig:
        if self.preset == "reference" and (
            self.kind != "soft_ce" or self.feature_weight != 0
        ):
            raise ValueError(
                "the preset `reference` is soft_ce without a feature loss; leave out "
                "kind and feature_weight, or use the preset `coverage`"
            )
        return self


class TrainConfig(BaseModel):
    """Everything a run depends on; unknown keys are refused.

    Attributes:
        target: a model directory or an embedded name.
        rows: row files (see `data`).
        out: folder of the checkpoint, the logs and the best head.
        warm_start: a head to go on from; its vocabulary and switches are kept.
        features: who computes what the head reads of the target: `transformers`, in
            this process, or `vllm`, in an engine that is started for it.
        features_dir: where the target's features are kept for later epochs; None
            reads them each time.
        taps: `fused` (low, mid, high), `top` (the stream leaving the last layer),
            `none` (the token's own embedding: no feature of the target), or ids.
        draft_vocab_size: the most frequent reply tokens; never changed afterwards.
        hidden_size: the head's own width; the target's if None.
        fc_norm, norm_output: the EAGLE-3.1 switches (see `DraftHeadConfig`).
        num_steps, step_decay: steps of training-time test; step k weighs decay^k.
        tokens_per_batch: at most that many tokens, padded, in one micro-batch.
        accumulate: micro-batches of one rank per optimizer step.
        device: `auto` is a GPU where there is one.
        precision: `bf16` multiplies in bfloat16 with fp32 master weights; left out, it
            is what the device is faster in (see `faster_precision`).
        held_out: row files to judge heads by; none of them is trained on. Empty: as
            many as `held_out_rows` of `rows`, drawn by `seed`.
        draft_tokens: length of the chain whose held-out acceptance is judged.
        parity_rows: held-out rows on which the target must give the engine's
            log-probabilities before the first step (see `parity`); 0 leaves it out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    rows: list[str] = Field(min_length=1)
    out: str
    warm_start: str | None = None
    features: Literal["transformers", "vllm"] = "transformers"
    features_dir: str | None = None

    taps: Taps = "fused"
    draft_vocab_size: int = Field(default=8192, gt=0)
    hidden_size: int | None = Field(default=None, gt=0)
    fc_norm: bool = False
    norm_output: bool = False

    num_steps: int = Field(default=7, gt=0, le=16)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    loss: LossConfig = LossConfig()

    epochs: float = Field(default=2.0, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.02, ge=0, lt=1)
    grad_clip: float = Field(default=0.5, gt=0)
    tokens_per_batch: int = Field(default=2048, gt=0)
    accumulate: int = Field(default=1, gt=0)
    max_length: int = Field(default=2048, gt=2)
    device: Literal["auto", "cpu"] = "auto"
    precision: Literal["bf16", "fp32"] = Field(
        default_factory=lambda known: faster_precision(known.get("device", "auto"))
    )
    seed: int = 0

    held_out: list[str] = []
    held_out_rows: int = Field(default=64, gt=0)
    draft_tokens: int = Field(default=5, gt=0, le=16)
    evaluate_every: int = Field(default=250, gt=0)
    parity_rows: int = Field(default=8, ge=0)

    @field_validator("taps", mode="plain")
    @classmethod
    def _known_taps(cls, value: Any) -> Taps:
        if value in ("fused", "top", "none"):
            return value
        if isinstance(value, (list, tuple)) and all(type(i) is int for i in value):
            return tuple(value)
        raise ValueError("want fused, top, none or a list of layer ids")

    @field_serializer("taps")
    def _plain_taps(self, taps: Taps) -> str | list[int]:
        return taps if isinstance(taps, str) else list(taps)

    def tap_ids(self, num_layers: int) -> tuple[int, ...]:
        """The streams that feed the head of a target of `num_layers`."""
        if isinstance(self.taps, tuple):
            return self.taps
        return {
            "fused": default_tap_ids(num_layers),
            "top": (num_layers,),
            "none": (0,),
        }[self.taps]


def faster_precision(device: str) -> Literal["bf16", "fp32"]:
    """bf16, but fp32 on a CPU that has no instructions for bf16.

    There a product in bfloat16 takes four times as long as one in float32 (AVX2).
    """
    if device == "auto" and torch.cuda.is_available():
        return "bf16"
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a run's YAML and apply `a.b=c` overrides, whose values are YAML too.

    Raises:
        ValueError: no such file, no YAML, or each bad key with its neighbours.
    """
    if not path.is_file():
        raise ValueError(f"config: no file {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({error})") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got {values!r}, want keys and values")
    for override in overrides:
        _set(values, override)
    return validate(values, str(path))


def validate(values: dict[str, Any], where: str) -> TrainConfig:
    """Check `values` against the schema; `where` opens the message."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, TrainConfig)}") from error


def _set(values: dict[str, Any], override: str) -> None:
    """Put the value of `a.b=c` into nested `values`."""
    name, equals, text = override.partition("=")
    if not name or not equals:
        raise ValueError(f"--set: got {override!r}, want key=value, as in loss.eta=3")
    *groups, last = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {override}: {group} is a value, not a group")
    values[last] = yaml.safe_load(text)
