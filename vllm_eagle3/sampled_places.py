"""What sampled trees of each size would bring, learnt from those that were verified.

The shape of a sampled tree is fixed before anything is drawn, and nothing of it may be
left out for what was drawn (`sampled_drafter`). So a budget cannot choose among its
nodes; it can only choose the size of the next tree, and what it may know is how often
drafts were accepted at each place: the root's first child, its second, the first one's
first child, and so on. A place is the same in every shape that has it, since whether a
draft is accepted depends on its ancestors and earlier siblings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from .drafter import TreeShape
from .sampled_drafter import place_chances, sampled_shape

# The turns by which a node is reached: (0, 2) is the third child of the first.
Place = tuple[int, ...]

_PRIOR_TRIALS = 16.0  # that the guess of `place_chances` counts for, at each place
_MEMORY = 1000.0  # trials a place remembers


class SampledPlaces:
    """How often drafts are accepted at each place, and what shapes make of that.

    Args:
        limits: of the shapes between which a budget may choose, each a candidate.

    Attributes:
        rows, head_rows, levels, branches: [shapes], of one request: nodes that the
            target verifies, rows of the head's further passes, such passes, and
            branches.
    """

    def __init__(self, limits: Sequence[TreeShape]) -> None:
        shapes = {sampled_shape(each): each for each in limits}  # each shape once
        self.limits = list(shapes.values())
        self.rows = np.array([shape.num_nodes for shape in shapes])
        self.levels = np.array([len(shape.children) - 1 for shape in shapes])
        self.head_rows = np.array([shape.num_parents - 1 for shape in shapes])
        # Every child after a node's first one begins a branch.
        self.branches = self.rows - [shape.num_parents for shape in shapes]
        places = [places_of(tuple(shape.parents)) for shape in shapes]
        self._number = {
            place: number
            for number, place in enumerate(sorted({p for each in places for p in each}))
        }
        self._members = np.zeros((len(shapes), len(self._number)))
        for member, each in zip(self._members, places, strict=True):
            member[[self._number[place] for place in each]] = 1
        prior = [place_chances(place) for place in self._number]
        self._trials = np.full(len(prior), _PRIOR_TRIALS)
        self._accepted = _PRIOR_TRIALS * np.array(prior)

    def observe(self, parents: Sequence[int], accepted: np.ndarray) -> None:
        """Learn from one verified tree.

        Args:
            parents: of each node, -1 for the root; siblings in the order they were
                drawn. The first nodes of a shape will do.
            accepted: [num_nodes], bool.
        """
        places = places_of(tuple(parents))
        known = [n for n, place in enumerate(places) if place in self._number]
        numbers = [self._number[places[n]] for n in known]
        self._trials[numbers] += 1
        self._accepted[numbers] += accepted[known]
        full = self._trials > _MEMORY
        self._trials[full] /= 2
        self._accepted[full] /= 2
        self.__dict__.pop("gains", None)

    @cached_property
    def gains(self) -> np.ndarray:
        """Drafts of one request that are accepted in the mean, [shapes]."""
        return self._members @ (self._accepted / self._trials)


@lru_cache(maxsize=256)
def places_of(parents: tuple[int, ...]) -> tuple[Place, ...]:
    """Place of each node of a tree; siblings stand in the order of their drawing."""
    places: list[Place] = []
    turns = [0] * (len(parents) + 1)  # children seen so far; the last one is the root's
    for parent in parents:
        above = () if parent < 0 else places[parent]
        places.append((*above, turns[parent]))
        turns[parent] += 1
    return tuple(places)
