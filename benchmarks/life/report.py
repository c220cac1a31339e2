"""Print what the ways took, as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.life.store import PRICES
from benchmarks.markdown import head, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.life.month import Month
    from benchmarks.life.shapes import Shape


def print_months(shape: Shape, months: Sequence[Month]) -> None:
    """All tables of a shape."""
    print(f"\n### {shape.title}")
    _costs(shape, months)
    _requests(months)
    if any(month.asked for month in months):
        _answers([month for month in months if month.asked])


def _costs(shape: Shape, months: Sequence[Month]) -> None:
    some = next((month.fresh for month in months if month.fresh), Counter[str]())
    log = ["log"] if shape.log else []
    parts = ["data", "indexes", "metadata", *log]
    head(
        "written per byte appended", *parts, "indexes / growth", "kept", "newest", "fragments", "segments", "CPU s",
        "peak, MiB",
    )  # fmt: skip
    for month in months:
        written, last, fresh = month.used.written, month.days[-1], month.fresh or some
        row(
            month.way,
            *(f"{written[part] / month.appended:.2f}" for part in parts),
            f"{written['indexes'] / max(1, fresh['indexes'] - month.begun['indexes']):.1f}",
            f"{month.kept.total() / max(1, fresh.total()):.2f}",
            f"{month.needed / max(1, fresh.total()):.2f}",
            last.fragments,
            last.segments,
            *([f"{month.cpu:.0f}", f"{month.peak:.0f}"] if month.peak else ["", ""]),
        )


def _requests(months: Sequence[Month]) -> None:
    head("requests", *PRICES, "US $")
    for month in months:
        counts = month.used.requests
        row(month.way, *(f"{counts[kind]:,}" for kind in PRICES), f"{month.used.price:.3f}")


def _answers(months: Sequence[Month]) -> None:
    """Requests of each query, with its processor time over that on the table that was built anew."""
    vectors = bool(months[0].recall)
    head("a query: requests (processor time / built anew)", *months[0].asked, *(["recall@10"] if vectors else []))
    for month in months:
        cells = [f"{count} ({month.ratios[name]:.1f})" for name, count in month.asked.items()]
        row(month.way, *cells, *([f"{month.recall[0]:.3f}"] if vectors else []))
    last = months[-1]
    row("built anew", *last.asked_fresh.values(), *([f"{last.recall[1]:.3f}"] if vectors else []))
    head("three days at rest later", "data written per byte appended", *(f"{name}: time" for name in last.asked))
    for month in months:
        if month.rested:
            row(month.way, f"{month.rested_written:.2f}", *(f"{ratio:.2f}" for ratio in month.rested.values()))
