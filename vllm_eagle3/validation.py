"""Turn pydantic's report into one sentence that names every bad field."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong in the input of `model`, and what it knows."""
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            problems.append(f"{name}: unknown key, known ones are {known}")
        elif item["type"] == "missing":
            problems.append(f"{name}: missing")
        else:
            problems.append(f"{name}: got {item['input']!r}, {item['msg']}")
    return "; ".join(problems)
