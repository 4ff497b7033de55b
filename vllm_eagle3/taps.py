"""Taps: which target layers feed the draft head.

Convention everywhere in this package, as in vLLM and the reference: tap id L is the
residual stream ENTERING layer L, that is the output of layer L-1, and id 0 is the
embedding. SpecForge and SGLang number the same tensors by the layer they leave, so
their ids are one lower; `from_output_ids` is the only place that converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """Low, mid and high taps (EAGLE-3, section 3.1; 2, L//2, L-3), for any depth.

    The published rule repeats an id below seven layers, and vLLM then drops the
    repeat, so shallow targets get the nearest distinct ids instead: three where the
    target has at least three layers, otherwise one per layer boundary.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers: got {num_layers}, want at least 1")
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 3:
        return (1, (num_layers + 1) // 2, num_layers)[: min(3, num_layers)]
    return tuple(range(1, num_layers + 1))


def check_tap_ids(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `tap_ids` if they are sorted, distinct and inside the target.

    Raises:
        ValueError: naming the ids, the rule and the remedy.
    """
    ids = tuple(int(i) for i in tap_ids)
    remedy = f"want rising, distinct ids in 0..{num_layers} (input of that layer)"
    if not ids:
        raise ValueError(f"taps: got no layer ids, {remedy}")
    if min(ids) < 0 or max(ids) > num_layers:
        raise ValueError(
            f"taps: got {list(ids)} for a target of {num_layers} layers, {remedy}; "
            "the head was made for another target"
        )
    if any(b <= a for a, b in pairwise(ids)):
        raise ValueError(
            f"taps: got {list(ids)}, {remedy}; vLLM drops repeats and sorts ids, "
            "so the head would read other features than it was trained on"
        )
    return ids


def from_output_ids(output_ids: Sequence[int]) -> tuple[int, ...]:
    """Convert ids that name the layer a tensor leaves (SpecForge, SGLang)."""
    return tuple(i + 1 for i in output_ids)


def to_output_ids(tap_ids: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `from_output_ids`."""
    return tuple(i - 1 for i in tap_ids)
