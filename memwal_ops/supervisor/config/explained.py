"""Explain pydantic's validation errors with line and fix, and drop invalid values so that the rest can be checked."""

from __future__ import annotations

import copy
import difflib
import typing
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from memwal_ops.supervisor.config.document import Document, Place, Problem
from memwal_ops.supervisor.config.model import Config

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_FIXES = {
    "missing": "Add it; docs/configuration.md has an example.",
    "literal_error": "Use one of these.",
    "too_short": "List at least one.",
    "list_type": "Write a list: one line each, beginning with '- '.",
    "dict_type": "Write keys below it, indented by two spaces.",
    "model_type": "Write keys below it, indented by two spaces.",
    "string_type": "Write a string; put it in quotes if it looks like a number.",
    "bool_type": "Write true or false.",
    "bool_parsing": "Write true or false.",
    "int_type": "Write a whole number.",
    "int_parsing": "Write a whole number.",
}


def explained(document: Document, details: Any) -> Problem:
    """Convert one of pydantic's errors to a problem."""
    place: Place = tuple(part for part in details["loc"] if not str(part).startswith("function-"))
    line = document.line(place)
    if details["type"] == "extra_forbidden":
        model = _model_at(place[:-1])
        known = [] if model is None else list(model.model_fields)
        fix = suggest(str(place[-1]), known, "The keys here: {}.")
        if "options" in known:
            fix += " An option of the job goes below options:."
        return Problem(place, line, f"There is no key {place[-1]!r} here.", fix)
    return Problem(
        place, line, _message(details), _FIXES.get(details["type"], "docs/configuration.md explains the key.")
    )


def without_invalid(data: Any, locations: Sequence[tuple[str | int, ...]]) -> tuple[Any, list[Place]]:
    """Return the values without those at pydantic's locations, and the paths of what was removed.

    A table that is invalid as a whole is replaced by a placeholder, so that the others keep their numbers; of other
    lists the whole list is removed.
    """
    places = dict.fromkeys(_existing(data, location) for location in locations)
    if not isinstance(data, dict) or () in places:
        return data, []
    data = copy.deepcopy(data)
    for place in places:
        parent = data
        for part in place[:-1]:
            parent = parent.get(part, {}) if isinstance(parent, dict) else parent[part]
        if place == ("tables",):
            data["tables"] = [{"uri": "/-"}]
        elif isinstance(parent, list):
            parent[int(place[-1])] = {"uri": f"/-/{place[-1]}"}
        else:
            parent.pop(place[-1], None)
    return data, [*places]


def _existing(data: Any, location: Sequence[str | int]) -> Place:
    """Return the longest part of a location that is in the file; of lists other than ``tables``, the list's path."""
    if location[:1] == ("tables",) and not (isinstance(data, dict) and "tables" in data):
        return ("tables",)
    place: Place = ()
    for part in location:
        in_tables = place == ("tables",) and isinstance(data, list) and isinstance(part, int) and part < len(data)
        if not in_tables and not (isinstance(data, dict) and part in data):
            break
        data = data[part]
        place = (*place, part)
    return place


def _message(details: Any) -> str:
    if details["type"] == "value_error":
        text = str(details["ctx"]["error"])
    elif details["type"] == "missing":
        text = "It is missing"
    elif details["type"] in {"model_type", "dict_type"}:
        text = "It must have keys of its own"
    else:
        text = details["msg"].replace("Input should be", "It must be")
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _model_at(place: Place) -> type[BaseModel] | None:
    """Return the model of the keys at a path."""
    current: Any = Config
    for part in place:
        models = _models_in(current)
        if models and isinstance(part, str) and part in models[0].model_fields:
            current = models[0].model_fields[part].annotation
        else:
            arguments = typing.get_args(current)
            current = arguments[-1] if arguments else None
    models = _models_in(current)
    return models[0] if models else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in {list, dict}:
        return []
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


def suggest(word: str, known: Collection[str], otherwise: str) -> str:
    """Return the fix for an unknown word: the closest known one, or ``otherwise`` with all of them."""
    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"Did you mean {close[0]}?"
    return otherwise.format(", ".join(sorted(known))) if known else "Remove it."
