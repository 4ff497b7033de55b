"""What the programs behind the three layouts can run of a head.

Our writer puts every switch into config.json in any layout, and vLLM reads them there.
The programs that the other layouts belong to ignore keys that they do not know, so a
head converted for them would run, and draft badly. Such a conversion is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .draft_head import DraftHeadConfig
from .head_config import text_config
from .head_layouts import SWITCHES, Layout

# Layout -> switches that its program knows (EAGLE cb7e084, SpecForge 0.2 with its fix
# of norm_output, speculators 0.9).
_KNOWN_SWITCHES: dict[Layout, tuple[str, ...]] = {
    "safeailab": (),
    "specforge": ("fc_norm", "norm_output"),
    "speculators": SWITCHES,
}


def require_expressible(
    head: DraftHeadConfig, layout: Layout, target_config: Mapping[str, Any] | None
) -> None:
    """Refuse a head that the layout's own program would run as another head.

    Args:
        target_config: the target's config.json, where known; without it the tap ids
            of a SafeAILab head, which are a rule there, are taken as they are.

    Raises:
        ValueError: every field that the layout has no word for.
    """
    problems = _unknown_fields(head, layout)
    if layout == "safeailab":
        problems += _not_by_the_rule(head, target_config)
    if problems:
        raise ValueError(
            f"layout: {layout} cannot express {'; '.join(problems)}. "
            + (
                "Choose --to speculators"
                if layout != "speculators"
                else "Serve the head as it is"
            )
        )


def _unknown_fields(head: DraftHeadConfig, layout: Layout) -> list[str]:
    plain: dict[str, Any] = {
        name: False for name in SWITCHES if name not in _KNOWN_SWITCHES[layout]
    }
    plain["logit_scale"] = 1.0
    if layout != "speculators":
        plain |= {"num_hidden_layers": 1, "attention_bias": False}
    return [
        f"{name} {getattr(head, name)} (only {value})"
        for name, value in plain.items()
        if getattr(head, name) != value
    ]


def _not_by_the_rule(
    head: DraftHeadConfig, target_config: Mapping[str, Any] | None
) -> list[str]:
    """What SafeAILab's code computes by itself, where the head differs."""
    problems = []
    if head.head_dim * head.num_attention_heads != head.hidden_size:
        problems.append(
            f"head_dim {head.head_dim} (only hidden_size / num_attention_heads)"
        )
    if (kind := head.rope_parameters.get("rope_type", "default")) not in (
        "default",
        "linear",
    ):
        problems.append(f"rope_type {kind!r} (only 'default' and 'linear')")
    layers = target_config and text_config(target_config).get("num_hidden_layers")
    if layers and head.tap_ids != (rule := (2, layers // 2, layers - 3)):
        problems.append(f"taps {list(head.tap_ids)} (only {list(rule)}, by its rule)")
    return problems
