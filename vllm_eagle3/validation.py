"""Turn pydantic's report into one sentence that names every bad field."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong in the input of `model`, and what it knows."""
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = list(_owner(model, item["loc"]).model_fields)
            problems.append(f"{name}: unknown key{_nearest(item['loc'][-1], known)}")
        elif item["type"] == "missing":
            problems.append(f"{name}: missing")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            problems.append(f"{name}: got {item['input']!r}, {reason}")
    return "; ".join(problems)


def _owner(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The (nested) model that the last name of `loc` was meant for."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type):
            break
        if issubclass(field.annotation, BaseModel):
            model = field.annotation
    return model


def _nearest(name: int | str, known: Sequence[str]) -> str:
    close = get_close_matches(str(name), known, n=2)
    hint = f", did you mean {' or '.join(close)}?" if close else ""
    return f"{hint}{';' if hint else ','} known ones are {', '.join(known)}"
