"""Ask a scalar or text index, and read the same answers without it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from lance.indices import IndexConfig

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.answers.asked_index import ROWS, AskedIndex, Pinned, RowReader
from memwal_ops.formats.lance.answers.sample import Queries, SampledQuery
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors
from memwal_ops.formats.lance.indexes.index_arguments import similarity_options
from memwal_ops.formats.lance.wire.version_manifest import fragments_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Addresses = NDArray[np.uint64]

BY_MEMORY = frozenset({"Inverted", "MinHashLsh"})
"""Types whose right answers come from an index in memory."""
_SHOWN = 5
_TEXT_ROWS = 1 << 17
_ANY_NUMBER = 1 << 40
_BUILD_ONLY = frozenset({"document_granularity"})


@dataclass
class _Difference:
    """What was found wrong so far; flat memory. ``failed``: how the index failed to answer; empty: it did not."""

    failed: str = ""
    rows: int = 0
    wrong: set[int] = field(default_factory=set)
    missing: int = 0
    extra: int = 0
    missed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)

    def compare(self, number: int, expected: Addresses, found: Addresses) -> None:
        """Add the difference of one answer; both are in order."""
        if np.array_equal(expected, found):  # a tenth of the time of the differences
            return
        lacking = np.setdiff1d(expected, found)
        more = np.setdiff1d(found, expected)
        self.missing += lacking.size
        self.extra += more.size
        if lacking.size or more.size:
            self.wrong.add(number)
        self._show(lacking.tolist(), more.tolist())

    def add(self, other: _Difference) -> None:
        """Add what was found wrong in other fragments."""
        self.failed = self.failed or other.failed
        self.rows += other.rows
        self.wrong |= other.wrong
        self.missing += other.missing
        self.extra += other.extra
        self._show(other.missed, other.added)

    def _show(self, missed: Sequence[int], added: Sequence[int]) -> None:
        self.missed += missed[: max(0, _SHOWN - len(self.missed))]
        self.added += added[: max(0, _SHOWN - len(self.added))]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares the answers of an index for some fragments. May be sent to another process."""

    index: AskedIndex
    queries: Sequence[SampledQuery]

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> _Difference:
        difference = _Difference(rows=sum(pinned.fragments[fragment].count_rows() for fragment in group))
        answers = text_answers if self.index.type in BY_MEMORY else scanned_answers
        truth = answers(pinned, self.index, self.queries, group)
        try:
            for number, query in enumerate(self.queries):
                difference.compare(number, truth[number], answer_of(pinned, self.index, query, group))
        except _IndexError as error:
            difference.failed = str(error)
        return difference


def ask(pinned: Pinned, index: AskedIndex, drawn: Queries, reader: RowReader) -> IndexAnswers:
    """Compare the answers of a scalar or text index with those of a scan.

    Raises ``StorageError``: rows of the table cannot be read without the index.
    """
    base = index.identified
    if drawn.skipped:
        return IndexAnswers(**base, skipped=drawn.skipped)
    try:
        queries = _answered(pinned, index, drawn.queries)
    except MemwalOpsError as error:
        if not _can_be_planned(pinned, drawn.queries):
            return IndexAnswers(**base, skipped=f"pylance takes no such conditions on {index.arrow}")
        return IndexAnswers(**base, queries=len(drawn.queries), wrong=len(drawn.queries), error=str(error))
    if not queries:
        return IndexAnswers(**base, skipped="pylance does not use it, or does not say which index it uses")
    difference = _Difference()
    most = _TEXT_ROWS if index.type in BY_MEMORY else ROWS
    for comparison in reader.each(pinned, drawn.fragments, _Comparison(index, queries), most):
        difference.add(comparison)
        if difference.failed:
            break
    if not difference.failed:
        _look_up(pinned, index, drawn, queries, difference, reader)
    wrong = max(len(difference.wrong), 1 if difference.failed else 0)
    return IndexAnswers(
        **base,
        queries=len(queries),
        wrong=wrong,
        missing=difference.missing,
        extra=difference.extra,
        examples_missing=difference.missed,
        examples_extra=difference.added,
        rows_compared=difference.rows,
        bytes_at_most=drawn.bytes_at_most,
        error=difference.failed,
    )


class _IndexError(MemwalOpsError):
    """An index fails to answer."""

    reason = "index_fails"


def _answered(pinned: Pinned, index: AskedIndex, queries: Sequence[SampledQuery]) -> Sequence[SampledQuery]:
    """Those that pylance answers by this index: of the only one of a column mostly all, which one plan shows."""
    together = " OR ".join(f"({query.condition})" for query in queries if query.words is None)
    alone = sum(other.column == index.column for other in pinned.indexes.values()) == 1
    if together and alone and _uses(pinned, index, SampledQuery("all", together)):
        return queries
    return [query for query in queries if _uses(pinned, index, query)]


def _uses(pinned: Pinned, index: AskedIndex, query: SampledQuery) -> bool:
    """Whether pylance answers a query by this index (and not by another one of its column, or by none).

    Raises ``StorageError``: it fails to plan the query.
    """
    if query.words is not None:
        return sum(other.type == index.type and other.column == index.column for other in pinned.indexes.values()) == 1
    with lance_errors("plan a query of", pinned.uri):
        plan = _scanner(pinned, query).explain_plan(verbose=True)
    return any("ScalarIndexQuery" in line and f"@{index.name}(" in line for line in plan.splitlines())


def _can_be_planned(pinned: Pinned, queries: Sequence[SampledQuery]) -> bool:
    """Whether pylance plans these queries at least without an index."""
    conditions = {f"q{number}": query.condition for number, query in enumerate(queries) if query.words is None}
    try:
        with lance_errors("plan a query of", pinned.uri):
            pinned.dataset.scanner(columns=conditions, use_scalar_index=False).explain_plan()
    except MemwalOpsError:
        return False
    return True


def answer_of(pinned: Pinned, index: AskedIndex, query: SampledQuery, fragments: Sequence[int]) -> Addresses:
    """Addresses of the rows of these fragments that the index finds, in order."""
    addresses = [batch.column(ROW_ADDRESS).to_numpy() for batch in _asked(pinned, index, query, fragments)]
    return np.sort(np.concatenate([np.empty(0, np.uint64), *addresses]))


def scanned_answers(
    pinned: Pinned, _: AskedIndex, queries: Sequence[SampledQuery], fragments: Sequence[int]
) -> Mapping[int, Addresses]:
    """For each condition the addresses of the rows of these fragments for which a scan computes that it is true."""
    with lance_errors("scan", pinned.uri):
        rows = pinned.dataset.scanner(
            columns=_columns(queries),
            fragments=[pinned.fragments[fragment] for fragment in fragments],
            with_row_address=True,
            use_scalar_index=False,
        ).to_table()
    return _matching(rows, rows[ROW_ADDRESS], len(queries))


def _columns(queries: Sequence[SampledQuery]) -> dict[str, str]:
    return {f"q{number}": query.condition for number, query in enumerate(queries)}


def _matching(rows: pa.Table, addresses: pa.ChunkedArray, queries: int) -> Mapping[int, Addresses]:
    matches = (rows[f"q{number}"].fill_null(False).to_numpy() for number in range(queries))  # noqa: FBT003 - NULL does not match
    return {number: np.sort(addresses.to_numpy()[match]) for number, match in enumerate(matches)}


def text_answers(
    pinned: Pinned, index: AskedIndex, queries: Sequence[SampledQuery], fragments: Sequence[int]
) -> Mapping[int, Addresses]:
    """For each full-text query the addresses of the rows that it matches, by an index in memory of these rows alone.

    It is built with the same analyzer, because only Lance knows it (stemming, stop words).
    """
    with lance_errors("scan", pinned.uri):
        rows = pinned.dataset.scanner(
            columns=[index.column],
            fragments=[pinned.fragments[fragment] for fragment in fragments],
            with_row_address=True,
            use_scalar_index=False,
        ).to_table()
    return _answers_of_texts(pinned, index, queries, rows)


def _answers_of_texts(
    pinned: Pinned, index: AskedIndex, queries: Sequence[SampledQuery], rows: pa.Table
) -> Mapping[int, Addresses]:
    addresses = rows[ROW_ADDRESS].to_numpy()
    with lance_errors("index texts of", pinned.uri):
        memory = lance.write_dataset(
            index.rows_of(rows[index.column]), "memory://answers", max_rows_per_file=_TEXT_ROWS * 8
        )
        _create_like(index, memory)
        answers = {}
        for number, query in enumerate(queries):
            scanner = memory.scanner(
                columns=[], with_row_address=True, disable_scoring_autoprojection=True, **_asking(query)
            )
            answers[number] = np.sort(addresses[scanner.to_table()[ROW_ADDRESS].to_numpy().astype(np.int64)])
    return answers


def _look_up(
    pinned: Pinned,
    index: AskedIndex,
    drawn: Queries,
    queries: Sequence[SampledQuery],
    difference: _Difference,
    reader: RowReader,
) -> None:
    """The drawn rows of the other fragments must be in the answers whose condition they fulfil."""
    if not drawn.others or drawn.rows is None:
        return
    addresses = drawn.rows[ROW_ADDRESS].to_numpy()
    outside = np.isin(fragments_of(addresses), np.array(drawn.others))
    if not outside.any():
        return
    rows = drawn.rows.filter(pa.array(outside))
    answers = _answers_of_texts if index.type in BY_MEMORY else _answers_of_rows
    truth = answers(pinned, index, queries, rows)
    try:
        for number, query in enumerate(queries):
            reader.checkpoint()
            expected = truth[number]
            if not expected.size:
                continue
            there = np.zeros(expected.size, bool)
            touched = np.unique(fragments_of(expected)).tolist()
            for batch in _asked(pinned, index, query, touched):
                there |= np.isin(expected, batch.column(ROW_ADDRESS).to_numpy())
            difference.compare(number, expected, expected[there])
    except _IndexError as error:
        difference.failed = str(error)


def _answers_of_rows(
    pinned: Pinned, index: AskedIndex, queries: Sequence[SampledQuery], rows: pa.Table
) -> Mapping[int, Addresses]:
    """For each condition the addresses of those of ``rows`` for which it is true."""
    with lance_errors("compare rows of", pinned.uri):
        few = lance.write_dataset(index.rows_of(rows[index.column]), "memory://drawn")
        truth = few.scanner(columns=_columns(queries)).to_table()
    return _matching(truth, rows[ROW_ADDRESS], len(queries))


def _asked(
    pinned: Pinned, index: AskedIndex, query: SampledQuery, fragments: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    try:
        with lance_errors("ask an index of", pinned.uri):
            yield from _scanner(pinned, query, fragments).to_batches()
    except MemwalOpsError as error:
        raise _IndexError(f"index {index.name} does not answer: {error}") from error


def _asking(query: SampledQuery) -> dict[str, Any]:
    if query.words is None:
        return {"filter": query.condition}
    similar = query.what == "similar"
    return {"nearest": query.text, "limit": _ANY_NUMBER} if similar else {"full_text_query": query.text}


def _create_like(index: AskedIndex, memory: lance.LanceDataset) -> None:
    """Create the only index of a dataset in memory by the parameters of a text index."""
    if index.type == "MinHashLsh":
        kind = IndexConfig("minhashlsh", similarity_options(index.details))
        memory.create_scalar_index(index.column, kind)
        return
    parameters = {name: value for name, value in index.details.items() if value is not None and name not in _BUILD_ONLY}
    memory.create_scalar_index(index.column, "INVERTED", **parameters)


def _scanner(pinned: Pinned, query: SampledQuery, fragments: Sequence[int] | None = None) -> lance.LanceScanner:
    asked = _asking(query)
    if fragments is not None:
        asked["fragments"] = [pinned.fragments[fragment] for fragment in fragments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pinned.dataset.scanner(columns=[], with_row_address=True, disable_scoring_autoprojection=True, **asked)
