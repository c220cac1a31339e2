"""Lay out the charts of the pages: lanes below each other on one axis of time; charts.html.j2 draws them as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from memwal_ops.core.job import Unit

_WIDTH, _HEIGHT = 1000, 100  # of the view box of a lane
_TICKS, _MAX_TICKS, _MAX_POINTS = 3, 5, 240
_FACTORS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_TICK_STEPS = (
    *((_MINUTE * minutes, "{:%H:%M}") for minutes in (1, 5, 10, 15, 30, 60, 240)),
    (6 * _HOUR, "{:%a %H:%M}"),
    (12 * _HOUR, "{:%d %b %H:%M}"),
    *((_DAY * days, "{:%d %b}") for days in (1, 2, 5, 15)),
)
_EDGE, _LEAST = 0.06, 6  # what was read just now, and not before, is a dot


def story(lanes: Sequence[dict[str, Any]], start: float, end: float) -> dict[str, Any]:
    """Return lanes with the axis that they share, for the macro ``story``; times are seconds since 1970."""
    ticks, text = time_ticks(start, end)
    axis = []
    for tick in ticks:
        at = (tick - start) / (end - start)
        anchor = "start" if at < _EDGE else "end" if at > 1 - _EDGE else "middle"
        axis.append((round(100 * at, 2), anchor, text.format(datetime.fromtimestamp(tick, UTC))))
    return {"lanes": [*lanes], "axis": axis, "span": json.dumps([start, end])}


def lane(
    title: str,
    points: Sequence[tuple[float, float]],
    text: Callable[[float], str],
    start: float,
    end: float,
    *,
    most: float | None = None,
    summary: str = "",
    top_text: str = "",
) -> dict[str, Any]:
    """Return one lane: amounts over time, each as a step that lasts to the next one, the last to ``end``.

    Args:
        most: the top of the scale; None: the largest amount.
        summary: what is shown beside the title; empty: the range, and the last amount.
        top_text: the top of the scale as a short text; empty: as ``text`` makes it.
    """
    values = [value for _, value in points]
    top = most or max(values, default=0.0) or 1.0
    places = [(_place(when, start, end), round(_HEIGHT * (1 - value / top), 1)) for when, value in points]
    steps = "".join(f"H{x}V{y}" for x, y in places[1:])
    first = min(places[0][0], _WIDTH - _LEAST) if places else 0
    line = f"M{first} {places[0][1]}{steps}H{_WIDTH}" if places else ""
    area = f"{line}V{_HEIGHT}H{first}Z" if places else ""
    least, largest = text(min(values, default=0.0)), text(max(values, default=0.0))
    last = text(values[-1]) if values else ""
    known = f"now {last}" if least == largest else f"{least} to {largest}, now {last}"
    every = 1 + len(points) // _MAX_POINTS
    shown = points[::-every][::-1]  # with the last one
    return {
        "title": title, "summary": summary or known, "shape": "steps", "line": line, "area": area, "marks": [],
        "top": top_text or text(top), "zero": text(0.0),
        "points": json.dumps([[round(when), text(value)] for when, value in shown]),
    }  # fmt: skip


def marks(
    title: str, events: Sequence[tuple[float, str, str]], start: float, end: float, summary: str
) -> dict[str, Any]:
    """Return a lane of events, each with its time, its level as a word of the style sheet, and its text."""
    return {
        **lane(title, (), str, start, end, summary=summary), "shape": "marks", "top": "", "zero": "",
        "marks": [(_place(when, start, end), level) for when, level, _ in events],
        "points": json.dumps([[round(when), text] for when, _, text in events]),
    }  # fmt: skip


def _place(when: float, start: float, end: float) -> float:
    return round(_WIDTH * min(1.0, max(0.0, (when - start) / (end - start))), 1)


def value_ticks(values: Sequence[float], unit: Unit) -> list[float]:
    """Return up to five round amounts from 0 to the largest, whose texts differ: no 0.5 that is printed as 0."""
    most = max(1.0, *values)
    base = 1024.0 if unit == "bytes" else 10.0
    power = base ** max(0, math.floor(math.log(most, base)))
    steps = (power * factor for factor in (*_FACTORS, *(base * factor for factor in _FACTORS)))
    step = next(step for step in steps if most / step <= _TICKS)
    return [step * at for at in range(math.ceil(most / step) + 1)]


def time_ticks(start: float, end: float) -> tuple[list[float], str]:
    """Return at most six round times between two, in UTC, and a format by which their texts differ."""
    for seconds, text in _TICK_STEPS:
        if (end - start) / seconds <= _MAX_TICKS:
            first = -(-start // seconds) * seconds
            return [first + seconds * at for at in range(int((end - first) // seconds) + 1)], text
    return [start, end], "{:%Y-%m-%d}"
