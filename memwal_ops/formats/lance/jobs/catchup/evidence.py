"""Find the evidence by which an index is built anew instead of updated: its answers, and the bounds of its codes.

pylance trains the bounds of IVF_SQ and IVF_HNSW_SQ once, by at most 65,536 rows, and keeps them in updates. Components
beyond them get the outermost code: rows of which many components are far beyond are not found (recall 0.97 -> 0.00).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.answers.asked_index import Pinned, Reader
from memwal_ops.formats.lance.answers.check import why_low
from memwal_ops.formats.lance.answers.sample import sample_queries
from memwal_ops.formats.lance.answers.vector import batches, measure, usable_rows
from memwal_ops.formats.lance.indexes.base_indexes import coverage, index_folder
from memwal_ops.formats.lance.indexes.codebook import scalar_bounds
from memwal_ops.formats.lance.indexes.index_faults import dot_product_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.answers.asked_index import AskedIndex
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.indexes.codebook import ScalarBounds
    from memwal_ops.formats.lance.table import Table

_TRAINED_BY = 65_536
# Up to here a new row is found as well as the others: the tails of a distribution that the bounds were trained by.
_MARGIN = 0.1
_FEW = 0.01
# Rows of the sample without which a training may miss all of their kind, and the next run would build anew again.
_SEEN = 16


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


@dataclass(frozen=True, slots=True)
class Misfit:
    """New rows beyond the bounds, or unknown bounds. ``anew``: building the index anew helps."""

    why: str
    anew: bool


def misfit(table: Table, index: BaseIndex, context: RunContext) -> Misfit | None:
    """What is wrong with the bounds of an index for the rows that it does not cover; None: nothing.

    Reads their vectors once for a table value, by batches.
    """
    if not index.type.endswith("_SQ"):
        return None
    return table.once(("misfit", index.name), lambda: _misfit(table, index, context))


def _misfit(table: Table, index: BaseIndex, context: RunContext) -> Misfit | None:
    uncovered = coverage(index.covered, table.manifest).uncovered
    pinned = Pinned(table.dataset, table.location.uri)
    asked = pinned.indexes.get(index.name)
    if not uncovered or asked is None:
        return None
    try:
        bounds = scalar_bounds(table.location, index_folder(table, index.segments[-1]), index.name)
        if not pa.types.is_fixed_size_list(asked.arrow):
            raise UnsupportedFeatureError(f"{asked.column} is of type {asked.arrow}.")
        counts = [*Reader(context.checkpoint).each(pinned, sorted(uncovered), _Beyond(asked, bounds))]
    except (StorageError, UnsupportedFeatureError) as error:
        return Misfit(f"whether new rows are within the bounds of its codes is not known: {error}", anew=False)
    beyond, rows = (sum(one) for one in zip(*counts, strict=True))
    if beyond <= _FEW * rows:
        return None
    why = (
        f"{beyond:,} of {rows:,} new rows are beyond the bounds of its codes ({bounds.low:.4g} to {bounds.high:.4g}), "
        "and would hardly be found"
    )
    if table.log.keeps_codebooks:
        return Misfit(f"{why}; beside a log it keeps them, so use --migrate-codebook {index.name} NEW.", anew=False)
    total = coverage(frozenset(), table.manifest).uncovered_rows
    if beyond * _TRAINED_BY < _SEEN * max(total, _TRAINED_BY):
        return Misfit(f"{why}; they are too few for a training to find them", anew=False)
    return Misfit(why, anew=True)


@dataclass(frozen=True, slots=True)
class _Beyond:
    """Counts vectors with a component far beyond the bounds."""

    index: AskedIndex
    bounds: ScalarBounds

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> tuple[int, int]:
        """Of these fragments, how many, and of how many vectors."""
        beyond = rows = 0
        for _, vectors in batches(pinned, self.index, group):
            usable = vectors[usable_rows(vectors, self.bounds.metric)].astype(np.float64)
            rows += len(usable)
            beyond += _beyond(usable, self.bounds)
        return beyond, rows


def _beyond(vectors: NDArray[Any], bounds: ScalarBounds) -> int:
    if not len(vectors):
        return 0
    lows, highs = vectors.min(axis=1), vectors.max(axis=1)
    if bounds.metric == "cosine":
        lengths = np.linalg.norm(vectors, axis=1)
        lows, highs = lows / lengths, highs / lengths
    margin = _MARGIN * (bounds.high - bounds.low)
    return int(np.count_nonzero((lows < bounds.low - margin) | (highs > bounds.high + margin)))
