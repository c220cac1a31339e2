"""Compare what a vector index finds in two states of it, without a search of all rows.

Both are asked the same queries, for twice as many rows as are compared. Of the rows that any of the two finds, the
nearest by exact distances are what each should have found; rows of both are the same if their distances are, as a
compaction changes addresses. So the cost is that of a few searches, however large the table is. A state that has more
rows is not worse for that: rows that are nearer are in the pool, too, and those that
coarse codes make look nearer may take half of the places. If they take all of them, they hide the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.answers import Interval, mean_by_query
from memwal_ops.formats.lance.answers.vector import (
    NPROBES,
    REFINE,
    K,
    distances_of,
    matrix_of,
    metric_of,
    of_index,
    search,
    searching,
    several_vectors,
    tie,
    usable_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned

_ASKED = 2 * K


@dataclass(frozen=True, slots=True)
class Pooled:
    """What two states find, as shares of the nearest rows of the pool.

    Attributes:
        queries: how many were asked.
        before: the mean share of the earlier state.
        after: that of the later one.
        change: the mean of ``after - before``, query by query, with its interval; None: too few queries.
    """

    queries: int
    before: float
    after: float
    change: Interval | None


def compare_searches(before: Pinned, after: Pinned, index: AskedIndex, rows: pa.Table, seed: int = 0) -> Pooled:
    """Search by the vectors of ``rows`` in both states.

    Args:
        after: the same rows with another state of the index.
        index: the index, as ``after`` has it.
        rows: its column and the addresses of rows that were drawn; rows that the earlier state covers, for a fair test.
        seed: of the confidence interval.

    Raises:
        SearchError: a state does not answer.
        StorageError: the table cannot be read.
    """
    found = [_found(state, index, rows) for state in (before, after)]
    shares = np.array([_shares(*one) for one in zip(*found, strict=True)], np.float64).reshape(-1, 2)
    if not len(shares):
        return Pooled(0, 0.0, 0.0, None)
    earlier, later = (float(one) for one in shares.mean(axis=0))
    return Pooled(len(shares), earlier, later, mean_by_query(shares[:, 1] - shares[:, 0], seed))


def _found(pinned: Pinned, index: AskedIndex, rows: pa.Table) -> list[NDArray[np.float64]]:
    """For each query the exact distances of the rows that are found."""
    state = pinned.indexes[index.name]
    metric = metric_of(pinned, state)
    if pa.types.is_list(index.arrow):
        return [_found_by_several(pinned, state, one) for one in several_vectors(rows[index.column])]
    vectors = matrix_of(rows[index.column])
    asked = vectors[usable_rows(vectors, metric)]
    every = list(pinned.fragments)
    return [
        distances_of(asked[number : number + 1], one.vectors, metric)[0]
        for number, one in enumerate(search(pinned, state, asked, every, k=_ASKED))
    ]


def _found_by_several(pinned: Pinned, index: AskedIndex, query: Any) -> NDArray[np.float64]:
    """The distances of what is found by several vectors; Lance computes exact ones of more rows than it returns."""
    nearest = {"column": index.column, "q": np.asarray(query, np.float32), "k": _ASKED, "nprobes": NPROBES}
    with searching(pinned, index):
        found = pinned.dataset.scanner(
            columns=["_distance"],
            nearest=nearest | {"refine_factor": REFINE},
            disable_scoring_autoprojection=True,
            fast_search=True,
            **of_index(pinned, index),
        ).to_table()
    distances: NDArray[np.float64] = found["_distance"].to_numpy().astype(np.float64)
    return distances


def _shares(before: NDArray[np.float64], after: NDArray[np.float64]) -> Sequence[float]:
    """The share of the nearest rows of both answers that each of them has."""
    nearest = _of_any(before, after)[:K]
    if not nearest:
        return 1.0, 1.0
    limit = nearest[-1] + tie(nearest[-1])
    return [min(1.0, float((one <= limit).sum()) / len(nearest)) for one in (before, after)]


def _of_any(before: NDArray[np.float64], after: NDArray[np.float64]) -> list[float]:
    """The distances of all rows that one of the answers has, ascending."""
    merged: list[float] = []
    others = deque(sorted(after.tolist()))
    for distance in sorted(before.tolist()):
        while others and others[0] < distance - tie(distance):
            merged.append(others.popleft())
        merged.append(distance)
        if others and others[0] <= distance + tie(distance):
            others.popleft()
    return [*merged, *others]
