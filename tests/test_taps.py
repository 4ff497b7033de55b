from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_eagle3.taps import (
    check_tap_ids,
    default_tap_ids,
    from_output_ids,
    to_output_ids,
)


@given(st.integers(1, 200))
def test_default_ids_are_valid_for_every_depth(num_layers: int) -> None:
    ids = default_tap_ids(num_layers)
    assert check_tap_ids(ids, num_layers) == ids
    assert len(ids) == min(3, num_layers)


@given(st.integers(7, 200))
def test_default_ids_are_the_published_rule(num_layers: int) -> None:
    assert default_tap_ids(num_layers) == (2, num_layers // 2, num_layers - 3)


@given(st.sets(st.integers(1, 50), min_size=1))
def test_conventions_are_inverse(ids: set[int]) -> None:
    rising = tuple(sorted(ids))
    assert from_output_ids(to_output_ids(rising)) == rising


@given(st.lists(st.integers(-3, 12), max_size=5))
def test_checked_ids_survive_sorting_and_deduplication(ids: list[int]) -> None:
    """vLLM takes `sorted(set(ids))`; what passes must be what vLLM captures."""
    try:
        checked = check_tap_ids(ids, 8)
    except ValueError:
        assert not ids or ids != sorted(set(ids)) or min(ids) < 0 or max(ids) > 8
    else:
        assert list(checked) == ids == sorted(set(ids))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "got no layer ids"),
        ((1, 9), "made for another target"),
        ((-1, 2), "made for another target"),
        ((3, 2), "vLLM drops repeats and sorts"),
        ((2, 3, 3), "vLLM drops repeats and sorts"),
    ],
)
def test_refuses(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tap_ids(ids, 8)


def test_no_layers_refused() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        default_tap_ids(0)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
def test_ids_name_the_streams_that_transformers_calls_hidden_states(
    num_layers: int,
) -> None:
    """hidden_states[L] of transformers is the stream entering layer L, L < layers."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        vocab_size=16,
    )
    model = LlamaModel(config).eval()
    entering: dict[int, torch.Tensor] = {}

    def remember(i: int) -> None:
        model.layers[i].register_forward_pre_hook(
            lambda _, args, kwargs: entering.update(
                {i: (args[0] if args else kwargs["hidden_states"]).detach()}
            ),
            with_kwargs=True,
        )

    for i in range(num_layers):
        remember(i)
    out = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert len(entering) == num_layers
    for i, stream in entering.items():
        torch.testing.assert_close(stream, out.hidden_states[i])
