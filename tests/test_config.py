"""Options: what is known, what is refused and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_eagle3.config import KEY, read_options, read_request_options
from vllm_eagle3.drafter import TreeShape


def test_default_is_auto() -> None:
    assert read_options(None).shape == read_options({}).shape == "auto"
    assert read_options({"other": 1}).shape == "auto"


def test_auto_has_room_for_a_chain_and_with_more_budget_for_a_tree() -> None:
    assert read_options({}).tree_shape(2) == TreeShape.chain(2)
    assert read_options({}).tree_shape(7) == TreeShape.chain(5)
    assert read_options({}).tree_shape(16) == TreeShape(16, 4, 6)
    assert read_options({KEY: {"top_k": 1}}).tree_shape(16) == TreeShape.chain(5)


def test_records_are_made_of_every_kind_of_plan() -> None:
    options = read_options({KEY: {"shape": "tree", "record": "folder"}})
    with pytest.raises(ValueError, match="record: got shape 'tree', want \"auto\""):
        options.tree_shape(8)


@pytest.mark.parametrize(
    ("given", "limit"), [({}, None), ({"off": True}, 0), ({"max_nodes": 3}, 3)]
)
def test_options_of_a_request(given: dict[str, Any], limit: int | None) -> None:
    assert read_request_options({KEY: given}).node_limit == limit
    assert read_request_options({KEY: json.dumps(given)}).node_limit == limit
    assert read_request_options(None).node_limit is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_node": 3}, ["max_node: unknown key, did you mean max_nodes"]),
        ({"max_nodes": -1}, ["max_nodes: got -1", "0"]),
        ({"off": "never mind"}, ["off: got 'never mind'"]),
        (True, ["got True, want an object"]),
    ],
)
def test_bad_options_of_a_request_are_named(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="extra_args") as error:
        read_request_options({KEY: given})
    assert all(word in str(error.value) for word in words)


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


def test_fixed_trees_of_many_nodes_are_wide() -> None:
    tree = {"shape": "tree"}
    assert read_options({KEY: tree}).tree_shape(8) == TreeShape(8, 4, 6)
    assert read_options({KEY: tree}).tree_shape(16) == TreeShape(16, 8, 6)
    assert read_options({KEY: tree | {"top_k": 3}}).tree_shape(16).top_k == 3  # type: ignore[union-attr]
    assert read_options({}).tree_shape(16) == TreeShape(16, 4, 6)
