"""DraftTree and its growth: the drawn examples, and properties over random heads."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_eagle3.drafter import HeadOutput, TreeShape, grow
from vllm_eagle3.tree import ROOT, DraftTree, chain

# The tree that is drawn in tree.py.
DRAWN = DraftTree(
    token_ids=torch.tensor([[10, 11, 12, 13]]),
    parents=torch.tensor([[-1, -1, 0, 0]]),
    scores=torch.zeros(1, 4),
)


def test_drawn_tree_has_the_drawn_depths() -> None:
    assert DRAWN.depths.tolist() == [[1, 1, 2, 2]]


def test_drawn_tree_sees_only_ancestors_and_itself() -> None:
    assert DRAWN.ancestor_mask().int().tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    ]


def test_chain_is_a_tree_of_one_node_a_depth() -> None:
    tree = chain(torch.tensor([[5, 6, 7]]), torch.zeros(1, 3))
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.depths.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_shape_without_nodes_children_or_levels_is_refused(
    bad: tuple[int, int, int],
) -> None:
    with pytest.raises(ValueError, match="want each at least 1"):
        TreeShape(*bad)


class TableHead:
    """A head whose law depends on the whole path, so that a wrong ancestor shows.

    The feature of a row is the hash of its path; logits are a fixed function of it.
    """

    VOCAB = 6

    def __init__(self, num_reqs: int) -> None:
        self.num_reqs = num_reqs

    def root(self) -> HeadOutput:
        paths = [[(r,)] for r in range(self.num_reqs)]
        return self._say(paths)

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        parent_row: torch.Tensor,
    ) -> HeadOutput:
        assert parent_row.shape == token_ids.shape
        above = self.level if level > 1 else [[(r,)] for r in range(self.num_reqs)]
        self.level = [
            [
                (*self.paths[int(features[r, w, 0])], int(token_ids[r, w]))
                for w in range(token_ids.shape[1])
            ]
            for r in range(self.num_reqs)
        ]
        for r, paths in enumerate(self.level):
            parents = [above[r][row] for row in parent_row[r].tolist()]
            assert [path[:-1] for path in paths] == parents
        return self._say(self.level)

    def _say(self, paths: list[list[tuple[int, ...]]]) -> HeadOutput:
        flat = list(itertools.chain(*paths))
        # A feature is the number of its path, so that nothing is lost in a tensor.
        if not hasattr(self, "paths"):
            self.paths: list[tuple[int, ...]] = []
        first = len(self.paths)
        self.paths += flat
        features = torch.arange(first, first + len(flat)).view(self.num_reqs, -1, 1)
        return HeadOutput(features, self.logits(flat).view(self.num_reqs, -1, 6))

    def logits(self, paths: list[tuple[int, ...]]) -> torch.Tensor:
        rows = []
        for path in paths:
            seed = sum((token + 2) * 7919**i for i, token in enumerate(path)) % 2**31
            rows.append(
                torch.randn(self.VOCAB, generator=torch.Generator().manual_seed(seed))
            )
        return torch.stack(rows)


def all_paths(
    head: TableHead, req: int, shape: TreeShape
) -> dict[tuple[int, ...], float]:
    """Every node that growth may create, with its score, by plain recursion."""
    found: dict[tuple[int, ...], float] = {}
    frontier = [((req,), 0.0)]
    for _ in range(shape.depth):
        grown = []
        for path, score in frontier:
            log_q = head.logits([path])[0].log_softmax(-1)
            best = log_q.topk(shape.top_k)
            for value, token in zip(best.values, best.indices, strict=True):
                grown.append(((*path, int(token)), score + float(value)))
        found.update(grown)
        frontier = sorted(grown, key=lambda g: -g[1])[: shape.top_k]
    return found


SHAPES = [
    TreeShape(num_nodes=4, top_k=1, depth=4),
    TreeShape(num_nodes=5, top_k=2, depth=3),
    TreeShape(num_nodes=9, top_k=3, depth=4),
    TreeShape(num_nodes=6, top_k=6, depth=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grown_tree_is_the_best_of_all_paths(shape: TreeShape) -> None:
    head = TableHead(num_reqs=3)
    tree = grow(head.root(), head.advance, None, shape)
    for req in range(3):
        expected = sorted(all_paths(head, req, shape).items(), key=lambda p: -p[1])
        expected_paths = {path for path, _ in expected[: shape.num_nodes]}
        assert paths_of(tree, req) == expected_paths


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parents_come_first_so_every_prefix_is_a_tree(shape: TreeShape) -> None:
    head = TableHead(num_reqs=4)
    tree = grow(head.root(), head.advance, None, shape)
    nodes = torch.arange(tree.num_nodes)
    assert bool((tree.parents < nodes).all()) and bool((tree.parents >= ROOT).all())


def test_growth_stops_when_no_deeper_node_can_be_kept() -> None:
    class Unsure(TableHead):
        levels = 0

        def logits(self, paths: list[tuple[int, ...]]) -> torch.Tensor:
            return torch.zeros(len(paths), self.VOCAB)  # every token equally likely

        def advance(self, level: int, *rest: torch.Tensor) -> HeadOutput:
            self.levels = level
            return super().advance(level, *rest)

    head = Unsure(num_reqs=2)
    shape = TreeShape(num_nodes=4, top_k=5, depth=6)
    tree = grow(head.root(), head.advance, None, shape)
    assert head.levels == 0 and tree.depths.max() == 1


def test_siblings_are_distinct() -> None:
    head = TableHead(num_reqs=2)
    tree = grow(head.root(), head.advance, None, SHAPES[2])
    for req in range(2):
        pairs = list(
            zip(tree.parents[req].tolist(), tree.token_ids[req].tolist(), strict=True)
        )
        assert len(set(pairs)) == len(pairs)


def test_draft_ids_become_target_ids() -> None:
    head = TableHead(num_reqs=1)
    to_target = torch.tensor([3, 1, 4, 0, 5, 2])
    shape = TreeShape(num_nodes=3, top_k=3, depth=1)
    plain = grow(head.root(), head.advance, None, shape)
    mapped = grow(TableHead(1).root(), head.advance, to_target, shape)
    assert torch.equal(mapped.token_ids, to_target[plain.token_ids])


def paths_of(tree: DraftTree, req: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    parents, tokens = tree.parents[req].tolist(), tree.token_ids[req].tolist()
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else (req,)), token))
    return set(paths)
