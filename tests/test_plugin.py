"""The plugin: harmless at import, gated, and safe in a vLLM it does not know."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_eagle3.integration.patches import PATCHES

Models = Callable[[str], Path]


def run_python(code: str, **environment: str) -> dict[str, Any]:
    """Run `code` in a fresh process; it prints one JSON object as its last line."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    result["log"] = done.stdout + done.stderr
    return result


REGISTER = """
    import json, sys, torch
    opened = []
    # At import urllib3 asks in this way whether there is IPv6, and closes at once.
    asked_for_ipv6 = ("::1", 0)
    sys.addaudithook(
        lambda event, args: event in ("socket.bind", "socket.connect")
        and args[1] != asked_for_ipv6
        and opened.append(event)
    )
    from vllm_eagle3.integration import plugin
    plugin.register(); first = plugin.status()
    plugin.register(); second = plugin.status()
    print(json.dumps({
        "status": [list(s) for s in first],
        "idempotent": first == second,
        "cuda": torch.cuda.is_initialized(),
        "sockets": opened,
    }))
"""


def test_registers_once_and_touches_no_device_and_no_port() -> None:
    found = run_python(REGISTER)
    assert found["sockets"] == []
    assert found["idempotent"] and not found["cuda"]
    state = {name: active for name, active, _ in found["status"]}
    assert state.pop("engine hooks") is True
    assert any(state.values())


def test_switch_turns_everything_off() -> None:
    found = run_python(REGISTER, VLLM_EAGLE3="0")
    assert found["status"] == [["vllm_eagle3", False, "switched off by VLLM_EAGLE3=0"]]


def test_baselines_get_only_their_cpu_fixes() -> None:
    found = run_python(REGISTER, VLLM_EAGLE3="0", VLLM_EAGLE3_CPU_FIXES="1")
    state = {name: active for name, active, _ in found["status"]}
    assert state.pop("vllm_eagle3") is False
    assert state == {patch.name: True for patch in PATCHES if patch.for_baselines}


def test_never_raises() -> None:
    found = run_python(
        """
        import json
        from vllm_eagle3.integration import fingerprints, plugin
        def broken(*_): raise RuntimeError("no such file")
        fingerprints.check = broken
        plugin.register()
        print(json.dumps({"status": [list(s) for s in plugin.status()]}))
        """
    )
    ((name, active, reason),) = found["status"]
    assert (name, active) == ("vllm_eagle3", False) and "no such file" in reason


SECOND_COPY = """
    import json, sys
    from vllm.config import VllmConfig
    from vllm_eagle3.integration import plugin
    plugin.register()
    hook = VllmConfig._get_v2_model_runner_unsupported_features
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm_eagle3"]:
        del sys.modules[name]
    sys.path.insert(0, {folder!r})
    from vllm_eagle3.integration import plugin as second
    assert second is not plugin
    second.register()
    print(json.dumps({{
        "first": [list(s) for s in plugin.status()],
        "second": [list(s) for s in second.status()],
        "same hook": VllmConfig._get_v2_model_runner_unsupported_features is hook,
    }}))
"""


def test_a_second_copy_of_another_version_stays_out(tmp_path: Path) -> None:
    import vllm_eagle3

    package = Path(vllm_eagle3.__file__).parent
    ignored = shutil.ignore_patterns("heads", "__pycache__")
    copy = shutil.copytree(package, tmp_path / "vllm_eagle3", ignore=ignored)
    (copy / "__init__.py").write_text('__version__ = "9.9.9"\n')
    found = run_python(SECOND_COPY.format(folder=str(tmp_path)))
    assert found["same hook"] and found["first"][0][:2] == ["engine hooks", True]
    ((name, active, reason),) = found["second"]
    assert (name, active) == ("vllm_eagle3", False)
    assert f"hooked by version {vllm_eagle3.__version__}" in reason
    assert "this is 9.9.9" in reason and "start a new process" in reason
    assert "vllm_eagle3 stays out of this process" in found["log"]


GENERATE = """
    import json
    from tests.engine_run import llm_settings, run
    from vllm_eagle3.integration import fingerprints
    if {mismatch}:
        real = fingerprints.check
        fingerprints.check = lambda: [
            fingerprints.Mismatch("vllm.a:b", "has changed", "0.32.0")
        ]
    from vllm import LLM, SamplingParams
    llm = LLM(**llm_settings(
        {target!r}, {head!r}, num_speculative_tokens=8, additional_config={{}}
    ))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    result = run(llm, [list(range(20, 40))], params)
    config = llm.llm_engine.vllm_config
    print(json.dumps({{
        "worker": config.parallel_config.worker_cls,
        "length": config.speculative_config.num_speculative_tokens,
        "drafted": result.drafted,
        "tokens": result.token_ids[0],
        "v2": config._get_v2_model_runner_unsupported_features(),
    }}))
"""


@pytest.fixture(scope="module")
def runs(models: Models) -> dict[bool, dict[str, Any]]:
    paths = {"target": str(models("f1")), "head": str(models("h1"))}
    return {
        mismatch: run_python(GENERATE.format(mismatch=mismatch, **paths))
        for mismatch in (False, True)
    }


@pytest.mark.engine
def test_known_vllm_runs_our_worker_on_the_v1_runner(
    runs: dict[bool, dict[str, Any]],
) -> None:
    ours = runs[False]
    assert ours["worker"].startswith("vllm_eagle3.")
    assert ours["drafted"] > 0 and ours["length"] == 8
    assert ours["log"].count("vllm_eagle3 drives this engine: shape auto") == 1
    assert "vllm_eagle3 drafting" in ours["v2"]


@pytest.mark.engine
def test_unknown_vllm_keeps_its_own_short_chain_and_says_so(
    runs: dict[bool, dict[str, Any]],
) -> None:
    stock = runs[True]
    assert stock["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert stock["length"] == 5 and stock["drafted"] > 0
    assert stock["log"].count("leaves this engine to vLLM's own chain of 5") == 1
    assert "vllm.a:b has changed" in stock["log"]
    assert stock["tokens"] == runs[False]["tokens"]
    assert stock["v2"] == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"additional_config": {"vllm_eagle3": {"shpe": "x"}}}, "shpe: unknown key"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens: got 65, want 1"),
        ({"target": "f2"}, "vocab_size"),
    ],
    ids=["option", "budget", "head of another target"],
)
def test_bad_start_is_refused_with_the_field(
    models: Models, settings: dict[str, Any], message: str
) -> None:
    from vllm import LLM

    from tests.engine_run import llm_settings

    target = models(settings.pop("target", "f1"))
    with pytest.raises(ValueError, match=message):
        LLM(**llm_settings(str(target), str(models("h1")), **settings))
