"""Options: what is known, what is refused and with which words."""

from __future__ import annotations

import pytest

from vllm_eagle3.config import KEY, read_options
from vllm_eagle3.drafter import TreeShape


def test_default_is_auto() -> None:
    assert read_options(None).shape == read_options({}).shape == "auto"
    assert read_options({"other": 1}).shape == "auto"


def test_auto_is_a_chain_of_at_most_three() -> None:
    assert read_options({}).tree_shape(16) == TreeShape.chain(3)
    assert read_options({}).tree_shape(2) == TreeShape.chain(2)


def test_chain_takes_the_whole_budget_and_off_none() -> None:
    assert read_options({KEY: {"shape": "chain"}}).tree_shape(7) == TreeShape.chain(7)
    assert read_options({KEY: {"shape": "off"}}).tree_shape(7) is None


@pytest.mark.parametrize("budget", [0, 65, -1])
def test_budget_out_of_range_is_refused(budget: int) -> None:
    with pytest.raises(
        ValueError, match=rf"num_speculative_tokens: got {budget}, want 1"
    ):
        read_options({}).tree_shape(budget)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shpae": "chain"}, ["shpae: unknown key", "known ones are shape"]),
        ({"shape": "spiral"}, ["shape: got 'spiral'", "auto"]),
        ("chain", ["want an object"]),
        ({"shape": 3, "x": 1}, ["shape: got 3", "x: unknown key"]),
    ],
)
def test_bad_options_name_every_key(given: object, words: list[str]) -> None:
    with pytest.raises(ValueError, match=KEY) as caught:
        read_options({KEY: given})
    assert all(word in str(caught.value) for word in words)
