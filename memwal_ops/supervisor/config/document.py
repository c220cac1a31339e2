"""Read a YAML file into values with the line of each, and explain what pydantic refuses by line and fix.

``${VARIABLE}`` is substituted from the environment. Invalid values are dropped, so that the rest can be checked.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel
from yaml.composer import Composer

from memwal_ops.storage.options import remember
from memwal_ops.supervisor.config.model import Config

Place = tuple[str | int, ...]
_VARIABLE = re.compile(
    r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\{(?P<invalid>[^}]*)\}?)"
)
_Fast: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\ud800-\\udfff]")
_MAX_VALUES = 100_000
_BOOLEANS = {"true": True, "false": False}
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault in a file: where it is, why, and how to fix it. ``place`` is the path of a value."""

    place: Place
    line: int | None
    message: str
    fix: str

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``problems``."""
        return {"where": place_text(self.place), "line": self.line, "message": self.message, "fix": self.fix}


@dataclass(slots=True)
class Document:
    """A parsed file.

    Attributes:
        path: the file, for messages.
        data: plain values.
        lines: the line of each value, by its path; of a mapping's entry, that of its key.
        variables: the environment variables that were substituted in a value, by its path.
        problems: what is wrong with the file.
    """

    path: str
    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    variables: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, place: Place) -> int | None:
        """Return the line of a value, or of the nearest enclosing one that is in the file."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)

    def add(self, place: Place, message: str, fix: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(place, self.line(place), message, fix))


def place_text(place: Place) -> str:
    """Return a path as text, such as ``tables[0].jobs.merge.when``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(path: str, environ: Mapping[str, str] | None = None) -> Document:
    """Read a file. Its faults are in ``problems``; ``data`` is what could be read."""
    document = Document(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        document.problems.append(
            Problem(
                (),
                None,
                f"The file cannot be read: {error.strerror}.",
                "Check its name (--config FILE, or $MEMWAL_OPS_CONFIG) and its permissions.",
            )
        )
        return document
    if len(raw) > _MAX_BYTES:
        fix = "Give the path of the configuration file; this is a different file."
        document.problems.append(Problem((), None, "The file is larger than 4 MiB.", fix))
        return document
    _parse(document, raw, os.environ if environ is None else environ)
    return document


def _parse(document: Document, raw: bytes, environ: Mapping[str, str]) -> None:
    try:
        loader = _Loader(raw)
        node = loader.get_single_node()
        if node is None:
            document.problems.append(Problem((), 1, "The file is empty.", "Start from configs/one-table.yaml."))
            return
        document.data = _Builder(document, loader, environ).build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        document.problems.append(
            Problem(
                (),
                line,
                f"The file is not valid YAML: {message}.",
                "Check the indentation, the colons and the quotes here.",
            )
        )
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "Save it as plain text in UTF-8."
        document.problems.append(Problem((), None, f"The file is not valid YAML: {message}.", fix))


class _Loader(Composer, _Fast):  # type: ignore[misc]  # one of two classes
    """Reads with libyaml, where PyYAML has it. It composes in Python, as libyaml's recursion overflows the stack."""

    def __init__(self, raw: bytes) -> None:
        Composer.__init__(self)
        _Fast.__init__(self, raw)


class _Builder:
    """Builds values from nodes, and records their lines. Only YAML's plain types are built, whatever the tags."""

    def __init__(self, document: Document, loader: _Loader, environ: Mapping[str, str]) -> None:
        self._document = document
        self._loader = loader
        self._environ = environ
        self._building: set[int] = set()
        self._count = 0

    def build(self, node: yaml.Node, place: Place) -> Any:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise ValueError("it has more than 100,000 values")
        if id(node) in self._building:
            raise ValueError(f"an alias in line {node.start_mark.line + 1} contains itself")
        self._document.lines.setdefault(place, node.start_mark.line + 1)
        self._building.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, place)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*place, number)) for number, item in enumerate(node.value)]
            return self._scalar(node, place)
        finally:
            self._building.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        merged = any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value)
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value in node.value:
            key = str(self._loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            if key in result and not merged:
                first = self._document.lines[(*place, key)]
                self._document.problems.append(
                    Problem((*place, key), line, f"{key!r} is given twice.", f"Remove it here or in line {first}.")
                )
            self._document.lines[(*place, key)] = line
            result[key] = self.build(value, (*place, key))
        return result

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        value = self._loader.construct_object(node, deep=True)
        if not isinstance(value, str):
            return value
        text = self._substituted(value, place)
        # ``enabled: ${X}`` is a boolean where X is one: the environment has texts alone.
        return _BOOLEANS.get(text, text) if text != value else text

    def _substituted(self, text: str, place: Place) -> str:
        # A default in the file does not come from the environment, and is not secret.
        used: list[str] = []

        def substitute(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            name = match["name"]
            if name is None:
                fix = "Write ${NAME} or ${NAME:-default}."
                self._document.add(place, f"{match[0]!r} is not a valid variable reference.", fix)
                return ""
            if match["default"] is not None and not self._environ.get(name):
                return match["default"]
            used.append(name)
            if name not in self._environ:
                self._document.add(
                    place,
                    f"The environment variable {name} is not set.",
                    f"Set it for the service (systemd: EnvironmentFile=), or write ${{{name}:-default}}.",
                )
                return ""
            return self._environ[name]

        result = _VARIABLE.sub(substitute, text)
        if _UNPRINTABLE.search(result):
            fix = "Remove it; no name, path or option may contain one."
            self._document.add(place, "The value contains an invisible character.", fix)
        if used:
            self._document.variables[place] = tuple(used)
            remember([self._environ.get(name) for name in used])
        return result


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
