"""Past drafts of one kind, and what other plans would have made of them.

A plan is judged by going through the last drafts again as the engine would: growth ends
at its depth, or where the confidence is too small, and the best of what has grown is
verified. So plans are compared with all that they would adapt to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .drafter import TreeShape

_SAMPLED_NODES = 320
MIN_SAMPLES = 20  # drafts of a kind before it is judged at all


class DraftSamples:
    """The last drafts that were made within one shape: chains, or trees."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        size = max(_SAMPLED_NODES // shape.num_nodes, MIN_SAMPLES)
        self._probabilities = np.zeros((size, shape.num_nodes))
        self._depths = np.zeros((size, shape.num_nodes), dtype=int)
        self._branches = np.zeros((size, shape.num_nodes), dtype=bool)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._depths))

    @property
    def are_enough(self) -> bool:
        """Whether there are enough to judge plans by."""
        return len(self) >= MIN_SAMPLES

    def add(
        self, probabilities: np.ndarray, depths: np.ndarray, branches: np.ndarray
    ) -> None:
        """Remember drafts, [num_drafts, up to num_nodes]; probability 0 is padding."""
        size, width = len(self._depths), probabilities.shape[1]
        new = min(len(probabilities), size)
        for values, memory in (
            (probabilities, self._probabilities),
            (depths, self._depths),
            (branches, self._branches),
        ):
            memory[: size - new] = memory[new:]
            memory[size - new :] = 0
            memory[size - new :, :width] = values[-new:]
        self._count += len(probabilities)

    def replay(
        self, depth: int, num_reqs: int, min_masses: Sequence[float] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Grow the drafts again, `num_reqs` at a time, each time one step.

        Args:
            depth: at which growth ends.
            min_masses: growth ends before where the probabilities of the last level's
                best nodes sum to less, by level.

        Returns:
            gains: [steps, nodes + 1], expected accepted nodes when so many of the best
                nodes are verified, from none on.
            branches: [steps, nodes + 1], that these nodes have.
            depths: [steps], that were grown.
        """
        steps = max(len(self) // num_reqs, 1)
        last = np.arange(-steps * num_reqs, 0) % len(self) - len(self)
        probabilities = self._probabilities[last].reshape(steps, -1)
        depths = self._depths[last].reshape(steps, -1)
        grown = np.full(steps, depth)
        for level in range(depth - 1, 0, -1):
            here = np.where(depths == level, probabilities, 0)
            grown[self._mass(here, num_reqs) < min_masses[level - 1]] = level
        values = np.where(depths <= grown[:, None], probabilities, 0)
        gains, branches = np.zeros((2, steps, values.shape[1] + 1))
        order = np.argsort(-values, axis=1, kind="stable")
        np.cumsum(np.take_along_axis(values, order, 1), axis=1, out=gains[:, 1:])
        more = self._branches[last].reshape(steps, -1)
        np.cumsum(np.take_along_axis(more, order, 1), axis=1, out=branches[:, 1:])
        return gains, branches, grown

    def _mass(self, level: np.ndarray, num_reqs: int) -> np.ndarray:
        """Sum over the requests' best nodes of a level, as many as grow on, [steps]."""
        if self.shape.top_k == 1:
            return level.sum(axis=1)
        each = np.sort(level.reshape(len(level), num_reqs, -1), axis=2)
        return each[..., -self.shape.top_k :].sum(axis=(1, 2))
