import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench_helpers import CONTEXT, fake_options
from vllm_eagle3.bench.plan import make_plan


def test_plan_holds_chat_template_ids(tmp_path: Path) -> None:
    plan = make_plan(fake_options(tmp_path))
    # The template of the fixture is one byte per token and a newline.
    assert [len(ids) for ids in plan.prompt_ids] == [4, 5, 6]


def test_limit(tmp_path: Path) -> None:
    assert len(make_plan(fake_options(tmp_path, limit=2)).prompt_ids) == 2


def test_spread_takes_prompts_from_all_over_a_file(tmp_path: Path) -> None:
    prompts = tmp_path / "sorted.txt"
    prompts.write_text("\n".join("x" * length for length in range(1, 81)))
    plan = make_plan(
        fake_options(tmp_path, prompts=(str(prompts),), limit=4, spread=True)
    )
    # One byte is one token, and the template adds a newline.
    assert [len(ids) - 1 for ids in plan.prompt_ids] == [1, 21, 41, 61]


def test_engine_of_off_has_no_head(tmp_path: Path) -> None:
    plan = make_plan(fake_options(tmp_path, batch="1,4"))
    off, chain = map(plan.engine_spec, plan.methods)
    assert off.head is None
    assert chain.head == plan.options.head
    assert chain.num_speculative_tokens == 2
    assert chain.max_num_seqs == 4


def test_off_alone_needs_no_head(tmp_path: Path) -> None:
    assert make_plan(fake_options(tmp_path, head=None, methods="off")).head is None


def test_settings_are_every_temperature_at_every_batch_size(tmp_path: Path) -> None:
    plan = make_plan(fake_options(tmp_path, batch="1,4", temperature="0,1"))
    found = [(s.temperature, s.batch_size) for s in plan.settings]
    assert found == [(0, 1), (0, 4), (1, 1), (1, 4)]


def test_controls_come_first(tmp_path: Path) -> None:
    plan = make_plan(fake_options(tmp_path, methods="ours:auto", controls=True))
    names = [method.name for method in plan.methods]
    assert names == ["off", "chain:1", "chain:3", "ours:auto"]


def test_another_method_has_a_model_of_its_own(tmp_path: Path) -> None:
    draft = tmp_path / "target"
    options = fake_options(
        tmp_path, head=None, methods=f"off,ngram,draft_model:{draft}:4"
    )
    off, ngram, draft_model = map(
        (plan := make_plan(options)).engine_spec, plan.methods
    )
    assert off.num_speculative_tokens == 0
    assert (ngram.method, ngram.head) == ("ngram", None)
    assert (draft_model.method, draft_model.head) == ("draft_model", str(draft))
    assert draft_model.num_speculative_tokens == 4


def test_kv_cache_holds_the_largest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    options = fake_options(tmp_path, batch="1,64", max_tokens=200)
    config = Path(options.target) / "config.json"
    fields = {"max_position_embeddings": CONTEXT, "num_attention_heads": 32}
    fields |= {"num_hidden_layers": 31, "hidden_size": 4096}
    config.write_text(json.dumps({"model_type": "llama", **fields}))
    plan = make_plan(options)
    # 64 requests of 333 tokens and 512 KiB a token (2 * 32 layers * 4096 * 2 bytes)
    # take 10.4 GiB, beside 1 GiB for whatever else.
    assert plan.kv_cache_gib() == 11
    assert plan.environ(plan.methods[0])["VLLM_CPU_KVCACHE_SPACE"] == "11"


def test_kv_cache_has_room_for_the_scratch_blocks_of_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the embedded target at 64 requests take 1.5 GiB: more than the base."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    options = fake_options(tmp_path, batch="64", methods="ours:auto")
    config = Path(options.target) / "config.json"
    fields = {"max_position_embeddings": CONTEXT, "num_attention_heads": 9}
    fields |= {"num_hidden_layers": 30, "num_key_value_heads": 3, "hidden_size": 576}
    config.write_text(json.dumps({"model_type": "llama", **fields}))
    assert make_plan(options).kv_cache_gib() == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "fast"}, "methods: got 'fast'"),
        ({"methods": "chain:99"}, "methods: got 'chain:99'"),
        ({"head": None}, "head: got none, want one for chain:2"),
        ({"methods": "eagle:/nowhere:2"}, "/nowhere has no config.json"),
        ({"head": "/nowhere"}, "head: /nowhere does not exist"),
        ({"target": "/nowhere"}, "target: /nowhere does not exist"),
        ({"prompts": ("/nowhere.jsonl",)}, "cannot read /nowhere.jsonl"),
        ({"prompts": ()}, "prompts: got no files"),
        ({"limit": 0}, "limit: got 0"),
        ({"batch": "0"}, "batch: got '0'"),
        ({"batch": "1,x"}, "batch: got '1,x'"),
        ({"temperature": "-0.5"}, "temperature: got '-0.5'"),
        ({"temperature": "nan"}, "temperature: got 'nan'"),
        ({"temperature": "0,2.5"}, "temperature: got '0,2.5'"),
        ({"temperature": ""}, "temperature: got ''"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"warm_up": -1}, "warm_up: got -1"),
        ({"waves": 0}, "waves: got 0"),
        ({"stagger": True}, "stagger: got it with waves 1"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"max_model_len": CONTEXT + 1}, "max_model_len: got 257, want at most 256"),
        ({"max_tokens": CONTEXT}, r"prompts\.txt:1: 4 tokens and 256 new ones"),
    ],
)
def test_bad_option(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(fake_options(tmp_path, **changes))


def test_out_that_is_a_file(tmp_path: Path) -> None:
    options = fake_options(tmp_path, out=tmp_path / "prompts.txt" / "out")
    with pytest.raises(ValueError, match="out: cannot write to"):
        make_plan(options)


def test_target_without_tokenizer(tmp_path: Path) -> None:
    options = fake_options(tmp_path)
    for file in Path(options.target).glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="target: no tokenizer can be read"):
        make_plan(options)


def test_target_with_broken_config(tmp_path: Path) -> None:
    options = fake_options(tmp_path)
    (Path(options.target) / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"target: .*config\.json"):
        make_plan(options)


def test_nothing_is_left_in_the_output_folder(tmp_path: Path) -> None:
    options = fake_options(tmp_path)
    make_plan(options)
    assert list(options.out.iterdir()) == []
