"""Measure the recall of a vector index against exact distances, by the age of the rows.

One pass over the vectors gives the exact nearest rows of all queries at once; the index is asked for the same rows of
the same fragments, with the number of partitions that LanceDB probes by default.

Recall of a healthy index may be low by nature: of a product quantizer with few codes, of few probes. So these compare:

* Rows that were appended since the index was trained with rows that it was trained with.
* Each row with itself: a search by its own vector finds it in any healthy index, however coarse its codes are, because
  the codes of a row are those nearest to it, and so is its partition. With foreign centroids or codes it does not.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.answers import IndexAnswers, Interval, examples, mean_by_query, share_by_query, wilson
from memwal_ops.errors import MemwalOpsError, StorageError
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID, lance_errors
from memwal_ops.formats.lance.wire.version_manifest import encode_row_ids, fragments_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned, RowReader
    from memwal_ops.formats.lance.answers.sample import Queries

    _Addresses = list[NDArray[np.uint64]]

K = 10
NPROBES = 20
REFINE = 10
MULTIVECTOR_QUERIES = 8
# Distances that differ by no more than that share are equal.
_TIES = 1e-5
_ROUNDED = 1e-12
_BATCH = 4096
# Fewer true neighbours of an age than that do not measure its recall.
_ENOUGH = 20


@dataclass
class Nearest:
    """The nearest rows of each query, the nearest first."""

    distances: NDArray[np.float64]
    addresses: NDArray[np.uint64]

    @classmethod
    def of(cls, queries: int) -> Nearest:
        """Before any row."""
        return cls(np.full((queries, K), np.inf), np.zeros((queries, K), np.uint64))

    def add(self, distances: NDArray[np.float64], addresses: NDArray[np.uint64]) -> None:
        """Take in rows: queries x rows."""
        all_ = np.concatenate([self.distances, distances], axis=1)
        known = np.concatenate([self.addresses, np.broadcast_to(addresses, distances.shape)], axis=1)
        keep = np.argpartition(all_, K - 1, axis=1)[:, :K]
        self.distances = np.take_along_axis(all_, keep, axis=1)
        self.addresses = np.take_along_axis(known, keep, axis=1)

    def limit(self, query: int) -> float:
        """The distance of the last place; infinite if there are fewer rows than places."""
        return float(self.distances[query].max())

    def sure(self, query: int) -> NDArray[np.uint64]:
        """The rows that every right answer has: any of several rows may be in the last place."""
        limit, distances = self.limit(query), self.distances[query]
        nearer = distances < (limit - tie(limit) if np.isfinite(limit) else limit)
        addresses: NDArray[np.uint64] = self.addresses[query][nearer]
        return addresses


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found: addresses and vectors of rows."""

    addresses: NDArray[np.uint64]
    vectors: NDArray[Any]


def measure(pinned: Pinned, index: AskedIndex, drawn: Queries, reader: RowReader) -> IndexAnswers:
    """Measure one vector index; arguments as :func:`memwal_ops.formats.lance.answers.ask.ask`.

    Raises ``StorageError``: vectors cannot be read without the index.
    """
    base = index.identified
    if drawn.skipped or drawn.rows is None:
        return IndexAnswers(**base, skipped=drawn.skipped)
    metric = metric_of(pinned, index)
    multi = pa.types.is_list(index.arrow)
    base["settings"] = f"k {K}, nprobes {NPROBES}, no refine"
    if not drawn.fragments:
        return IndexAnswers(**base, skipped="no fragment fits into --max-bytes")
    try:
        if multi:
            return _measure_multivector(pinned, index, drawn, base)
        vectors = matrix_of(drawn.rows[index.column])
        usable = usable_rows(vectors, metric)
        inside = np.isin(fragments_of(drawn.rows[ROW_ADDRESS].to_numpy()), np.array(drawn.fragments))
        asked, own = vectors[usable], drawn.rows[ROW_ADDRESS].to_numpy()[usable]
        if not len(asked):
            return IndexAnswers(**base, skipped="none of its drawn vectors can be searched by")
        here, there = asked[inside[usable]], own[inside[usable]]
        truth, rows = _exact(pinned, index, asked, drawn.fragments, metric, reader)
        answers = search(pinned, index, asked, drawn.fragments)
        again = (
            []
            if metric == "dot" or not len(here)
            else search(pinned, index, here, drawn.fragments, refine_factor=REFINE)
        )
    except SearchError as error:
        return IndexAnswers(**base, queries=1, wrong=1, error=str(error))
    measured = _measured(index, asked, truth, answers, metric, drawn.seed)
    return IndexAnswers(
        **base,
        queries=len(asked),
        examples_missing=examples(measured.missed),
        recall=measured.recall,
        built_rows_recall=measured.built,
        appended_rows_recall=measured.appended,
        appended_rows_excess=measured.excess,
        trained_rows=_trained_rows(pinned, index),
        found_itself=_found_itself(here, there, again, metric),
        rows_compared=rows,
        bytes_at_most=drawn.bytes_at_most,
    )


class SearchError(StorageError):
    """A vector index fails to answer."""

    reason = "index_fails"


@contextmanager
def searching(pinned: Pinned, index: AskedIndex) -> Iterator[None]:
    """Around a search by an index. Raises :class:`SearchError` where it fails."""
    try:
        with lance_errors("search", pinned.uri):
            yield
    except MemwalOpsError as error:
        raise SearchError(f"index {index.name} does not answer: {error}") from error


def metric_of(pinned: Pinned, index: AskedIndex) -> str:
    """The metric of a vector index; indexes of older releases do not describe it, and their statistics are costly."""
    if described := index.details.get("metric_type"):
        return str(described).lower()
    with lance_errors("read the statistics of an index of", pinned.uri):
        stats = pinned.dataset.stats.index_stats(index.name)
    return str(stats["indices"][0].get("metric_type", "l2")).lower()


def matrix_of(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """A column of vectors as a matrix; null is NaN (of bytes, zero)."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    flat = array.values.slice(array.offset * array.type.list_size, len(array) * array.type.list_size)
    values = flat.to_numpy(zero_copy_only=False).reshape(len(array), array.type.list_size)
    if array.null_count:
        values = values.astype(np.float64)
        values[np.asarray(array.is_null())] = np.nan
    matrix: NDArray[Any] = values
    return matrix


def several_vectors(column: pa.ChunkedArray) -> list[Any]:
    """Queries of several vectors each."""
    return [vector for vector in column.to_pylist() if vector][:MULTIVECTOR_QUERIES]


def usable_rows(vectors: NDArray[Any], metric: str) -> NDArray[np.bool_]:
    """Those with a distance to others: finite, and for cosine not zero."""
    finite = np.isfinite(vectors).all(axis=1) if vectors.dtype.kind == "f" else np.ones(len(vectors), bool)
    return finite & (vectors != 0).any(axis=1) if metric == "cosine" else finite


def distances_of(queries: NDArray[Any], vectors: NDArray[Any], metric: str) -> NDArray[np.float64]:
    """Queries x vectors; infinite for vectors that have none."""
    usable = usable_rows(vectors, metric)
    if metric == "hamming":
        bits = np.bitwise_count(queries[:, None, :] ^ np.nan_to_num(vectors).astype(queries.dtype)[None, :, :])
        distances = bits.sum(axis=2).astype(np.float64)
    else:
        asked, rows = queries.astype(np.float64), np.where(usable[:, None], vectors, 0).astype(np.float64)
        if metric == "cosine":
            asked = asked / np.linalg.norm(asked, axis=1, keepdims=True)
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        products = asked @ rows.T
        if metric == "l2":
            squares = (asked**2).sum(axis=1)[:, None] + (rows**2).sum(axis=1)[None]
            distances = squares - 2 * products
            distances[distances < _ROUNDED * squares] = 0  # the same vector, but for what was rounded
        else:
            distances = 1 - products
    distances[:, ~usable] = np.inf
    measured: NDArray[np.float64] = distances
    return measured


def tie(distance: float) -> float:
    """By how much another distance may differ, and be the same."""
    return _TIES * max(abs(distance), 1e-6)


def _exact(
    pinned: Pinned, index: AskedIndex, asked: NDArray[Any], fragments: Sequence[int], metric: str, reader: RowReader
) -> tuple[Nearest, int]:
    """The exact nearest rows of these fragments, and how many rows they have. One pass; memory by the batch."""
    nearest = Nearest.of(len(asked))
    rows = 0
    for found, of in reader.each(pinned, fragments, _Search(index, asked, metric)):
        rows += of
        nearest.add(found.distances, found.addresses)
    order = np.argsort(nearest.distances, axis=1, kind="stable")
    nearest.distances = np.take_along_axis(nearest.distances, order, axis=1)
    nearest.addresses = np.take_along_axis(nearest.addresses, order, axis=1)
    return nearest, rows


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the nearest rows of some fragments. May be sent to another process."""

    index: AskedIndex
    asked: NDArray[Any]
    metric: str

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> tuple[Nearest, int]:
        """Those of these fragments, and how many rows they have."""
        nearest, rows = Nearest.of(len(self.asked)), 0
        for addresses, vectors in batches(pinned, self.index, group):
            rows += len(addresses)
            nearest.add(distances_of(self.asked, vectors, self.metric), addresses)
        return nearest, rows


def batches(
    pinned: Pinned, index: AskedIndex, fragments: Sequence[int]
) -> Iterator[tuple[NDArray[np.uint64], NDArray[Any]]]:
    """Addresses and vectors of all rows of these fragments, some thousand at a time."""
    with lance_errors("scan", pinned.uri):
        scanner = pinned.dataset.scanner(
            columns=[index.column],
            fragments=[pinned.fragments[fragment] for fragment in fragments],
            with_row_address=True,
            batch_size=_BATCH,
        )
        for batch in scanner.to_batches():
            yield batch.column(ROW_ADDRESS).to_numpy(), matrix_of(batch.column(index.column))


def search(
    pinned: Pinned, index: AskedIndex, asked: NDArray[Any], fragments: Sequence[int], **parameters: int
) -> list[SearchResult]:
    """For each query the addresses and vectors that the index finds in these fragments; ``parameters`` as of Lance."""
    nearest: dict[str, Any] = {"column": index.column, "q": asked, "k": K, "nprobes": NPROBES} | parameters
    with searching(pinned, index):
        hits = pinned.dataset.scanner(
            columns=[index.column],
            nearest=nearest,
            with_row_address=True,
            disable_scoring_autoprojection=True,
            fast_search=True,
            **_only(pinned, fragments),
            **of_index(pinned, index),
        ).to_table()
    of = hits["query_index"].to_numpy() if "query_index" in hits.column_names else np.zeros(hits.num_rows, np.int32)
    addresses = hits[ROW_ADDRESS].to_numpy()
    vectors = matrix_of(hits[index.column]) if hits.num_rows else np.empty((0, asked.shape[1]), asked.dtype)
    return [SearchResult(addresses[of == number], vectors[of == number]) for number in range(len(asked))]


def of_index(pinned: Pinned, index: AskedIndex) -> dict[str, Any]:
    """The argument that chooses one of several vector indexes of a column."""
    same = [other for other in pinned.indexes.values() if other.is_vector and other.column == index.column]
    return {} if len(same) == 1 else {"index_segments": [segment.uuid for segment in index.segments]}


def _only(pinned: Pinned, fragments: Sequence[int]) -> dict[str, Any]:
    """The argument that restricts a search to the rows of fragments.

    It could also say that fragments are allowed whole. Lance then subtracts deleted rows from 2 ** 32 bits, in half a
    gigabyte for each fragment.
    """
    if len(fragments) == len(pinned.fragments):
        return {}
    with lance_errors("read row ids of", pinned.uri):
        rows = pinned.dataset.scanner(
            columns=[],
            fragments=[pinned.fragments[fragment] for fragment in fragments],
            with_row_id=True,
            use_scalar_index=False,
        ).to_table()[ROW_ID]
    return {"row_addr_allowlist": encode_row_ids(rows.to_numpy())}


def _trained_rows(pinned: Pinned, index: AskedIndex) -> int:
    built = index.segments[0].fragments
    return sum(fragment.physical_rows for number, fragment in pinned.fragments.items() if number in built)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of an index. Recall of all rows and by age, the excess of appended ones; some missed rows."""

    recall: Interval | None
    built: Interval | None
    appended: Interval | None
    excess: Interval | None
    missed: Sequence[int]


def _measured(
    index: AskedIndex, asked: NDArray[Any], truth: Nearest, found: list[SearchResult], metric: str, seed: int
) -> _Measured:
    """Compare what was found with the nearest rows.

    Rows at the same distance are equal. Of those that share the last place, any age is right: by age, the others count.
    """
    near, real, sure, others, missed = [], [], [], [], []
    for number, answer in enumerate(found):
        distances = distances_of(asked[number : number + 1], answer.vectors, metric)[0]
        limit = truth.limit(number)
        real.append(truth.addresses[number][np.isfinite(truth.distances[number])])
        near.append(answer.addresses[distances <= limit + tie(limit)] if np.isfinite(limit) else answer.addresses)
        sure.append(truth.sure(number))
        others.append(
            answer.addresses[np.abs(distances - limit) > tie(limit)] if np.isfinite(limit) else answer.addresses
        )
        missed += np.setdiff1d(sure[-1], near[-1])[:1].tolist()
    recall = _share(real, near, None, seed)
    built = index.segments[0].fragments if len(index.segments) > 1 else index.covered
    ages = [built] if len(index.segments) > 1 else _older_parts(index)
    excesses = [_excess(sure, others, age, seed) for age in ages]
    excess = max((excess for excess in excesses if excess is not None), key=lambda excess: excess.low, default=None)
    old = np.array(sorted(built), dtype=np.int64)
    right = [np.intersect1d(wanted, got) for wanted, got in zip(sure, near, strict=True)]
    if len(index.segments) < 2:  # noqa: PLR2004 - one has no appended rows that are known
        return _Measured(recall, recall, None, excess, missed)
    return _Measured(
        recall, _share(sure, right, old, seed), _share(sure, right, old, seed, inverted=True), excess, missed
    )


def _share(
    real: _Addresses, near: _Addresses, ages: NDArray[np.int64] | None, seed: int, *, inverted: bool = False
) -> Interval | None:
    """The share of the nearest rows that were found: of those in fragments ``ages``, or not in them."""

    def counted(addresses: NDArray[np.uint64]) -> int:
        if ages is None:
            return int(addresses.size)
        return int((np.isin(fragments_of(addresses), ages) != inverted).sum())

    totals = [counted(addresses) for addresses in real]
    hits = [min(total, counted(addresses)) for total, addresses in zip(totals, near, strict=True)]
    return share_by_query(hits, totals, seed) if sum(totals) >= (1 if ages is None else _ENOUGH) else None


def _older_parts(index: AskedIndex) -> list[frozenset[int]]:
    """Of an index with one segment: an update into it does not say which rows it added, but they are the newest."""
    ordered = sorted(index.covered)
    ends = {len(ordered) - 1, len(ordered) * 3 // 4, len(ordered) // 2} - {0}
    return [frozenset(ordered[:end]) for end in sorted(ends)]


def _excess(real: _Addresses, found: _Addresses, older: frozenset[int], seed: int) -> Interval | None:
    """By how much the share of newer rows is larger in what was found than in the nearest rows; -1 to 1.

    Codes that are merely coarse give wrong rows of every age alike, and new rows that are like each other are near each
    other in both. Only distances of one age that cannot be compared with those of another one change the share.
    """
    ages = np.array(sorted(older), dtype=np.int64)
    pairs = [(of, got) for of, got in zip(real, found, strict=True) if of.size and got.size]
    newer = [[float((~np.isin(fragments_of(rows), ages)).mean()) for rows in pair] for pair in pairs]
    return mean_by_query(np.array([got - of for of, got in newer]), seed)


def _found_itself(
    asked: NDArray[Any], own: NDArray[np.uint64], found: list[SearchResult], metric: str
) -> Interval | None:
    """The share of rows that the search by their own vector finds, or one that is the same."""
    hits = 0
    for number, answer in enumerate(found):
        same = distances_of(asked[number : number + 1], answer.vectors, metric)[0]
        scale = 1.0 if metric != "l2" else float((asked[number].astype(np.float64) ** 2).sum())
        hits += bool((answer.addresses == own[number]).any() or (same <= tie(scale)).sum() >= K)
    return wilson(hits, len(found))


def _measure_multivector(pinned: Pinned, index: AskedIndex, drawn: Queries, base: dict[str, Any]) -> IndexAnswers:
    """Recall of an index of several vectors per row: Lance computes the exact answers, one scan for each query."""
    assert drawn.rows is not None  # noqa: S101 - the caller checked
    queries = several_vectors(drawn.rows[index.column])
    hits, totals = [], []
    for query in queries:
        asked = {"column": index.column, "q": np.asarray(query, np.float32), "k": K, "nprobes": NPROBES}
        answers = []
        for use_index in (False, True):
            with searching(pinned, index):
                answer = pinned.dataset.scanner(
                    columns=["_distance"],
                    nearest=asked | {"use_index": use_index, "refine_factor": REFINE},
                    with_row_address=True,
                    disable_scoring_autoprojection=True,
                    **(of_index(pinned, index) if use_index else {}),
                ).to_table()
            answers.append(answer)
        limit = max(answers[0]["_distance"].to_pylist(), default=0.0)
        near = sum(distance <= limit + tie(limit) for distance in answers[1]["_distance"].to_pylist())
        totals.append(answers[0].num_rows)
        hits.append(min(near, answers[0].num_rows))
    base["settings"] = f"k {K}, nprobes {NPROBES}, refine {REFINE}"
    return IndexAnswers(
        **base,
        queries=len(queries),
        recall=share_by_query(hits, totals, drawn.seed),
        rows_compared=sum(pinned.live.values()),
        bytes_at_most=drawn.bytes_at_most * len(queries),
    )


_ASKED = 2 * K
_FIRST = 16


@dataclass(frozen=True, slots=True)
class Pooled:
    """What two states find, as shares of the nearest rows of the pool.

    ``queries``: how many were asked. ``before``: the mean share of the earlier state. ``after``: that of the later one.
    ``change``: the mean of ``after - before``, query by query, with its interval; None: too few queries.
    """

    queries: int
    before: float
    after: float
    change: Interval | None


def compare_searches(
    before: Pinned, after: Pinned, index: AskedIndex, rows: pa.Table, seed: int = 0, tolerance: float | None = None
) -> Pooled:
    """Search by the vectors of ``rows`` in both states.

    Both are asked the same queries, for twice as many rows as are compared. Of the rows that any of the two finds, the
    nearest by exact distances are what each should have found; rows of both are the same if their distances are, as a
    compaction changes addresses. So the cost is that of a few searches, however large the table is. A state that has
    more rows is not worse for that: rows that are nearer are in the pool, too, and those that coarse codes make look
    nearer may take half of the places. If they take all of them, they hide the others.

    ``after``: the same rows with another state of the index. ``index``: the index, as ``after`` has it. ``rows``: its
    column and the addresses of rows that were drawn; rows that the earlier state covers, for a fair test. ``seed``: of
    the confidence interval. ``tolerance``: 16 random ones are enough if it shows that the share fell by less.
    Raises ``SearchError``: a state does not answer; ``StorageError``: the table cannot be read.
    """
    pooled, shares = Pooled(0, 0.0, 0.0, None), np.empty((0, 2))
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    for part in np.split(order, [] if tolerance is None else [_FIRST]):
        searches = [_found(state, index, rows.take(pa.array(part))) for state in (before, after)] if len(part) else ()
        shares = np.array([*shares, *(_shares(*pair) for pair in zip(*searches, strict=True))]).reshape(-1, 2)
        if len(shares):
            earlier, later = (float(share) for share in shares.mean(axis=0))
            pooled = Pooled(len(shares), earlier, later, mean_by_query(shares[:, 1] - shares[:, 0], seed))
        if tolerance is not None and pooled.change is not None and pooled.change.low > -tolerance:
            break
    return pooled


def _found(pinned: Pinned, index: AskedIndex, rows: pa.Table) -> list[NDArray[np.float64]]:
    """For each query the exact distances of the rows that are found."""
    state = pinned.indexes[index.name]
    metric = metric_of(pinned, state)
    if pa.types.is_list(index.arrow):
        return [_found_by_several(pinned, state, vector) for vector in several_vectors(rows[index.column])]
    vectors = matrix_of(rows[index.column])
    asked = vectors[usable_rows(vectors, metric)]
    every = list(pinned.fragments)
    return [
        distances_of(asked[number : number + 1], answer.vectors, metric)[0]
        for number, answer in enumerate(search(pinned, state, asked, every, k=_ASKED))
    ]


def _found_by_several(pinned: Pinned, index: AskedIndex, query: Any) -> NDArray[np.float64]:
    """The distances of what is found by several vectors; Lance computes exact ones of more rows than it returns."""
    nearest = {"column": index.column, "q": np.asarray(query, np.float32), "k": _ASKED, "nprobes": NPROBES}
    with searching(pinned, index):
        hits = pinned.dataset.scanner(
            columns=["_distance"],
            nearest=nearest | {"refine_factor": REFINE},
            disable_scoring_autoprojection=True,
            fast_search=True,
            **of_index(pinned, index),
        ).to_table()
    distances: NDArray[np.float64] = hits["_distance"].to_numpy().astype(np.float64)
    return distances


def _shares(before: NDArray[np.float64], after: NDArray[np.float64]) -> Sequence[float]:
    """The share of the nearest rows of both answers that each of them has."""
    nearest = _of_any(before, after)[:K]
    if not nearest:
        return 1.0, 1.0
    limit = nearest[-1] + tie(nearest[-1])
    return [min(1.0, float((distances <= limit).sum()) / len(nearest)) for distances in (before, after)]


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
