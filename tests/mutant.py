"""Mutants: a shipped function with one expression of its module written another way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Edit:
    """A mutant: one expression of a module, written another way."""

    name: str
    old: str
    new: str

    def of(self, module: ModuleType, function: str) -> Callable[..., Any]:
        source = inspect.getsource(module)
        assert source.count(self.old) == 1, f"mutant {self.name!r} no longer applies"
        namespace = {"__name__": module.__name__, "__package__": module.__package__}
        exec(source.replace(self.old, self.new), namespace)
        return namespace[function]
