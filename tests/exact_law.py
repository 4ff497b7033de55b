"""The exact law of what a verifier emits, in fractions, on tiny vocabularies.

A `Model` gives a target's law p and a head's law q after any path of tokens. A `Case`
is one way in which a step can go: the drafts that were drawn, where each uniform falls,
and the probability of both as a fraction. `sampled_cases` lists cases that cover
everything; the verifier under test is run on every one of them, and `emitted_law` adds
up the probabilities of what it emitted.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import torch

from vllm_eagle3.rejection import VerifyNoise
from vllm_eagle3.sampled_drafter import SampledShape
from vllm_eagle3.tree import ROOT, DraftTree
from vllm_eagle3.verify import Verdict

Path = tuple[int, ...]
Law = tuple[Fraction, ...]
Interval = tuple[Fraction, Fraction]
ALL: Interval = (Fraction(0), Fraction(1))
WIDEST_VOCAB = 5

SHAPES = {
    "chain of 2": SampledShape(((1,), (1,))),
    "two siblings": SampledShape(((2,),)),
    "three siblings": SampledShape(((3,),)),
    "2x2": SampledShape(((2,), (2, 2))),
    "3-1": SampledShape(((3,), (1, 1, 1))),
    "second child only": SampledShape(((2,), (0, 2))),
}


@dataclass(frozen=True)
class Model:
    """Laws of the next token that depend on the whole path.

    Weights are small integers; p may have zeros, and so may q beyond three tokens.
    """

    seed: int
    vocab: int

    def p(self, path: Path) -> Law:
        return _random_law("p", self.seed, path, self.vocab, 2)

    def q(self, path: Path) -> Law:
        return _random_law("q", self.seed, path, self.vocab, 3)


@cache
def _random_law(kind: str, seed: int, path: Path, vocab: int, support: int) -> Law:
    rng = random.Random(f"{kind} {seed} {path}")
    weights = [rng.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(vocab)]
    for token in rng.sample(range(vocab), support):
        weights[token] = weights[token] or 1
    return normalised(weights)


def normalised(weights: Iterable[int | Fraction]) -> Law:
    weights = list(weights)
    return tuple(Fraction(weight) / sum(weights) for weight in weights)


# draw(q, k) -> every outcome of drawing k children, with its probability
Draw = Callable[[Law, int], list[tuple[Path, Fraction]]]


@cache
def without_replacement(q: Law, k: int) -> list[tuple[Path, Fraction]]:
    outcomes = []
    for drawn in itertools.permutations([x for x in range(len(q)) if q[x]], k):
        chance, left = Fraction(1), Fraction(1)
        for token in drawn:
            chance *= q[token] / left
            left -= q[token]
        outcomes.append((drawn, chance))
    return outcomes


@dataclass(frozen=True)
class Case:
    """One way a step can go; uniforms that decide nothing may fall anywhere."""

    model: Model
    shape: SampledShape
    kept: int  # nodes of the shape that are verified
    probability: Fraction = Fraction(1)
    tokens: dict[int, int] = field(default_factory=dict)  # node -> token
    accept: dict[int, Interval] = field(default_factory=dict)  # node -> uniform
    final: Interval = ALL


def sampled_cases(
    model: Model,
    shape: SampledShape,
    draw: Draw = without_replacement,
    kept: int | None = None,
) -> list[Case]:
    """Every draw of the drafts, with a box of noise for each way to judge them.

    Boundaries are those of recursive rejection, written down once more in fractions.
    """
    kept = shape.num_nodes if kept is None else kept
    return list(_after(ROOT, (), Case(model, shape, kept), draw))


def _after(node: int, path: Path, case: Case, draw: Draw) -> Iterator[Case]:
    children = [i for i, parent in enumerate(_parents(case.shape)) if parent == node]
    for drawn, chance in draw(case.model.q(path), len(children)):
        # A dropped sibling was drawn all the same.
        judged = [child for child in children if child < case.kept]
        told = {**case.tokens, **dict(zip(children, drawn, strict=True))}
        start = replace(case, probability=case.probability * chance, tokens=told)
        yield from _judge(judged, path, start, draw)


def _judge(children: list[int], path: Path, case: Case, draw: Draw) -> Iterator[Case]:
    p, q = case.model.p(path), case.model.q(path)
    for child in children:
        token = case.tokens[child]
        limit = min(Fraction(1), p[token] / q[token])
        if limit > 0:
            won = _narrowed(case, child, (Fraction(0), limit))
            yield from _after(child, (*path, token), won, draw)
        if limit == 1:
            return
        case = _narrowed(case, child, (limit, Fraction(1)))
        p = normalised(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
        if child != children[-1]:
            q = normalised(b if x != token else 0 for x, b in enumerate(q))
    for token, chance in enumerate(p):
        if chance:
            low = sum(p[:token], Fraction(0))
            yield replace(
                case,
                probability=case.probability * chance,
                final=(low, low + chance),
            )


def _narrowed(case: Case, node: int, interval: Interval) -> Case:
    return replace(
        case,
        probability=case.probability * (interval[1] - interval[0]),
        accept={**case.accept, node: interval},
    )


Reject = Callable[..., Verdict]


def run_rejection(verifier: Reject, cases: Sequence[Case], corner: float) -> list[Path]:
    """What `verifier` emits in each case, all as one batch.

    Args:
        verifier: `reject_tree` or a mutant of it.
        cases: of any shapes; they are padded to the widest.
        corner: where in its interval every uniform falls, within 0 and 1.
    """
    width = max(case.shape.num_nodes for case in cases)
    rows = [_Row(case, width, seed) for seed, case in enumerate(cases)]
    token_ids = torch.tensor([row.tokens for row in rows])
    parents = torch.tensor([row.parents for row in rows])
    uniforms = torch.tensor([row.accept(corner) for row in rows], dtype=torch.float64)
    final = [_inside(case.final, corner) for case in cases]
    verdict = verifier(
        DraftTree(token_ids, parents, torch.zeros(token_ids.shape)),
        torch.tensor([case.kept for case in cases]),
        torch.tensor([row.laws("p") for row in rows], dtype=torch.float64),
        torch.tensor([row.laws("q") for row in rows], dtype=torch.float64),
        VerifyNoise(uniforms, torch.tensor(final, dtype=torch.float64)),
    )
    return emitted(verdict)


def emitted(verdict: Verdict) -> list[Path]:
    return [tuple(t for t in row if t >= 0) for row in verdict.token_ids.tolist()]


class _Row:
    """One case as a row of a batch.

    Nodes that the case does not reach hold misleading tokens and uniforms.
    """

    def __init__(self, case: Case, width: int, seed: int) -> None:
        self.case, self.rng = case, random.Random(seed)
        own = _parents(case.shape)
        self.parents = [*own, *[ROOT] * (width - len(own))]
        self.tokens: list[int] = []
        self.paths: list[Path] = [()]
        for node, parent in enumerate(self.parents):
            any_token = self.rng.randrange(case.model.vocab)
            self.tokens.append(case.tokens.get(node, any_token))
            self.paths.append((*self.paths[parent + 1], self.tokens[-1]))

    def accept(self, corner: float) -> list[float]:
        return [
            _inside(self.case.accept[node], corner)
            if node in self.case.accept
            else self.rng.choice((0.0, 1 - 1e-9))
            for node in range(len(self.parents))
        ]

    def laws(self, kind: str) -> list[list[float]]:
        """Of "p" or "q", after the root and every node."""
        return [_as_floats(self.case.model, kind, path) for path in self.paths]


@cache
def _as_floats(model: Model, kind: str, path: Path) -> list[float]:
    law = model.p(path) if kind == "p" else model.q(path)
    return [*map(float, law), *[0.0] * (WIDEST_VOCAB - len(law))]


@cache
def _parents(shape: SampledShape) -> list[int]:
    return shape.parents


def _inside(interval: Interval, corner: float) -> float:
    low, high = interval
    return float(low) + corner * float(high - low)


@dataclass(frozen=True)
class MatchCase:
    """One draw of the target's token at the root and every node of a fixed tree."""

    probability: Fraction
    says: Path


def matched_cases(laws: Sequence[Law]) -> Iterator[MatchCase]:
    for says in itertools.product(*[[x for x, c in enumerate(w) if c] for w in laws]):
        probability = Fraction(1)
        for law, token in zip(laws, says, strict=True):
            probability *= law[token]
        yield MatchCase(probability, says)


def emitted_law(
    probabilities: Iterable[Fraction], texts: Iterable[Path], model: Model, length: int
) -> dict[Path, Fraction]:
    """The joint law of the first `length` tokens.

    A shorter text goes on as the target would.
    """
    law: dict[Path, Fraction] = defaultdict(Fraction)
    for probability, text in zip(probabilities, texts, strict=True):
        law[text[:length]] += probability
    return _continued(law, model, length)


def target_law(model: Model, length: int) -> dict[Path, Fraction]:
    return _continued({(): Fraction(1)}, model, length)


def _continued(
    law: dict[Path, Fraction], model: Model, length: int
) -> dict[Path, Fraction]:
    """The law of texts of exactly `length` tokens when the target goes on."""
    whole: dict[Path, Fraction] = defaultdict(Fraction)
    for text, mass in law.items():
        if len(text) == length:
            whole[text] += mass
            continue
        longer = {(*text, x): mass * c for x, c in enumerate(model.p(text)) if c}
        for end, chance in _continued(longer, model, length).items():
            whole[end] += chance
    return whole


# Just within both ends of every interval.
CORNERS = (1e-9, 1 - 1e-9)
LENGTH = 3  # tokens of the joint law


def biased_models(cases: Sequence[Case], texts: Sequence[Path]) -> set[Model]:
    """The models of which `texts`, one a case, do not have the target's joint law."""
    by_model: dict[Model, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        by_model[case.model].append(i)
    return {
        model
        for model, own in by_model.items()
        if emitted_law(
            (cases[i].probability for i in own), (texts[i] for i in own), model, LENGTH
        )
        != target_law(model, LENGTH)
    }
