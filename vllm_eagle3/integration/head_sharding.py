"""A draft head on several ranks: a shard on each, or the whole head on each.

vLLM's `draft_tensor_parallel_size` chooses: the target's size shards the head (the
default), 1 gives every rank all of it. A whole head needs no messages between ranks
while drafts grow, a sharded one needs less memory and fewer operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed import parallel_state


def check_sharding(
    head: Mapping[str, Any], draft_size: int | None, target_size: int
) -> None:
    """Refuse a head that cannot lie on its ranks as asked.

    Args:
        head: fields of its hf_config.
        draft_size: `draft_tensor_parallel_size` as given; None means as the target.
        target_size: the target's tensor_parallel_size.

    Raises:
        ValueError: naming the field and the remedy.
    """
    if draft_size not in (None, 1, target_size):
        raise ValueError(
            f"draft_tensor_parallel_size: got {draft_size} with tensor_parallel_size "
            f"{target_size}, want {target_size} (a shard of the head on every rank) "
            "or 1 (the whole head on every rank)"
        )
    shards = target_size if draft_size is None else draft_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = head[name]
        # Fewer KV heads than ranks are repeated.
        repeats = name == "num_key_value_heads" and shards % size == 0
        if size % shards and not repeats:
            raise ValueError(
                f"{name}: the head has {size}, which {shards} ranks cannot share; "
                'set "draft_tensor_parallel_size": 1 in speculative_config to give '
                "every rank the whole head"
            )


def is_whole(spec: Any) -> bool:
    """Whether every rank holds the whole head of this SpeculativeConfig."""
    return spec.draft_tensor_parallel_size == 1


@dataclass(frozen=True)
class _OneRank:
    """What layers ask of their group while they are built."""

    world_size: int = 1
    rank_in_group: int = 0


@contextmanager
def whole_layers() -> Iterator[None]:
    """Build and load layers whole, as on a single rank.

    A layer keeps the number of its shards, and with one shard it sends no messages.
    """
    stock = parallel_state._TP
    parallel_state._TP = _OneRank()
    try:
        yield
    finally:
        parallel_state._TP = stock
