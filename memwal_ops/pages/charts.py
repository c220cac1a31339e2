"""Draw the charts of the pages with pygal, as SVG images that follow the browser's dark or light setting."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pygal
from pygal.style import Style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# pygal adds a finder for its plugins with maps to this process, which lacks find_spec: other code that asks every
# finder, such as pytest, fails on it. There are no maps here.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != pygal.__name__]

_COLORS = ("#1a7f8e", "#b3651b", "#6a4fa3", "#2f7d32", "#b0355c", "#55626e")
_DARK = (
    "inline:@media (prefers-color-scheme: dark) { .axis text, .legends text { fill: #d6dde4 !important } "
    ".axis .line, .axis .guide { stroke: #55626e !important } }"
)
_FONT = "system-ui, sans-serif"
_TICKS = 3
_DATES_FROM_SECONDS = 24 * 3600


def backlog_chart(samples: Sequence[tuple[float, float]], *, small: bool) -> bytes:
    """Draw amounts over time as a line chart.

    Args:
        samples: seconds since 1970, UTC, and amounts; in the order of time.
        small: without axes, for a row of a list.
    """
    points = [(_moment(when), amount) for when, amount in samples]
    long = bool(samples) and samples[-1][0] - samples[0][0] > _DATES_FROM_SECONDS
    plot: Any = pygal.DateTimeLine(
        **_common(small=small),
        x_value_formatter=lambda when: f"{when:%m-%d %H:%M}" if long else f"{when:%H:%M}",
        show_dots=len(points) == 1,
        fill=True,
    )
    if points and not small:
        plot.x_labels = [points[0][0], points[len(points) // 2][0], points[-1][0]]
    plot.add("", points)
    return _rendered(plot)


def bar_chart(series: Mapping[str, Sequence[float]], labels: Sequence[str]) -> bytes:
    """Draw a bar chart, one group for each label."""
    plot: Any = pygal.Bar(**{**_common(small=False), "show_legend": len(series) > 1}, x_labels_major_count=_TICKS)
    plot.x_labels = [*labels]
    plot.show_minor_x_labels = False
    for name, values in series.items():
        plot.add(name, [*values])
    return _rendered(plot)


def line_chart(series: Mapping[str, Sequence[float]], labels: Sequence[str], amount: str) -> bytes:
    """Draw lines over the same labels, not from zero; ``amount`` is the format of a value: ``{:.2f}``."""
    own = {"show_legend": True, "value_formatter": amount.format, "include_x_axis": False}
    plot: Any = pygal.Line(**{**_common(small=False), **own}, x_labels_major_count=_TICKS)
    plot.x_labels = [*labels]
    plot.show_minor_x_labels = False
    for name, values in series.items():
        plot.add(name, [*values])
    return _rendered(plot)


def shares_chart(series: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Draw shares of 0 to 1 over time, one line for each name; seconds since 1970, UTC, in the order of time."""
    own = {"show_legend": True, "value_formatter": "{:.2f}".format, "include_x_axis": False, "show_dots": True}
    plot: Any = pygal.DateTimeLine(
        **{**_common(small=False), **own}, x_value_formatter=lambda when: f"{when:%m-%d %H:%M}", dots_size=2
    )
    times = sorted({when for points in series.values() for when, _ in points})
    if times:
        plot.x_labels = [_moment(times[at]) for at in sorted({0, len(times) // 2, len(times) - 1})]
    for name, points in series.items():
        plot.add(name, [(_moment(when), share) for when, share in points])
    return _rendered(plot)


def _moment(when: float) -> datetime:
    return datetime.fromtimestamp(when, UTC).replace(tzinfo=None)


def _common(*, small: bool) -> dict[str, Any]:
    style = Style(
        background="transparent",
        plot_background="transparent",
        colors=_COLORS,
        font_family=_FONT,
        label_font_size=12,
        major_label_font_size=12,
        legend_font_size=12,
        opacity=".35",
        stroke_width=2,
        transition="none",
    )
    return {
        "style": style,
        "js": (),
        "css": ["file://style.css", "file://graph.css", _DARK],
        "width": 240 if small else 640,
        "height": 48 if small else 200,
        "explicit_size": True,
        "show_legend": False,
        "legend_at_bottom": True,
        "show_x_labels": not small,
        "show_y_labels": not small,
        "show_y_guides": not small,
        "y_labels_major_count": _TICKS,
        "show_minor_y_labels": False,
        "include_x_axis": True,
        "range": None,
        "margin": 2 if small else 12,
        "value_formatter": lambda value: f"{value:,.0f}",
        "no_data_text": "",
    }


def _rendered(plot: Any) -> bytes:
    rendered: bytes = plot.render(is_unicode=False)
    return rendered
