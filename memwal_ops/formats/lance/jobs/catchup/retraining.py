"""Decide by evidence whether a vector index is trained anew instead of updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.formats.lance.answers.asked_index import Pinned
from memwal_ops.formats.lance.answers.check import why_low
from memwal_ops.formats.lance.answers.reading import Reader
from memwal_ops.formats.lance.answers.sample import sample_queries
from memwal_ops.formats.lance.answers.vector import measure
from memwal_ops.formats.lance.indexes.base_indexes import coverage
from memwal_ops.formats.lance.indexes.index_refusals import dot_product_error

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table


def why_retrain(table: Table, index: BaseIndex, context: RunContext) -> str:
    """Why a vector index is to be trained anew; empty: it is not.

    Only one to which rows were appended since it was trained: otherwise each run would train it by the same rows.

    Raises:
        UnsupportedFeatureError, StorageError: the index or the table cannot be read.
    """
    appended = len(index.segments) > 1
    if not appended and coverage(index.covered, table.manifest).complete:
        return ""
    if dot_product_error(table, index) is not None:
        return "rows that pylance adds to product quantization with the metric dot hide all others"
    return table.once(("why retrain", index.name), lambda: _why_low(table, index, context)) if appended else ""


def _why_low(table: Table, index: BaseIndex, context: RunContext) -> str:
    pinned = Pinned(table.dataset, table.location.uri)
    asked = pinned.indexes.get(index.name)
    if asked is None:
        return ""
    drawn = sample_queries(pinned, asked, seed=table.version)
    return next(why_low(measure(pinned, asked, drawn, Reader(context.checkpoint))), "")
