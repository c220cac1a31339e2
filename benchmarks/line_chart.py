"""Draw the line charts of measurements with pygal, as SVG images that follow the browser's dark or light setting."""

from __future__ import annotations

import sys
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
    ".axis .line { stroke: #7b8894 !important } .axis .guide { stroke: #36424d !important } "
    ".color-0 { stroke: #5cc3d3 !important } .color-1 { stroke: #f0a45d !important } .reactive { fill-opacity: .2 } }"
)
_FONT = "system-ui, sans-serif"
_TICKS, _WIDTH = 3, 480


def line_chart(series: Mapping[str, Sequence[float]], labels: Sequence[str], amount: str) -> bytes:
    """Draw lines over the same labels, not from zero; ``amount`` is the format of a value: ``{:.2f}``."""
    own = {"show_legend": True, "value_formatter": amount.format, "include_x_axis": False}
    plot: Any = pygal.Line(**{**common_options(), **own}, x_labels_major_count=3)
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
        "width": _WIDTH,
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
