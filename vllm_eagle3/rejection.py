"""Verification of sampled drafts: recursive rejection down the tree. Pure, no RNG.

The children of a node were drawn from the head's law q without replacement. They are
judged in the order of their drawing; a child x is accepted with probability
min(1, p(x) / q(x)). After a refusal the target's law becomes the renormalised residual
(p - q)+ and q the law of the next draw, q without x. What is left of p when no child is
accepted gives the recovered token; at a leaf nothing was taken from p, and its token is
the bonus (Leviathan et al. 2023, appendix A; without replacement: Jeon et al. 2024,
RSD, and Chen et al. 2024, Sequoia).

The output law is p for any q, but only if a draw is judged whatever token it gave: the
number of a node's children is fixed before they are drawn, and a tree may be cut only
by rules that are blind to the tokens that go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tree import DraftTree
from .verify import PADDING, Verdict, walk, without_padding


@dataclass(frozen=True)
class VerifyNoise:
    """Independent uniforms in [0, 1), never those the drafts were drawn with.

    Attributes:
        accept: [num_reqs, num_nodes], judges each node.
        final: [num_reqs], draws the recovered or bonus token.
    """

    accept: torch.Tensor
    final: torch.Tensor


def reject_tree(
    tree: DraftTree,  # siblings in the order of their drawing
    num_nodes: torch.Tensor,  # [num_reqs], nodes in use; later ones are padding
    p: torch.Tensor,  # [num_reqs, num_nodes + 1, vocab], row 0 is the root's
    q: torch.Tensor,  # [num_reqs, rows, draft_vocab], row 0 is the root's
    noise: VerifyNoise,
    to_target_ids: torch.Tensor | None = None,  # draft id -> target id, [draft_vocab]
) -> Verdict:
    """Accept a path of each tree and draw one more token; the law is the target's.

    Args:
        tree: as drawn, see `grow_sampled`.
        num_nodes: nodes that were kept of each request's tree, a prefix.
        p: the target's law after node i in row i + 1, with the request's sampling
            parameters applied. A token of probability 0 is never emitted.
        q: the law that the children of node i were drawn from, in row i + 1; rows of
            trailing leaves may be missing. A child of probability 0 is never accepted.
        noise: uniforms.
        to_target_ids: None when draft and target ids are equal.
    """
    num_reqs, width = tree.token_ids.shape
    parents = without_padding(tree.parents, num_nodes)

    def say(
        here: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return judge_children(
            tree.token_ids,
            parents == here[:, None],
            _row_after(p, here),
            in_target_ids(_row_after(q, here), to_target_ids, p.shape[-1]),
            noise,
        )

    return walk(say, num_reqs, width, tree.token_ids.device)


def judge_children(
    token_ids: torch.Tensor,  # [num_reqs, num_nodes]
    siblings: torch.Tensor,  # [num_reqs, num_nodes] bool, children of one node
    p: torch.Tensor,  # [num_reqs, vocab], the target's law there
    q: torch.Tensor,  # [num_reqs, vocab], the law the children were drawn from
    noise: VerifyNoise,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target says at one node of each tree, and the child that drafted it.

    Returns:
        (token, child), both [num_reqs]: an accepted child and its token, or -1 and a
        recovered token; without children that is a bonus token.
    """
    child, left = _judge_siblings(token_ids, siblings, p, q, noise.accept)
    goes_on, token = child >= 0, torch.empty_like(child)
    token[goes_on] = token_ids[goes_on, child[goes_on]]
    token[~goes_on] = _draw(left[~goes_on], noise.final[~goes_on])
    return token, child


def _judge_siblings(
    token_ids: torch.Tensor,  # [num_reqs, num_nodes]
    siblings: torch.Tensor,  # [num_reqs, num_nodes] bool, children of one node
    p: torch.Tensor,  # [num_reqs, vocab]
    q: torch.Tensor,  # [num_reqs, vocab]
    accept_noise: torch.Tensor,  # [num_reqs, num_nodes]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (accepted child or -1 [num_reqs], what is left of p [num_reqs, vocab])."""
    reqs = torch.arange(len(token_ids), device=token_ids.device)
    accepted = torch.full_like(reqs, PADDING)
    place = siblings.cumsum(1)  # 1 for the first child
    for turn in range(1, int(siblings.sum(1).max()) + 1):
        is_next = siblings & (place == turn)
        child = is_next.int().argmax(1)
        # Of a tree without a further child this reads padding, which may be -1.
        token = token_ids[reqs, child].clamp(min=0)
        p_token, q_token = p[reqs, token], q[reqs, token]
        judged = is_next.any(1) & (accepted < 0) & (q_token > 0)
        # Strict, so that a token of probability 0 is refused whatever the noise.
        wins = judged & (accept_noise[reqs, child] * q_token < p_token)
        accepted = torch.where(wins, child, accepted)
        refused = (judged & ~wins)[:, None]
        p, q = (
            torch.where(refused, _residual(p, q), p),
            torch.where(refused, _without(q, token), q),
        )
    return accepted, p


def _row_after(law: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """The law after a node (or the root), [num_reqs, vocab]."""
    reqs = torch.arange(len(node), device=node.device)
    # Past the last row are leaves: what is read for them judges no child.
    return law[reqs, (node + 1).clamp(max=law.shape[1] - 1)]


def in_target_ids(
    q: torch.Tensor,  # [num_reqs, draft_vocab]
    to_target_ids: torch.Tensor | None,  # draft id -> target id, [draft_vocab]
    vocab: int,
) -> torch.Tensor:
    """The same law over the target's vocabulary, [num_reqs, vocab]."""
    if to_target_ids is None:
        return q
    return q.new_zeros(len(q), vocab).index_copy_(1, to_target_ids, q)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(p - q)+ renormalised; both [num_reqs, vocab].

    It is empty only where p equals q, and then nothing is refused; should rounding
    say otherwise, p itself stays.
    """
    above = (p - q).clamp(min=0)
    mass = above.sum(-1, keepdim=True)
    return torch.where(mass > 0, above / mass, p)


def _without(q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """q of the next draw: `token` [num_reqs] is gone; zero when nothing is left."""
    rest = q.scatter(1, token[:, None], 0)
    return rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _draw(
    p: torch.Tensor,  # [num_reqs, vocab], need not sum to one
    uniform: torch.Tensor,  # [num_reqs]
) -> torch.Tensor:
    """Token at the uniform's place of the cumulated law, [num_reqs]."""
    # In float64: over a whole vocabulary float32 sums lose the rare tokens.
    reached = p.double().cumsum(-1)
    place = uniform.double()[:, None] * reached[:, -1:]
    # p > 0, because parallel sums need not be monotone, and for a uniform of 1.
    found = (reached > place) & (p > 0)
    return torch.where(found.any(-1), found.int().argmax(-1), p.argmax(-1))
