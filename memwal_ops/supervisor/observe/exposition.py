"""Write counters and gauges in Prometheus' text format.

A service has some 140 series for each table, and the text is generated at each scrape. ``generate_latest`` of the
client library makes an object of each series, and validates its label names again: with a thousand tables that takes
a second of processor time, and this less than a third of it. The text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name.

    Attributes:
        name: as it is exposed: that of a counter ends with ``_total``.
        kind: ``counter`` or ``gauge``.
        help: one sentence.
        labels: the names of the labels.
        rows: of each series the values of its labels, in the order of ``labels``, and its value; read once.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: Iterable[tuple[tuple[str, ...], float]]


def exposition(parts: Iterable[Iterable[Family] | str]) -> str:
    """Return families as text, with text of the same format between them.

    Unprintable characters (a label may be a folder's name) are escaped.
    """
    values, numbers = _Values(), _Numbers()
    sets: dict[tuple[str, ...], _LabelSets] = {}
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines += [f"{_safe(line)}\n" for line in part.split("\n") if line]
            continue
        for family in part:
            if family.labels not in sets:
                sets[family.labels] = _LabelSets(family.labels, values)
            name, label_text = family.name, sets[family.labels]
            text = _safe(family.help.replace("\\", r"\\").replace("\n", r"\n"))
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
            lines += [f"{name}{label_text[labels]} {numbers[value]}\n" for labels, value in family.rows]
    return "".join(lines)


class _LabelSets(dict[tuple[str, ...], str]):
    """The text of label sets with the same label names, which are sorted."""

    def __init__(self, names: tuple[str, ...], values: _Values) -> None:
        self._order = sorted(range(len(names)), key=names.__getitem__)
        self._text = "{" + ",".join(f'{names[place]}="%s"' for place in self._order) + "}" if names else ""
        self._values = values

    def __missing__(self, labels: tuple[str, ...]) -> str:
        text = self[labels] = self._text % tuple([self._values[labels[place]] for place in self._order])
        return text


class _Values(dict[str, str]):
    """The escaped text of label values. The same few are in many series."""

    def __missing__(self, value: str) -> str:
        text = _safe(value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        self[value] = text
        return text


class _Numbers(dict[float, str]):
    """The text of numbers: most are 0."""

    def __missing__(self, value: float) -> str:
        text: str = floatToGoString(value + 0.0)  # type: ignore[no-untyped-call]  # -0.0 is the same key as 0.0
        self[value] = text
        return text


def _safe(text: str) -> str:
    """Return a line of the text format, or a part of one, with its unprintable characters escaped."""
    return text if text.isprintable() else "".join(map(_safe_character, text))


def _safe_character(character: str) -> str:
    # The backslash is an escape of the format itself.
    return character if character.isprintable() else printable(character).replace("\\", "\\\\")
