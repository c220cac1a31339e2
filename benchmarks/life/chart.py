"""Draw a table's month: four charts in one image, a line for each way. Drawn here, as pygal's take 50 KB each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.life.month import Day, Month

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 270, 120, 52, 28, 30
_COLORS = {"nothing": "#8a949e", "pylance, daily": "#b3651b", "optimize(), each round": "#6a4fa3"}
_OURS = "#1a7f8e"
_CHARTS: dict[str, tuple[Callable[[Day], float], str]] = {
    "bytes written per byte appended": (lambda day: day.written, "{:,.1f}"),
    "bytes kept / of the newest version": (lambda day: day.kept, "{:,.1f}"),
    "fragments and segments": (lambda day: day.fragments + day.segments, "{:,.0f}"),
    "requests, US $": (lambda day: day.price, "{:,.4f}"),
}
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #39424c } path { fill: none; stroke-width: 2 } "
    ".axis { stroke: #aab2ba; stroke-width: 1 } "
    "@media (prefers-color-scheme: dark) { text { fill: #d6dde4 } .axis { stroke: #55626e } }"
)


def chart(months: Sequence[Month]) -> bytes:
    """The image, as SVG; the scales of amounts are logarithmic."""
    width, height = 2 * (_LEFT + _WIDTH) + _GAP, 2 * (_TOP + _HEIGHT + _GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
    ]
    for at, (title, (figure, amount)) in enumerate(_CHARTS.items()):
        x, y = _LEFT + at % 2 * (_LEFT + _WIDTH), _TOP + at // 2 * (_TOP + _HEIGHT + _GAP)
        lines = {month.way: [figure(day) for day in month.days] for month in months}
        parts += [f'<g transform="translate({x} {y})">', *_chart(title, lines, amount), "</g>"]
    x = _LEFT
    for month in months:
        parts.append(f'<path d="M{x} {height - 12}h18" stroke="{_COLORS.get(month.way, _OURS)}"/>')
        parts.append(f'<text x="{x + 24}" y="{height - 8}">{month.way}</text>')
        x += 44 + 7 * len(month.way)
    return ("\n".join([*parts, "</svg>"]) + "\n").encode()


def _chart(title: str, lines: Mapping[str, Sequence[float]], amount: str) -> list[str]:
    positive = [value for line in lines.values() for value in line if value > 0] or [1.0]
    low, high = math.log(min(positive)), math.log(max(positive))

    def point(day: int, value: float, days: int) -> str:
        share = 0.5 if high == low else (math.log(max(value, min(positive))) - low) / (high - low)
        return f"{_WIDTH * (day + 1) / days:.0f} {_HEIGHT * (1 - share):.0f}"

    parts = [
        f'<text x="0" y="-10">{title}</text>',
        f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>',
        f'<text x="-6" y="10" text-anchor="end">{amount.format(max(positive))}</text>',
        f'<text x="-6" y="{_HEIGHT}" text-anchor="end">{amount.format(min(positive))}</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT + 15}" text-anchor="end">day {max(map(len, lines.values()))}</text>',
    ]
    for way, line in lines.items():
        points = "L".join(point(day, value, len(line)) for day, value in enumerate(line))
        parts.append(f'<path d="M{points}" stroke="{_COLORS.get(way, _OURS)}"/>')
    return parts
