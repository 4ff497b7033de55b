"""Whatever users hand in is taken or refused by name; nothing else ever happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_eagle3.config import KEY, MAX_SPECULATIVE_TOKENS, read_options
from vllm_eagle3.head_io import read_head

Models = Callable[[str], Path]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "shape": st.sampled_from(["auto", "chain", "tree", "off"]) | JSON,
        "top_k": st.integers(-2, 40) | JSON,
        "depth": st.integers(-2, 20) | JSON,
        "other": JSON,
    },
)


@given(additional=JSON | st.fixed_dictionaries({KEY: OPTIONS | JSON}))
@settings(max_examples=300, deadline=None)
@example(additional={KEY: {"shape": "tree", "top_k": 0}})
@example(additional={KEY: {"depth": 17}})
def test_options_are_taken_or_refused_by_name(additional: Any) -> None:
    if not isinstance(additional, dict):
        return  # vLLM takes objects only
    try:
        options = read_options(additional)
    except ValueError as error:
        assert KEY in str(error)
        return
    given_options = additional.get(KEY, {})
    assert set(given_options) <= set(type(options).model_fields)


@given(options=OPTIONS, budget=st.integers(-3, 70))
@settings(max_examples=300, deadline=None)
def test_a_shape_keeps_to_its_budget_or_is_refused(
    options: dict[str, Any], budget: int
) -> None:
    try:
        shape = read_options({KEY: options}).tree_shape(budget)
    except ValueError as error:
        assert any(name in str(error) for name in (KEY, "depth", "num_speculative"))
        return
    assert 1 <= budget <= MAX_SPECULATIVE_TOKENS
    if shape is not None:
        assert 1 <= shape.num_nodes <= budget
        assert 1 <= shape.depth <= budget


@pytest.fixture(scope="module")
def spoilt(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """spoilt(config=..., weights=...) -> H2's folder with those files changed."""
    folder = tmp_path_factory.mktemp("fuzz") / "head"
    shutil.copytree(models("h2"), folder)
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()

    def spoil(changes: dict[str, Any], cut: int, flips: list[tuple[int, int]]) -> Path:
        (folder / "config.json").write_text(json.dumps(config | changes))
        changed = bytearray(weights[: len(weights) - cut])
        for place, value in flips:
            changed[place % len(changed)] = value
        (folder / "model.safetensors").write_bytes(changed)
        return folder

    return spoil, sorted(config)


@given(
    data=st.data(),
    cut=st.sampled_from([0, 0, 0, 1, 500]),
    # The header: names, shapes and offsets of the tensors.
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=2),
)
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_head_s_files_are_read_or_refused(
    spoilt: Any, models: Models, data: Any, cut: int, flips: list[tuple[int, int]]
) -> None:
    spoil, fields = spoilt
    changes = data.draw(
        st.dictionaries(st.sampled_from(fields), JSON | st.integers(-1, 4), max_size=2)
    )
    folder = spoil(changes, cut, flips)
    try:
        loaded = read_head(folder, models("f2"))
    except ValueError:
        return
    # What is taken can be used.
    assert sum(weight.numel() for weight in loaded.head.parameters()) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("draft_vocab_size", -1), ("architectures", 1), ("rms_norm_eps", [1])],
)
def test_wrong_types_of_a_head_s_fields_are_named(
    spoilt: Any, models: Models, field: str, value: Any
) -> None:
    """Found by the test above."""
    spoil, _ = spoilt
    with pytest.raises(ValueError, match=f"{field}: got"):
        read_head(spoil({field: value}, 0, []), models("f2"))
