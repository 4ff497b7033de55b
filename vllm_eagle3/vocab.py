"""DraftVocab: the only reader of a head's `d2t` and `t2d` tensors.

A head may score a reduced vocabulary. On disk two tensors tie it to the target's:

* `d2t`, int64 [draft_vocab]: OFFSETS, target_id = draft_id + d2t[draft_id];
* `t2d`, bool [target_vocab]: True where a target id has a draft id.

    target ids   0 1 2 3 4 5          t2d = 0 1 0 1 1 0
    draft ids      0   1 2            d2t = +1 +2 +2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftVocab:
    """Map between draft ids and target ids; the identity for a full vocabulary.

    Args:
        to_target_ids: draft id -> target id, int64 [draft_vocab], strictly rising.
        target_vocab_size: number of target ids.

    Raises:
        ValueError: ids out of range, repeated or unsorted.
    """

    def __init__(self, to_target_ids: torch.Tensor, target_vocab_size: int) -> None:
        ids = to_target_ids.to(torch.int64).cpu()
        if ids.ndim != 1 or ids.numel() == 0:
            raise ValueError(
                f"draft vocabulary: got a map of shape {tuple(ids.shape)}, "
                "want a one-dimensional, non-empty one"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= target_vocab_size:
            raise ValueError(
                f"draft vocabulary: target ids {int(ids.min())}..{int(ids.max())} "
                f"leave the target's range 0..{target_vocab_size - 1}; "
                "the head belongs to another target, or d2t does not hold offsets"
            )
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError(
                "draft vocabulary: target ids must rise strictly; "
                "d2t holds offsets (target_id = draft_id + d2t[draft_id])"
            )
        self.target_vocab_size = target_vocab_size
        self.to_target_ids = ids  # draft id -> target id, [draft_vocab]
        self.to_draft_ids = torch.full((target_vocab_size,), -1, dtype=torch.int64)
        # target id -> draft id, -1 where the target id cannot be drafted
        self.to_draft_ids[ids] = torch.arange(ids.numel())

    def __len__(self) -> int:
        return self.to_target_ids.numel()

    @property
    def is_full(self) -> bool:
        """True when every target id can be drafted."""
        return len(self) == self.target_vocab_size

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets as stored on disk, int64 [draft_vocab]."""
        return self.to_target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> torch.Tensor:
        """Membership as stored on disk, bool [target_vocab]."""
        return self.to_draft_ids >= 0

    @classmethod
    def full(cls, target_vocab_size: int) -> DraftVocab:
        return cls(torch.arange(target_vocab_size), target_vocab_size)

    @classmethod
    def from_d2t(cls, d2t: torch.Tensor, target_vocab_size: int) -> DraftVocab:
        """Read the on-disk offsets."""
        return cls(
            torch.arange(d2t.numel()) + d2t.to(torch.int64).cpu(), target_vocab_size
        )

    @classmethod
    def most_frequent(
        cls, token_counts: Sequence[int] | torch.Tensor, size: int
    ) -> DraftVocab:
        """Choose the `size` target ids that occur most often.

        Args:
            token_counts: occurrences in the replies, by target id, [target_vocab].
            size: number of draft ids.
        """
        counts = torch.as_tensor(token_counts)
        if not 0 < size <= counts.numel():
            raise ValueError(
                f"draft_vocab_size: got {size}, want 1..{counts.numel()} "
                "(the target's vocabulary)"
            )
        # A stable sort makes ties resolve to the lower id, so that the choice is
        # the same on every machine.
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[:size].sort().values, counts.numel())
