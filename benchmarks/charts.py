"""Draw the charts of the comparisons, in the style of the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pygal

from benchmarks.line_chart import common_options, rendered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COLORS, _LEAST = 6, 0.7


def _options() -> dict[str, Any]:
    """Large, with twice the colors, by twice as many lines."""
    options = common_options()
    options["style"].colors *= 2
    return {**options, "width": 720, "height": 440, "show_legend": True, "legend_at_bottom_columns": 5,
            "include_x_axis": False, "dots_size": 2, "margin_bottom": 40, "truncate_legend": -1}  # fmt: skip


def _dashes(at: int) -> dict[str, Any]:
    return {"width": 2, "dasharray": "1, 0" if at < _COLORS else "6, 3"}


def curve_chart(curves: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Recall from 0.7, to the right, and queries per CPU second, upward, logarithmic; one line for each name."""
    own = {"logarithmic": True, "xrange": (_LEAST, 1.0), "x_title": "recall@10", "show_minor_y_labels": True}
    plot: Any = pygal.XY(**{**_options(), **own}, x_value_formatter="{:.2f}".format)
    plot.x_labels = [_LEAST, 0.8, 0.9, 0.95, 1.0]
    plot.y_labels = [100, 300, 1_000, 3_000, 10_000, 30_000]
    for at, (name, points) in enumerate(curves.items()):
        plot.add(name, [point for point in points if point[0] >= _LEAST], stroke_style=_dashes(at))
    return rendered(plot)


def rounds_chart(recall: Mapping[str, Sequence[float]]) -> bytes:
    """Recall after each round, the first before all of them; one line for each name."""
    plot: Any = pygal.Line(**{**_options(), "value_formatter": "{:.2f}".format}, x_labels_major_count=5)
    plot.x_labels = [str(at) for at in range(max(map(len, recall.values()), default=0))]
    plot.show_minor_x_labels = False
    for at, (name, values) in enumerate(recall.items()):
        plot.add(name, [*values], stroke_style=_dashes(at))
    return rendered(plot)
