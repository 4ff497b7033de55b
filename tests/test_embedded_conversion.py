"""GGUF conversion on small, hand-made input."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle3 import gguf_to_hf

gguf = pytest.importorskip("gguf")


def write_gguf(path, architecture: str, pre_tokenizer: str = "smollm"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rotary_rows_go_from_pairs_to_halves():
    # two heads of four rows: a0 b0 a1 b1 -> a0 a1 b0 b1, each head by itself
    interleaved = np.array([[1], [2], [3], [4], [5], [6], [7], [8]])

    halves = gguf_to_hf.unpermute_rope_rows(interleaved, num_heads=2)

    assert halves.ravel().tolist() == [1, 3, 2, 4, 5, 7, 6, 8]


def test_other_architectures_are_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "qwen2")

    with pytest.raises(ValueError, match=r"architecture: got 'qwen2', want 'llama'"):
        gguf_to_hf.convert(file, tmp_path)


def test_other_pre_tokenizers_are_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "llama", "tekken")

    with pytest.raises(ValueError, match="tekken"):
        gguf_to_hf.read_tokenizer(gguf.GGUFReader(file))


def test_missing_metadata_is_named(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "llama")

    with pytest.raises(ValueError, match=r"llama\.\S+ is missing"):
        gguf_to_hf.convert(file, tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"not a model" * 10)

    with pytest.raises(ValueError, match="not a readable GGUF"):
        gguf_to_hf.convert(file, tmp_path)
