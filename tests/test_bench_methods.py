import pytest

from vllm_eagle3.bench.launch import worker_environ
from vllm_eagle3.bench.methods import (
    MAX_CHAIN,
    parse_method,
    parse_methods,
    with_controls,
)
from vllm_eagle3.engine import EngineMode


def test_off_does_not_speculate() -> None:
    method = parse_method("off")
    assert not method.speculates
    assert not method.is_ours


@pytest.mark.parametrize("length", [1, 3, MAX_CHAIN])
def test_chain_is_stock_vllm(length: int) -> None:
    method = parse_method(f"chain:{length}")
    assert method.num_speculative_tokens == length
    assert not method.is_ours
    assert method.options == {}


def test_ours_carries_its_shape() -> None:
    assert parse_method("ours:auto").options == {"shape": "auto"}
    assert parse_method("ours:auto:32").num_speculative_tokens == 32
    chain = parse_method("ours:chain:5")
    assert chain.options == {"shape": "chain"}
    assert chain.num_speculative_tokens == 5


def test_order_is_kept() -> None:
    methods = parse_methods("ours:auto, off")
    assert [m.name for m in methods] == ["ours:auto", "off"]


@pytest.mark.parametrize(
    "name", ["on", "chain", "ours", "ours:fast", "off:1", "tree:4"]
)
def test_unknown_method_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{name}'.*off, chain:K, ours:auto"):
        parse_methods(name)


@pytest.mark.parametrize("length", ["0", str(MAX_CHAIN + 1), "-1", "x", "", "²"])
def test_chain_length_out_of_range(length: str) -> None:
    with pytest.raises(ValueError, match=rf"chain length in 1\.\.{MAX_CHAIN}"):
        parse_methods(f"chain:{length}")


@pytest.mark.parametrize(
    ("name", "stock", "model", "num_tokens"),
    [
        ("ngram", "ngram", None, 3),
        ("ngram:5", "ngram", None, 5),
        ("mtp", "mtp", None, None),
        ("mtp:2", "mtp", None, 2),
        ("draft_model:m", "draft_model", "m", 3),
        ("draft_model:a/b:4", "draft_model", "a/b", 4),
        ("eagle:a:b:7", "eagle", "a:b", 7),
        ("dflash:m", "dflash", "m", None),
    ],
)
def test_other_methods_of_vllm(
    name: str, stock: str, model: str | None, num_tokens: int | None
) -> None:
    method = parse_method(name)
    assert (method.stock, method.model) == (stock, model)
    assert method.num_speculative_tokens == num_tokens
    assert method.speculates and not method.is_ours and not method.uses_head


def test_method_without_its_model() -> None:
    with pytest.raises(ValueError, match="want its model too, as in dflash:FOLDER:3"):
        parse_method("dflash")


def test_controls_that_are_lacking_are_added() -> None:
    def names(text: str, has_head: bool = True) -> list[str]:
        return [m.name for m in with_controls(parse_methods(text), has_head)]

    assert names("ours:auto") == ["off", "chain:1", "chain:3", "ours:auto"]
    assert names("ours:auto,chain:5") == ["off", "ours:auto", "chain:5"]
    assert names("chain:2,off") == ["chain:2", "off"]
    assert names("ngram", has_head=False) == ["off", "ngram"]


def test_no_method() -> None:
    with pytest.raises(ValueError, match="got none"):
        parse_methods(" , ")


def test_repeated_method() -> None:
    with pytest.raises(ValueError, match="off is named twice"):
        parse_methods("off,chain:3,off")


@pytest.mark.parametrize("name", ["off", "chain:3"])
def test_stock_methods_run_with_the_package_off(name: str) -> None:
    environ = worker_environ(parse_method(name), EngineMode(), {})
    assert environ["VLLM_EAGLE3"] == "0"
    assert environ["VLLM_EAGLE3_CPU_FIXES"] == "1"


def test_ours_runs_with_the_package_on_whatever_the_user_had_set() -> None:
    base = {"VLLM_EAGLE3": "0", "VLLM_EAGLE3_CPU_FIXES": "1"}
    environ = worker_environ(parse_method("ours:auto"), EngineMode(), base)
    assert environ["VLLM_EAGLE3"] == "1"
    assert "VLLM_EAGLE3_CPU_FIXES" not in environ


def test_mode_reaches_the_environment() -> None:
    mode = EngineMode(separate_process=True, block_time_ms=5, threads=3, preload=False)
    environ = worker_environ(parse_method("off"), mode, {"LD_PRELOAD": "libx.so"})
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert environ["KMP_BLOCKTIME"] == "5"
    assert environ["OMP_NUM_THREADS"] == "3"
    assert "LD_PRELOAD" not in environ


def test_trees_are_named_by_nodes_and_if_wanted_by_shape() -> None:
    plain, shaped = parse_methods("ours:tree:16,ours:tree:8:2:4")
    assert plain.num_speculative_tokens == 16 and plain.options == {"shape": "tree"}
    assert shaped.options == {"shape": "tree", "top_k": 2, "depth": 4}


@pytest.mark.parametrize(
    "name", ["ours:tree:0", "ours:tree:8:2", "ours:tree:4:2:9", "ours:auto:65"]
)
def test_trees_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse_methods(name)
