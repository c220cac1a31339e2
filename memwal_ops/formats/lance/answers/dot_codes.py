"""Whether an index of product quantizer codes with the metric dot searches by the codes of its rows.

For this metric pylance encodes each row as it is. Its update encodes rows relative to their centroid, and searches them
as if they were encoded as they are (docs/upstream.md). Where all rows of a segment went through such an update, rows of
every age are found equally badly, and a search by a row's own vector need not find that row for this metric. So the
recall is compared with that of the trained codebook itself: rows are encoded here, and compared by their codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.answers import Interval, share_by_query
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.answers.vector import K, Nearest, batches, matrix_of, search, usable_rows
from memwal_ops.formats.lance.indexes.codebook import read_model
from memwal_ops.formats.lance.indexes.segment_files import index_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned
    from memwal_ops.formats.lance.answers.reading import Reader
    from memwal_ops.formats.lance.answers.sample import Queries
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table

_TYPES = frozenset({"IVF_PQ", "IVF_HNSW_PQ"})


def recall_of_codes(
    table: Table, pinned: Pinned, index: AskedIndex, base: BaseIndex, drawn: Queries, max_bytes: int, reader: Reader
) -> tuple[Interval, Interval] | None:
    """The recall of a search of all partitions without refinement, and that of comparing rows by their codes.

    Reads the rows once more, and the codes of the whole index.

    Returns:
        None: the index is of another type, has several segments, or both do not fit into ``max_bytes``.

    Raises:
        StorageError: the rows or the codes cannot be read.
    """
    if index.type not in _TYPES or len(base.segments) != 1 or drawn.rows is None or not drawn.fragments:
        return None
    if drawn.bytes_at_most + index.size > max_bytes:
        return None
    try:
        model = read_model(table.location, index_folder(table, base.segments[0]), index.name)
    except UnsupportedFeatureError:
        return None
    if model.codebook is None:
        return None
    vectors = matrix_of(drawn.rows[index.column])
    asked = vectors[usable_rows(vectors, "dot")].astype(np.float64)
    if not len(asked):
        return None
    exact, coded = Nearest.of(len(asked)), Nearest.of(len(asked))
    work = _Search(index, asked, model.codebook.astype(np.float64))
    for near, by_codes in reader.each(pinned, drawn.fragments, work):
        exact.add(near.distances, near.addresses)
        coded.add(by_codes.distances, by_codes.addresses)
    found = search(pinned, index, asked, drawn.fragments, nprobes=len(model.centroids))
    truth = [own[np.isfinite(distances)] for own, distances in zip(exact.addresses, exact.distances, strict=True)]
    return _share(truth, [one.addresses for one in found], drawn.seed), _share(truth, [*coded.addresses], drawn.seed)


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the nearest rows of fragments, by vectors and by codes. May be sent to another process."""

    index: AskedIndex
    asked: NDArray[np.float64]
    codebook: NDArray[np.float64]

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> tuple[Nearest, Nearest]:
        exact, coded = Nearest.of(len(self.asked)), Nearest.of(len(self.asked))
        for addresses, rows in batches(pinned, self.index, group):
            usable = usable_rows(rows, "dot")
            whole = rows[usable].astype(np.float64)
            exact.add(1 - self.asked @ whole.T, addresses[usable])
            coded.add(1 - self.asked @ _decoded(whole, self.codebook).T, addresses[usable])
        return exact, coded


def _decoded(rows: NDArray[np.float64], codebook: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is left of rows by their codes: of each sub-vector the nearest one of the codebook."""
    parts, _, width = codebook.shape
    left = np.empty_like(rows)
    for part in range(parts):
        codes, own = codebook[part], rows[:, part * width : (part + 1) * width]
        nearest = ((codes**2).sum(axis=1)[None] - 2 * own @ codes.T).argmin(axis=1)
        left[:, part * width : (part + 1) * width] = codes[nearest]
    return left


def _share(truth: list[NDArray[np.uint64]], found: list[NDArray[np.uint64]], seed: int) -> Interval:
    hits = [int(np.isin(of, got).sum()) for of, got in zip(truth, found, strict=True)]
    share = share_by_query(hits, [min(K, len(of)) for of in truth], seed)
    return share or Interval(1.0, 0.0, 1.0)
