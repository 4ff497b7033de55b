"""The embedded target against an independent path: transformers' own GGUF reader."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from vllm_eagle3 import embedded
from vllm_eagle3.wheel_asset import fetch

transformers = pytest.importorskip("transformers")

TEXTS = [
    "The capital of France is",
    "Steps:\n  1. Take 12345 apples\n\n\t22. Add 3.14 pears",
    "def add(a, b):\n    return a + b  # naïve façade 😀",
]
CHAT = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices gain nothing from threads, and lose where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ours():
    path = embedded.target_path("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return SimpleNamespace(model=model.eval(), tokenizer=tokenizer, path=path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same file through transformers; bf16 rounding is part of the contract."""
    folder = tmp_path_factory.mktemp("reference")
    asset = embedded._ASSETS["smollm2"]
    file = fetch(asset, folder)
    load = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **load
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **load)
    return SimpleNamespace(model=model.eval(), tokenizer=tokenizer)


def chat_ids(tokenizer) -> list[int]:
    return tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=True
    )["input_ids"]


def test_every_weight_equals_the_reference(ours, reference):
    expected, got = reference.model.state_dict(), ours.model.state_dict()

    assert got.keys() == expected.keys()
    different = [k for k, v in expected.items() if not torch.equal(v, got[k])]
    assert different == []


@pytest.mark.parametrize("text", TEXTS)
def test_logits_and_greedy_tokens_equal_the_reference(ours, reference, text):
    ids = torch.tensor([ours.tokenizer(text).input_ids])  # [1, num_tokens]

    with torch.no_grad():
        torch.testing.assert_close(
            ours.model(ids).logits, reference.model(ids).logits, atol=1e-3, rtol=1e-4
        )
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
        got = ours.model.generate(ids, **options)
        assert torch.equal(got, reference.model.generate(ids, **options))


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_the_reference_with_digits_split(ours, reference, text):
    from tokenizers import pre_tokenizers

    backend = reference.tokenizer.backend_tokenizer
    plain = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    expected = reference.tokenizer(text).input_ids
    backend.pre_tokenizer = plain

    assert ours.tokenizer(text).input_ids == expected
    assert ours.tokenizer.decode(expected) == text


def test_the_repair_of_the_pre_tokenizer_matters(ours, reference):
    numbered = "Steps:\n  1. one"

    unrepaired = reference.tokenizer(numbered).input_ids

    assert ours.tokenizer(numbered).input_ids != unrepaired


def test_each_digit_is_one_token(ours):
    tokens = ours.tokenizer.tokenize("12345")

    assert tokens == ["1", "2", "3", "4", "5"]


def test_chat_template_gives_the_prompt_of_training(ours, reference):
    ids = chat_ids(ours.tokenizer)

    assert ours.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ours.tokenizer.chat_template == reference.tokenizer.chat_template


def test_generation_stops_at_the_end_mark(ours):
    config = transformers.GenerationConfig.from_pretrained(ours.path)

    assert config.eos_token_id == ours.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert config.bos_token_id == ours.tokenizer.bos_token_id == 1


def test_config_says_what_the_model_is(ours):
    config = ours.model.config

    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings
    assert getattr(config, "quantization_config", None) is None


def test_files_can_be_read_by_other_users(ours):
    modes = {oct(p.stat().st_mode & 0o777) for p in ours.path.iterdir()}

    assert modes == {"0o644"}


def test_the_name_wins_over_a_path(ours):
    assert embedded.resolve_target("smollm2") == ours.path


def test_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert embedded.cache_path("smollm2") == tmp_path / "vllm_eagle3" / "smollm2"


def test_unknown_embedded_name_lists_the_known():
    with pytest.raises(ValueError, match=r"got 'smollm9', want one of smollm2"):
        embedded.target_path("smollm9")


@pytest.mark.parametrize("resolve", [embedded.resolve_target, embedded.resolve_head])
def test_missing_path_is_named_with_the_remedy(resolve, tmp_path):
    absent = tmp_path / "nowhere"

    with pytest.raises(ValueError, match=r"nowhere does not exist; give a .*smollm2"):
        resolve(absent)


@pytest.mark.parametrize("resolve", [embedded.resolve_target, embedded.resolve_head])
def test_a_folder_without_a_model_is_refused(resolve, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve(tmp_path)


def test_serve_line_can_be_pasted():
    import shlex
    from pathlib import Path

    line = embedded.serve_line(Path("/a b/target"), Path("/head"))

    words = shlex.split(line)
    assert words[words.index("serve") + 1] == "/a b/target"
    assert '"model": "/head"' in words[-1]


def test_second_use_is_cheap(ours, monkeypatch):
    def refuse(*args):
        raise AssertionError("downloaded again")

    monkeypatch.setattr(embedded, "fetch", refuse)
    assert os.path.samefile(embedded.target_path("smollm2"), ours.path)
