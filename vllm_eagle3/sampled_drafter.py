"""Draw a draft tree of a fixed shape from the head, for rejection sampling.

At temperature above 0 drafts may be drawn instead of ranked. Verification is exact only
if nothing but the order of drawing tells the drafts apart, so the shape is a constant:
which nodes get children, and how many, is known before any token is, and no node is
dropped for its score.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch

from .drafter import Advance, HeadOutput, TreeShape
from .tree import ROOT, DraftTree


@dataclass(frozen=True)
class SampledShape:
    """A tree's shape: the number of children of every node, level by level.

        root ─┬─ 0 ─┬─ 2
              │     └─ 3          children = ((2,), (2, 1))
              └─ 1 ─── 4

    Attributes:
        children: children[d][j] tokens are drawn after the j-th node of depth d; depth
            0 is the root. Nodes are numbered in this order.
    """

    children: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        width = 1
        for depth, counts in enumerate(self.children):
            if len(counts) != width or min(counts) < 0 or sum(counts) < 1:
                raise ValueError(
                    f"sampled shape: got children {counts} at depth {depth}; want "
                    f"{width} counts, none negative, at least one of them positive"
                )
            width = sum(counts)
        if not self.children:
            raise ValueError("sampled shape: got no level, want at least one")

    @property
    def parents(self) -> list[int]:
        """Parent of every node, ROOT for the first level."""
        counts = [count for level in self.children for count in level]
        return [
            parent
            for parent, count in enumerate(counts, start=ROOT)
            for _ in range(count)
        ]

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def parents_by_level(self) -> list[int]:
        """How many nodes of each level above the last have children."""
        return [sum(count > 0 for count in counts) for counts in self.children]

    @property
    def num_parents(self) -> int:
        """Nodes with children and the root: rows of draft noise that a tree needs."""
        return sum(self.parents_by_level)


# What a head of middling quality sees: the first draft of a node is accepted with this
# probability, the j-th one, if it comes to that, with a j-th of it.
FIRST_DRAFT_ACCEPTED = 0.45


def _turn_chances(turns: int) -> list[float]:
    """That the draft of each turn at one node is accepted, [turns]."""
    chances, refused = list[float](), 1.0
    for turn in range(turns):
        chances.append(refused * FIRST_DRAFT_ACCEPTED / (turn + 1))
        refused -= chances[-1]
    return chances


def place_chances(turns: tuple[int, ...]) -> float:
    """That a node is accepted which is reached by these turns, by the same guess."""
    return math.prod(_turn_chances(turn + 1)[turn] for turn in turns)


@cache
def sampled_shape(limits: TreeShape) -> SampledShape:
    """The shape with the most accepted drafts to expect within the limits.

    A node is worth the probability that it is accepted, by `FIRST_DRAFT_ACCEPTED` for
    every head, so that the shape is a constant. No child is worth more than its parent
    and no later sibling more than an earlier one, so the best nodes form a tree. As in
    a ranked tree at most `top_k` nodes of a level have children, each at most `top_k`.
    """
    chances = _turn_chances(limits.top_k)
    # A node is named by the turns of its path: (0, 2) is the third child of the first.
    kept: list[tuple[int, ...]] = []
    parents = Counter[int]()  # depth -> nodes with children
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0], (0,))]
    while waiting and len(kept) < limits.num_nodes:
        worth, path = heapq.heappop(waiting)
        above, turn = path[:-1], path[-1]
        if turn == 0 and parents[len(above)] == limits.top_k:
            continue
        parents[len(above)] += turn == 0
        kept.append(path)
        if turn + 1 < limits.top_k:
            sibling = worth / chances[turn] * chances[turn + 1]
            heapq.heappush(waiting, (sibling, (*above, turn + 1)))
        if len(path) < limits.depth:
            heapq.heappush(waiting, (worth * chances[0], (*path, 0)))
    count = Counter(path[:-1] for path in kept)
    levels = [
        sorted(p for p in [(), *kept] if len(p) == d) for d in range(len(parents))
    ]
    return SampledShape(tuple(tuple(count[p] for p in level) for level in levels))


@dataclass(frozen=True)
class SampledTree:
    """A drawn tree and the laws it was drawn from, as `reject_tree` takes them.

    Attributes:
        tree: nodes level by level, siblings in the order of their drawing.
        q: [num_reqs, rows, draft_vocab]; row i + 1 belongs to the children of node i,
            zero for a leaf; rows end with the last node that has children.
    """

    tree: DraftTree
    q: torch.Tensor


def draw_children(
    q: torch.Tensor,  # [..., draft_vocab]
    num_children: int,
    noise: torch.Tensor,  # [..., draft_vocab], independent Exponential(1)
) -> torch.Tensor:
    """Draw draft ids from q without replacement, [..., num_children] in draw order.

    An exponential race, which is Gumbel-top-k without the logarithms: ids finish at
    the times noise / q, and the order of finishing is that of drawing one by one
    (Kool et al. 2019).
    """
    tiny = torch.finfo(noise.dtype).tiny
    return (q / noise.clamp(min=tiny)).topk(num_children, dim=-1).indices


def exponential_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Independent Exponential(1), float32; a third of the time of torch's own."""
    uniform = torch.rand(shape, generator=generator, device=device)
    # Half a step of the generator away from 0, which would win every race.
    return uniform.add_(2**-25).neg_().log1p_().neg_()


def grow_sampled(
    root: HeadOutput,
    advance: Advance,
    to_target_ids: torch.Tensor | None,  # draft id -> target id, [draft_vocab]
    shape: SampledShape,
    temperature: torch.Tensor,  # [num_reqs], above 0
    noise: torch.Tensor,  # [num_reqs, shape.num_parents, draft_vocab], Exponential(1)
) -> SampledTree:
    """Draw one tree per request; q is the head's softmax at the request's temperature.

    Raises:
        ValueError: more children than draft ids, or a temperature that is not positive.
    """
    _validate(root, shape, temperature)
    noise_of_level = noise.split(shape.parents_by_level, dim=1)
    output, drafts, laws = root, [], []
    for level, counts in enumerate(shape.children, start=1):
        # Only nodes with children are run: `row` is a child's parent among those.
        row = [r for r, count in enumerate(filter(None, counts)) for _ in range(count)]
        turn = [turn for count in counts for turn in range(count)]
        q = (output.logits.float() / temperature[:, None, None]).softmax(-1)
        drawn = draw_children(q, max(counts), noise_of_level[level - 1])[:, row, turn]
        drafts.append(drawn if to_target_ids is None else to_target_ids[drawn])
        laws.append(q)
        if level == len(shape.children):
            break
        running = [node for node, count in enumerate(shape.children[level]) if count]
        parent_row = torch.tensor([row[node] for node in running], device=noise.device)
        output = advance(
            level,
            drafts[-1][:, running],
            output.features[:, parent_row],
            parent_row.expand(len(noise), -1),
        )
    return _assemble(torch.cat(drafts, 1), torch.cat(laws, 1), shape)


def _validate(root: HeadOutput, shape: SampledShape, temperature: torch.Tensor) -> None:
    draft_vocab = root.logits.shape[-1]
    if max(map(max, shape.children)) > draft_vocab:
        raise ValueError(
            f"sampled shape: got {max(map(max, shape.children))} children of one node, "
            f"want at most {draft_vocab}, the draft vocabulary"
        )
    # Asking a device would wait for it.
    if temperature.device.type == "cpu" and bool((temperature <= 0).any()):
        raise ValueError(
            f"temperature: got {temperature.tolist()}, want each above 0; "
            "requests at 0 take greedy drafts"
        )


def _assemble(
    token_ids: torch.Tensor,  # [num_reqs, num_nodes]
    laws: torch.Tensor,  # [num_reqs, num_parents, draft_vocab]
    shape: SampledShape,
) -> SampledTree:
    parents = torch.tensor(shape.parents, device=token_ids.device)
    rows = [parent + 1 for parent in sorted(set(shape.parents))]
    q = laws.new_zeros(len(laws), rows[-1] + 1, laws.shape[-1])
    q[:, rows] = laws
    # No score decides anything here.
    scores = torch.zeros_like(token_ids, dtype=torch.float32)
    return SampledTree(DraftTree(token_ids, parents.expand_as(token_ids), scores), q)
