"""A request with a grammar drafts chains; its neighbours keep their trees."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.models.random_llama import known_prompts
from tests.tree_engine import judged_steps, tree_settings
from vllm_eagle3.tree_runs import num_branches

pytestmark = pytest.mark.engine

PATTERN = r"(ab|cd){6}[0-9]{12}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def handle(engine: Any) -> Any:
    return engine(
        "f1",
        "h1",
        skip_tokenizer_init=False,
        structured_outputs_config={
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
        **tree_settings(4, 6, 16),
    )


def _params(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 40} | settings)


def test_grammars_are_kept_beside_trees(handle: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    plain = _params(ignore_eos=True)
    prompts = known_prompts()[:4]
    alone = handle.run(prompts, plain)
    grammars = [
        StructuredOutputsParams(regex=PATTERN),
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=PATTERN),
    ]
    structured = [
        _params(structured_outputs=grammar, temperature=t, seed=3)
        for grammar, t in zip(grammars, (0, 1.0, 1.0), strict=True)
    ]
    with judged_steps(handle) as steps:
        outputs = handle.llm.generate(
            [{"prompt_token_ids": p} for p in [*prompts, *prompts[:3]]],
            [plain] * 4 + structured,
            use_tqdm=False,
        )
    replies = [list(output.outputs[0].token_ids) for output in outputs]
    assert replies[:4] == alone.token_ids
    texts = [output.outputs[0].text for output in outputs[4:]]
    assert re.fullmatch(PATTERN, texts[0])
    assert re.fullmatch(r'\{"a": ?"[xy]", ?"b": ?(true|false)\}', texts[1])
    assert re.fullmatch(PATTERN, texts[2])

    with_branches = {
        step.req_id for step in steps if num_branches(np.array(step.parents))
    }
    neighbours = {output.request_id for output in outputs[:4]}
    assert {r.split("-")[0] for r in with_branches} == neighbours
