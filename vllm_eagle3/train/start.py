"""Where a run begins: its rows, its draft vocabulary, its head and its features."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..draft_head import DraftHeadConfig, Eagle3DraftHead
from ..engine import EngineMode, EngineSpec
from ..head_config import require_field, text_config
from ..head_io import (
    head_config_for_target,
    read_head,
    require_fitting_head,
    write_head,
)
from ..vocab import DraftVocab
from .captured import CapturedFeatures, Captures
from .config import TrainConfig
from .data import (
    Batch,
    Row,
    count_reply_tokens,
    read_rows,
    require_ids_of_target,
    split_rows,
    usable_rows,
)
from .feature_store import StoredFeatures
from .features import Features, TargetFeatures

FeaturesOf = Callable[[Batch], Features]
StartCapture = Callable[[EngineSpec], Captures]
# Part of a GPU's memory for the engine; the rest is the trainer's.
_CAPTURE_MEMORY = 0.35


@dataclass(frozen=True)
class RunData:
    """Rows of a run, after all that cannot be used was skipped and counted."""

    train: list[Row]
    held_out: list[Row]
    skipped: dict[str, int]
    reply_counts: torch.Tensor  # [vocab]: occurrences in the training replies

    @property
    def reply_tokens(self) -> int:
        return sum(row.num_reply_tokens for row in self.train)

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.train)


def read_target_config(config: TrainConfig) -> dict[str, Any]:
    """The target's config.json."""
    path = Path(config.target) / "config.json"
    return json.loads(path.read_text(encoding="utf-8"))


def read_run_data(config: TrainConfig, target_config: Mapping[str, Any]) -> RunData:
    """Read, check and split the rows.

    Raises:
        ValueError: malformed rows, ids of another tokenizer, nothing to learn from.
    """
    vocab_size = int(require_field(text_config(target_config), "vocab_size", "target"))
    usable, skipped = _usable(config.rows, config.max_length, vocab_size)
    if config.held_out:
        held_out, _ = _usable(config.held_out, config.max_length, vocab_size)
        judges = {row.ids for row in held_out}
        train = [row for row in usable if row.ids not in judges]
        if others := len(usable) - len(train):
            skipped["held out"] = others
        if not train:
            raise ValueError(
                f"held_out: all {others} rows of {config.rows} are held out by "
                f"{config.held_out}; name other files"
            )
    else:
        train, held_out = split_rows(usable, config.held_out_rows, config.seed)
    counts = count_reply_tokens(train, vocab_size)
    return RunData(train, held_out, skipped, counts)


def _usable(
    files: Sequence[str], max_length: int, vocab_size: int
) -> tuple[list[Row], dict[str, int]]:
    rows = read_rows(files)
    require_ids_of_target(rows, vocab_size)
    return usable_rows(rows, max_length)


def new_head_config(
    config: TrainConfig, target_config: Mapping[str, Any]
) -> DraftHeadConfig:
    """The head that `config` asks for: the target's sizes unless it has its own."""
    taps = config.tap_ids(_num_layers(target_config))
    switches: dict[str, Any] = {
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    plain = head_config_for_target(
        target_config, config.draft_vocab_size, taps, **switches
    )
    if config.hidden_size in (None, plain.hidden_size):
        return plain
    return replace(plain, **_own_sizes(config, plain))


def _num_layers(target_config: Mapping[str, Any]) -> int:
    text = text_config(target_config)
    return int(require_field(text, "num_hidden_layers", "target"))


def _own_sizes(config: TrainConfig, plain: DraftHeadConfig) -> dict[str, Any]:
    """Sizes of a head narrower than its target, in the target's proportions."""
    hidden, dim = config.hidden_size or plain.hidden_size, plain.head_dim
    if hidden % dim or hidden > plain.hidden_size:
        raise ValueError(
            f"hidden_size: got {hidden}, want a multiple of {dim} (the width of one "
            f"attention head) of at most {plain.hidden_size} (the target's)"
        )
    if config.loss.feature_weight:
        raise ValueError(
            f"loss.feature_weight: got {config.loss.feature_weight} with hidden_size "
            f"{hidden}; the regression compares with the target's state, so it needs "
            f"the target's width {plain.hidden_size}"
        )
    heads = hidden // dim
    kv_heads = next(
        n for n in range(min(plain.num_key_value_heads, heads), 0, -1) if heads % n == 0
    )
    inner = plain.intermediate_size * hidden // plain.hidden_size
    return {
        "hidden_size": hidden,
        "intermediate_size": max(64, inner // 64 * 64),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


@dataclass(frozen=True)
class Start:
    """A head ready to be trained.

    `embedding` is the head's own, [vocab, hidden]; None where it shares the target's.
    """

    head: Eagle3DraftHead
    vocab: DraftVocab
    features: FeaturesOf
    target: TargetFeatures
    embedding: torch.Tensor | None


def start_run(
    config: TrainConfig,
    target_config: Mapping[str, Any],
    data: RunData,
    device: str = "cpu",
    start_capture: StartCapture | None = None,
) -> Start:
    """Make the head, new or from `warm_start`, and what tells it about the target.

    Raises:
        ValueError: a head of another target, or with other switches than asked for.
    """
    head, vocab = _head_and_vocab(config, target_config, data)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    taps = head.config.tap_ids
    read = (config.target, taps, vocab, dtype, device)
    if config.features == "vllm":
        engine = _engine_for_capture(config, head, vocab, data, start_capture)
        target: TargetFeatures = CapturedFeatures(engine, *read)
    else:
        target = TargetFeatures(*read)
    features: FeaturesOf = target
    if config.features_dir is not None:
        features = StoredFeatures(target, config.features_dir)
        features.require_room([*data.train, *data.held_out])
    embedding = None
    if head.config.hidden_size != head.config.target_hidden_size:
        projection = principal_directions(target.embedding, head.config.hidden_size)
        embedding = (target.embedding.float() @ projection).to(target.embedding.dtype)
        features = _Narrowed(features, embedding)
    elif config.warm_start is None:
        _copy_from_target(head, target, vocab)
    return Start(head.to(device), vocab, features, target, embedding)


def _engine_for_capture(
    config: TrainConfig,
    head: Eagle3DraftHead,
    vocab: DraftVocab,
    data: RunData,
    start_capture: StartCapture | None,
) -> Captures:
    """An engine that records states; it reads from the head which ones."""
    if start_capture is None:
        raise ValueError(
            "features: got vllm where no engine can be started; use the command "
            "`vllm-eagle3 train`, or features: transformers"
        )
    rows = [*data.train, *data.held_out]
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-capture-") as folder:
        embedding = None
        if head.config.hidden_size != head.config.target_hidden_size:
            size = (head.config.vocab_size, head.config.hidden_size)
            embedding = torch.zeros(size, dtype=torch.bfloat16)
        # Whatever its weights are: it never drafts.
        write_head(folder, head, vocab, embed_tokens=embedding)
        return start_capture(
            EngineSpec(
                config.target,
                folder,
                num_speculative_tokens=1,
                dtype="bfloat16" if config.precision == "bf16" else "float32",
                max_model_len=max(len(row.ids) for row in rows),
                mode=EngineMode(
                    enforce_eager=True, gpu_memory_utilization=_CAPTURE_MEMORY
                ),
                options={"shape": "off"},
            )
        )


class _Narrowed:
    """Features whose embeddings are looked up in the head's own table."""

    def __init__(self, features: FeaturesOf, embedding: torch.Tensor) -> None:
        self.features, self.embedding = features, embedding

    def __call__(self, batch: Batch) -> Features:
        ids = batch.ids.to(self.embedding.device)
        return replace(self.features(batch), embeds=self.embedding[ids])


@torch.no_grad()
def principal_directions(embedding: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` directions that keep most of an embedding, [target_hidden, size]."""
    table = embedding.float()
    _, vectors = torch.linalg.eigh(table.T @ table)
    return vectors[:, -size:].flip(1)


def _head_and_vocab(
    config: TrainConfig, target_config: Mapping[str, Any], data: RunData
) -> tuple[Eagle3DraftHead, DraftVocab]:
    if config.warm_start is None:
        wanted = new_head_config(config, target_config)
        vocab = DraftVocab.most_frequent(data.reply_counts, config.draft_vocab_size)
        return Eagle3DraftHead(wanted), vocab
    require_fitting_head(config.warm_start, config.target)
    loaded = read_head(config.warm_start, config.target, torch.float32)
    _require_asked_switches(config, loaded.config, _num_layers(target_config))
    if loaded.config.hidden_size != loaded.config.target_hidden_size:
        raise ValueError(
            f"warm_start: {config.warm_start} has a width of its own "
            f"({loaded.config.hidden_size}); only heads as wide as the target can be "
            "gone on from, so start anew"
        )
    return loaded.head, loaded.vocab


def _require_asked_switches(
    config: TrainConfig, has: DraftHeadConfig, num_layers: int
) -> None:
    """Fields that the run sets itself must be those of the warm start."""
    theirs: dict[str, Any] = {
        "draft_vocab_size": has.draft_vocab_size,
        "hidden_size": has.hidden_size,
        "fc_norm": has.fc_norm,
        "norm_output": has.norm_output,
        "taps": has.tap_ids,
    }
    for field in sorted(config.model_fields_set & theirs.keys()):
        asked = getattr(config, field)
        asked = config.tap_ids(num_layers) if field == "taps" else asked
        if asked is not None and asked != theirs[field]:
            raise ValueError(
                f"{field}: got {asked}, but the head of warm_start "
                f"({config.warm_start}) has {theirs[field]}; leave {field} out, or "
                "start anew"
            )


@torch.no_grad()
def _copy_from_target(
    head: Eagle3DraftHead, target: TargetFeatures, vocab: DraftVocab
) -> None:
    """Start near the target: its output rows, its final norm, its high features.

    In 60 steps this was worth a tenth of the loss over random initial values.
    """
    width = head.config.hidden_size
    head.lm_head.weight.copy_(target.lm_head[vocab.to_target_ids])
    head.norm.weight.copy_(target.final_norm)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -width:] += torch.eye(width)
