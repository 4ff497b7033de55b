"""Packing: the rows of a batch end to end, and the places where drafts start.

The head runs on one sequence of all real tokens, so that padding costs nothing, and
after the first step only at the starts, so that prompts cost nothing either.

    row 0   p p p r r r r          packed    p p p r r r r p p r r r
    row 1   p p r r r . .          document  0 0 0 0 0 0 0 1 1 1 1 1
                                   starts        * * *       * *

Documents guard attention (a query sees its own document only) and validity (a draft
starts and ends in one reply, hence in one document).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Run:
    """Queries `begin`..`end` (exclusive), which stand at consecutive packed indices.

    Query `begin` stands at index `first`: it sees the keys `document`..`first`, the
    next query one key more, and so on.
    """

    begin: int
    end: int
    first: int
    document: int

    def blocks(self, size: int) -> list[Run]:
        """The same queries in pieces of at most `size`."""
        ahead = self.first - self.begin
        return [
            Run(begin, min(begin + size, self.end), begin + ahead, self.document)
            for begin in range(self.begin, self.end, size)
        ]


class Packing:
    """Index maps between a padded batch and its packed sequence.

    Args:
        span_ids: [rows, tokens], 0 where the target did not write (see `data.Batch`).
            What follows a row's last reply is left out: nothing can depend on it.

    Attributes:
        row, token: [num_packed], padded coordinates of each packed token
        starts: [num_starts], packed indices where a first draft is valid
        room: [num_starts], how many steps are valid there, at least 1
    """

    def __init__(self, span_ids: torch.Tensor) -> None:
        # A token is kept if a reply token stands at or after it in its row.
        kept = (span_ids > 0).flip(1).cummax(1).values.flip(1)
        self.row, self.token = kept.nonzero(as_tuple=True)
        lengths: list[int] = kept.sum(1).tolist()
        self._offsets = [0, *accumulate(lengths)]
        ahead = _tokens_to_come(span_ids[self.row, self.token], self.row)
        # x_{i+1} must be the target's own, and x_{i+2} of the same reply.
        (self.starts,) = (ahead[1:] > 0).nonzero(as_tuple=True)
        self.room = ahead[self.starts + 1]

    @cached_property
    def documents(self) -> list[Run]:
        """Runs of queries at every packed token: one a row."""
        bounds = zip(self._offsets, self._offsets[1:], strict=False)
        return [Run(begin, end, begin, begin) for begin, end in bounds if begin < end]

    @cached_property
    def replies(self) -> list[Run]:
        """Runs of queries at the starts alone: one a reply."""
        starts, rows = self.starts.tolist(), self.row[self.starts].tolist()
        runs, begin = [], 0
        for i in range(1, len(starts) + 1):
            goes_on = i < len(starts) and starts[i] == starts[i - 1] + 1
            if not goes_on or rows[i] != rows[begin]:
                document = self._offsets[rows[begin]]
                runs.append(Run(begin, i, starts[begin], document))
                begin = i
        return runs


def _tokens_to_come(spans: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Tokens that follow each one in its own reply, 0 outside replies; [num_packed]."""
    index = torch.arange(spans.numel(), device=spans.device)
    differs = (spans[1:] != spans[:-1]) | (row[1:] != row[:-1])
    is_last = torch.cat([differs, differs.new_ones(1)])
    last = torch.where(is_last, index, spans.numel())
    last = last.flip(0).cummin(0).values.flip(0)
    return torch.where(spans > 0, last - index, 0)
