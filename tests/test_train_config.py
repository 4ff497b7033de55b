"""The configuration of a run: defaults, overrides, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_eagle3.train.config import TrainConfig, read_config, validate

ROOT = Path(__file__).parent.parent
LEAST = {"target": "t", "rows": ["r"], "out": "o"}


def config(**changes: object) -> TrainConfig:
    return validate(LEAST | changes, "run.yaml")


def test_defaults_are_the_papers() -> None:
    default = config()
    assert (default.num_steps, default.step_decay, default.taps) == (7, 0.8, "fused")
    assert default.loss.kind == "soft_ce" and default.loss.feature_weight == 0


def test_the_recipe_can_be_read() -> None:
    assert read_config(ROOT / "recipes/smollm2/run2.yaml").target == "smollm2"


def test_overrides_reach_into_groups_and_are_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("target: t\nrows: [r]\nout: o\nloss: {eta: 2}\nepochs: 1\n")
    changed = ["loss.kind=lk_hybrid", "epochs=0.5", "taps=[1, 3]", "warm_start=null"]
    got = read_config(file, changed)
    assert (got.loss.kind, got.loss.eta) == ("lk_hybrid", 2.0)
    assert (got.epochs, got.taps, got.warm_start) == (0.5, (1, 3), None)


@pytest.mark.parametrize("override", ["epochs", "=3", "epochs.x=1"])
def test_malformed_override_is_shown(tmp_path: Path, override: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("target: t\nrows: [r]\nout: o\nepochs: 1\n")
    with pytest.raises(ValueError, match="--set") as caught:
        read_config(file, [override])
    assert override in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rat": 1}, "learning_rat: unknown key, did you mean learning_rate"),
        ({"loss": {"kid": 1}}, "loss.kid: unknown key, did you mean kind"),
        ({"zzz": 1}, "zzz: unknown key, known ones are target"),
        ({"num_steps": "many"}, "num_steps: got 'many'"),
        ({"taps": "middle"}, "taps: got 'middle', want fused, top, none or a list"),
        ({"taps": [1, "2"]}, "taps: got [1, '2']"),
        ({"loss": {"kind": "mse"}}, "loss.kind: got 'mse'"),
        ({"rows": []}, "rows: got []"),
        ({"epochs": 0}, "epochs: got 0"),
        (
            {"loss": {"preset": "reference", "kind": "lk_hybrid"}},
            "`reference` is soft_ce without a feature loss",
        ),
    ],
)
def test_bad_field_is_named_with_its_neighbours(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=r"^run\.yaml: ") as caught:
        config(**changes)
    assert words in str(caught.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, words in (("- a\n", "want keys and values"), ("a: [", "not YAML")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(file)
    with pytest.raises(ValueError, match="no file"):
        read_config(tmp_path / "none.yaml")


def test_taps_by_name_for_every_depth() -> None:
    assert config().tap_ids(32) == (2, 16, 29)
    assert config(taps="top").tap_ids(4) == (4,)
    assert config(taps="none").tap_ids(4) == (0,)
    assert config(taps=[1, 2]).tap_ids(4) == (1, 2)
