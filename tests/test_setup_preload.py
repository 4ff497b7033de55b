"""LD_PRELOAD: what is put in, in which order, and that a command restarts once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_eagle3.preload import Library, child_environment, has_cpu_vllm, ld_preload

MALLOC = Library("libtcmalloc", "/lib/libtcmalloc.so", "")
OPENMP = Library("libiomp5", "/lib/libiomp5.so", "")

needs_openmp = pytest.mark.skipif(
    not has_cpu_vllm() or "libiomp5" not in child_environment({}).get("LD_PRELOAD", ""),
    reason="needs a CPU build of vLLM and intel-openmp",
)


def test_found_libraries_come_before_what_is_set():
    value = ld_preload([MALLOC, OPENMP], {"LD_PRELOAD": "/lib/other.so"})

    assert value == "/lib/libtcmalloc.so:/lib/libiomp5.so:/lib/other.so"


def test_absent_libraries_are_left_out():
    assert ld_preload([Library("libtcmalloc", None, ""), OPENMP], {}) == OPENMP.path


def test_nothing_is_added_twice():
    once = ld_preload([MALLOC, OPENMP], {})

    assert ld_preload([MALLOC, OPENMP], {"LD_PRELOAD": once}) == once


@pytest.mark.parametrize("other", ["/lib/libgomp.so.1", "/lib/libomp.so"])
def test_a_second_openmp_runtime_is_never_added(other):
    assert ld_preload([OPENMP], {"LD_PRELOAD": other}) == other


@needs_openmp
def test_a_command_restarts_once_with_its_arguments():
    code = (
        "import os, sys; from vllm_eagle3 import preload; print('started');"
        "preload.restart_with_preload();"
        "maps = open('/proc/self/maps').read();"
        "print('libiomp5' in maps, sys.argv[1:])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}

    done = subprocess.run(
        [sys.executable, "-c", code, "--option", "a b"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )

    lines = done.stdout.splitlines()
    assert lines == ["started", "started", "True ['--option', 'a b']"]


def test_a_wrapper_that_drops_the_variable_does_not_loop():
    code = "from vllm_eagle3 import preload; preload.restart_with_preload(); print(1)"
    environment = os.environ | {"VLLM_EAGLE3_PRELOADED": "1"}
    environment.pop("LD_PRELOAD", None)

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )

    assert done.stdout == "1\n"
