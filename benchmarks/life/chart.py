"""Draw a table's month: four charts in one image, a line for each way."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memwal_ops.pages.charts import line_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.life.month import Day, Month

_WIDTH, _HEIGHT, _TITLE = 640, 200, 22
_CHARTS: dict[str, tuple[Callable[[Day], float], str]] = {
    "bytes written per byte appended": (lambda day: day.written, "{:,.1f}"),
    "bytes kept per byte of the newest version": (lambda day: day.kept, "{:,.1f}"),
    "fragments and segments": (lambda day: day.fragments + day.segments, "{:,.0f}"),
    "requests, US $": (lambda day: day.price, "{:,.3f}"),
}


def chart(months: Sequence[Month]) -> bytes:
    """The image, as SVG."""
    labels = [str(number + 1) for number in range(len(months[0].days))]
    parts = []
    for at, (title, (figure, amount)) in enumerate(_CHARTS.items()):
        lines = {month.way: [figure(day) for day in month.days] for month in months}
        drawn = line_chart(lines, labels, amount).decode()
        inner = re.sub(r"^<\?xml.*?\?>\s*<svg", f'<svg y="{at * (_HEIGHT + _TITLE) + _TITLE}"', drawn)
        text = f'<text x="12" y="{at * (_HEIGHT + _TITLE) + 16}" fill="#55626e">{title}</text>'
        parts += [text, inner]
    size = f'width="{_WIDTH}" height="{len(_CHARTS) * (_HEIGHT + _TITLE)}"'
    font = 'font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(parts)}</svg>\n'.encode()
