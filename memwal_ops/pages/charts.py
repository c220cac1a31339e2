"""Draw the charts of the pages with pygal, as SVG images that follow the browser's dark or light setting."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import pygal
from pygal.style import Style

from memwal_ops.text import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memwal_ops.core.job import Unit

# pygal adds a finder for its plugins with maps to this process, which lacks find_spec: other code that asks every
# finder, such as pytest, fails on it. There are no maps here.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != pygal.__name__]

_COLORS = ("#1a7f8e", "#b3651b", "#6a4fa3", "#2f7d32", "#b0355c", "#55626e")
_DARK = (
    "inline:@media (prefers-color-scheme: dark) { .axis text, .legends text { fill: #d6dde4 !important } "
    ".axis .line { stroke: #7b8894 !important } .axis .guide { stroke: #36424d !important } "
    ".color-0 { stroke: #5cc3d3 !important } .color-1 { stroke: #f0a45d !important } .reactive { fill-opacity: .2 } }"
)
_FONT = "system-ui, sans-serif"
_TICKS, _MAX_TICKS = 3, 5
CHART_WIDTH = 480
_FACTORS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_TICK_STEPS = (
    *((_MINUTE * minutes, "{:%H:%M}") for minutes in (1, 5, 10, 15, 30, 60, 240)),
    (12 * _HOUR, "{:%d %b %H:%M}"),
    *((_DAY * days, "{:%d %b}") for days in (1, 2, 5, 15)),
)
_DASHES = ("1, 0", "6, 3", "2, 3", "8, 3, 2, 3")
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "count": "{:,.0f}".format,
    "bytes": size_text,
    "seconds": time_text,
    "share": "{:.2f}".format,
}


def time_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: Unit | Literal["share"] | Callable[[float], str],
    start: float,
    end: float,
) -> bytes:
    """Draw amounts over time, a line for each name; charts with the same ``start`` and ``end`` have the same scale.

    Args:
        series: by name, seconds since 1970 and amounts, in the order of time; one without a name has no legend.
        unit: of the amounts, or what makes their texts; a share is 0 to 1.
        start: the left end of the scale, in seconds since 1970.
        end: the right end.
    """
    ticks, text = time_ticks(start, end)
    own = {
        "show_legend": "" not in series,
        "value_formatter": unit if callable(unit) else _FORMATS[unit],
        "include_x_axis": unit != "share",
        "xrange": (start, end),
        "fill": len(series) == 1 and unit != "share",
    }
    # Its charts of dates convert times by the zone of this machine; these are seconds, printed in UTC.
    plot: Any = pygal.XY(
        **{**common_options(), **own},
        x_value_formatter=lambda when: text.format(datetime.fromtimestamp(when, UTC)),
        dots_size=2,
    )
    plot.x_labels = ticks
    if not callable(unit) and unit != "share":
        plot.y_labels = value_ticks([value for points in series.values() for _, value in points], unit)
    for at, (name, points) in enumerate(series.items()):
        dashes = {"width": 2, "dasharray": _DASHES[at % len(_DASHES)]}
        dots = len(points) == 1 or unit == "share"
        plot.add(name, [*points], show_dots=dots, stroke_style=dashes)
    return rendered(plot)


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


def bar_chart(series: Mapping[str, Sequence[float]], labels: Sequence[str]) -> bytes:
    """Draw a bar chart, one group for each label."""
    plot: Any = pygal.Bar(**{**common_options(), "show_legend": len(series) > 1}, x_labels_major_count=_TICKS)
    plot.x_labels = [*labels]
    plot.show_minor_x_labels = False
    for name, values in series.items():
        plot.add(name, [*values])
    return rendered(plot)


def common_options() -> dict[str, Any]:
    """Return the options of all charts."""
    style = Style(
        background="transparent",
        plot_background="transparent",
        colors=_COLORS,
        font_family=_FONT,
        label_font_size=14,
        major_label_font_size=14,
        legend_font_size=14,
        opacity=".16",
        stroke_opacity="1",
        guide_stroke_dasharray="0",
        guide_stroke_color="#d8dee4",
        major_guide_stroke_dasharray="0",
        major_guide_stroke_color="#d8dee4",
        stroke_width=2,
        transition="none",
    )
    return {
        "style": style,
        "js": (),
        "css": ["file://style.css", "file://graph.css", _DARK],
        "width": CHART_WIDTH,
        "height": 180,
        "explicit_size": True,
        "show_legend": False,
        "legend_at_bottom": True,
        "y_labels_major_count": _TICKS,
        "show_minor_y_labels": False,
        "include_x_axis": True,
        "range": None,
        "margin": 12,
        "margin_right": 44,  # half of the last time
        "value_formatter": lambda value: f"{value:,.0f}",
        "no_data_text": "",
        "truncate_label": -1,
    }


def rendered(plot: Any) -> bytes:
    """Return the SVG image of a chart."""
    rendered: bytes = plot.render(is_unicode=False)
    return rendered
