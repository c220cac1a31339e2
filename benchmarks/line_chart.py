"""Draw the line charts of measurements, in the style of the service's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pygal

from memwal_ops.pages.charts import common_options, rendered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def line_chart(series: Mapping[str, Sequence[float]], labels: Sequence[str], amount: str) -> bytes:
    """Draw lines over the same labels, not from zero; ``amount`` is the format of a value: ``{:.2f}``."""
    own = {"show_legend": True, "value_formatter": amount.format, "include_x_axis": False}
    plot: Any = pygal.Line(**{**common_options(), **own}, x_labels_major_count=3)
    plot.x_labels = [*labels]
    plot.show_minor_x_labels = False
    for name, values in series.items():
        plot.add(name, [*values])
    return rendered(plot)
