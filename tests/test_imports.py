"""The direction of imports: core below train, bench and integration, cli on top."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_eagle3

PACKAGE = "vllm_eagle3"
ROOT = Path(vllm_eagle3.__file__).parent

# Core modules, lowest first; a tier may import itself and those below it.
TIERS = (
    ("vocab", "taps", "tree", "kernels"),
    ("draft_head", "head_", "tree_attention", "verify", "kv_cache", "acceptance"),
    ("rejection", "drafter", "config", "step_cost", "acceptance_model"),
    ("sampled_drafter", "budget"),
    ("recording",),
    ("simulate", "simulate_command"),
    ("plain", "decode"),
    ("reliability",),
)
# Part of the package -> parts it must not know.
FORBIDDEN = {
    "core": {"train", "bench", "evaluation", "soak", "cli", "integration"},
    "train": {"bench", "evaluation", "soak", "cli", "integration"},
    "bench": {"train", "evaluation", "soak", "cli", "integration"},
    "evaluation": {"soak", "cli", "integration"},
    "soak": {"train", "evaluation", "cli", "integration"},
    "integration": {"train", "bench", "evaluation", "soak", "cli"},
    "cli": set[str](),
    "__main__": set[str](),
}


def module_name(file: Path) -> str:
    parts = [PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """Everything a module imports, wherever in it, as absolute dotted names."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.add(origin)
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


FILES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}
IMPORTS = {
    name: imports_of(file.read_text("utf-8"), name, file.name == "__init__.py")
    for name, file in FILES.items()
}


def part_of(module: str) -> str:
    """train, bench, evaluation, soak, integration, cli, or core (all the rest)."""
    first = [*module.split("."), ""][1]
    part = "cli" if first.startswith("cli_") else first
    return part if part in FORBIDDEN else "core"


def tier_of(module: str) -> int | None:
    names = module.split(".")
    for tier, members in enumerate(TIERS):
        for member in members:
            if len(names) > 1 and (
                names[1] == member
                or (member.endswith("_") and names[1].startswith(member))
            ):
                return tier
    return None


def own_imports(module: str) -> set[str]:
    """Modules of this package that `module` imports."""
    return (IMPORTS[module] & set(FILES)) - {module, PACKAGE}


@pytest.mark.parametrize("module", FILES)
def test_vllm_is_behind_one_door(module: str) -> None:
    uses_vllm = {n for n in IMPORTS[module] if n.split(".")[0] == "vllm"}
    assert part_of(module) == "integration" or not uses_vllm


@pytest.mark.parametrize("module", FILES)
def test_parts_know_only_what_they_may(module: str) -> None:
    known = {part_of(imported) for imported in own_imports(module)}
    assert not known & FORBIDDEN[part_of(module)]


@pytest.mark.parametrize("module", [m for m in FILES if tier_of(m) is not None])
def test_core_imports_downwards(module: str) -> None:
    tier = tier_of(module)
    assert tier is not None
    above = {i for i in own_imports(module) if (tier_of(i) or 0) > tier}
    assert not above


def test_no_cycles() -> None:
    try:
        TopologicalSorter({m: own_imports(m) for m in FILES}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {error.args[1]}")


def test_kernels_need_torch_and_triton_only() -> None:
    kernels = f"{PACKAGE}.kernels"
    for module in FILES:
        if module == kernels or module.startswith(f"{kernels}."):
            outside = {i for i in own_imports(module) if not i.startswith(kernels)}
            assert not outside


def test_everything_else_imports_without_vllm() -> None:
    modules = [m for m in FILES if part_of(m) != "integration"]
    program = (
        "import importlib, sys\n"
        "sys.modules['vllm'] = None\n"
        f"for name in {modules!r}:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_reader_of_imports_misses_none() -> None:
    source = (
        "import a.b\n"
        "def f():\n"
        "    from vllm.config import VllmConfig\n"
        "    from ..taps import check_tap_ids\n"
        "    from . import data\n"
    )
    assert imports_of(source, "vllm_eagle3.train.x") == {
        "a.b",
        "vllm.config",
        "vllm.config.VllmConfig",
        "vllm_eagle3.taps",
        "vllm_eagle3.taps.check_tap_ids",
        "vllm_eagle3.train",
        "vllm_eagle3.train.data",
    }
