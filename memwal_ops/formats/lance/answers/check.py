"""Ask every index of a table, and turn what is wrong into findings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal_ops.core import verification
from memwal_ops.core.answers import IndexAnswers, Interval, examples, share_by_query
from memwal_ops.core.options import AnswersOptions, VerificationOptions
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.answers import vector
from memwal_ops.formats.lance.answers.ask import answer_of, ask, text_answers
from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned, RowReader
from memwal_ops.formats.lance.answers.sample import Queries, sample_queries, text_queries
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID, lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import (
    LISTED,
    MAPPED,
    BaseIndex,
    base_indexes,
    covered_by,
    fragments_held,
    index_folder,
    row_ids_in,
)
from memwal_ops.formats.lance.indexes.codebook import read_model
from memwal_ops.formats.lance.indexes.index_faults import FRAGMENTS_IN, fragments_in
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, fragments_of, had_moves
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.table import Table

    Verify = Callable[[Table, VerificationOptions, RunContext | None], verification.VerifyReport]


_MAX_ROWS = 8 << 20
_LOOKED_AT = 256
_TEXTS = 1 << 14


@dataclass(frozen=True, slots=True)
class CoverageGaps:
    """What files of an index lack.

    Attributes:
        fragments: fragments that the index claims, and of which its files have no row.
        rows: addresses of rows (up to 256 random ones) that it claims and has to hold, and that its files lack.
        lacking: how many rows its files lack, null values included.
        bytes_at_most: an upper bound of what was read.
        unread: why the files were not compared; empty: they were.
    """

    fragments: Sequence[int] = ()
    rows: Sequence[int] = ()
    lacking: int = 0
    bytes_at_most: int = 0
    unread: str = ""


def coverage_bytes(pinned: Pinned, index: AskedIndex, max_bytes: int) -> int:
    """An upper bound of what :func:`coverage_of` reads with the same arguments."""
    if index.type in FRAGMENTS_IN or (index.type in MAPPED and index.size <= max_bytes):
        return index.size
    if index.type not in LISTED and not index.is_vector:
        return 0
    cost = 8 * sum(pinned.physical(fragment) for fragment in index.covered if pinned.live.get(fragment))
    return cost if cost <= max_bytes else 0


def coverage_of(
    table: Table,
    pinned: Pinned,
    index: AskedIndex,
    base: BaseIndex,
    usable: Callable[[pa.ChunkedArray], NDArray[np.bool_]],
    max_bytes: int,
) -> CoverageGaps:
    """Compare one index.

    ``base``: the same in the manifest. ``usable``: for values whether an index of this type has to hold them.
    ``max_bytes``: about how much may be read.
    Raises ``StorageError``: a file of the index cannot be read.
    """
    claimed = sorted(fragment for fragment in index.covered if pinned.live.get(fragment))
    rows = sum(pinned.live[fragment] for fragment in claimed)
    if had_moves(table.manifest):
        return CoverageGaps(unread="a compaction left it to readers to find the rows that it moved")
    stable = bool(table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS)
    cost = 8 * sum(pinned.physical(fragment) for fragment in claimed)
    if index.type in FRAGMENTS_IN or (index.type in MAPPED and not stable and index.size <= max_bytes):
        read = fragments_in if index.type in FRAGMENTS_IN else fragments_held
        lacking_of = (covered_by([entry]) - read(table, base, entry) for entry in base.segments)
        unfound = sorted(filter(pinned.live.get, chain.from_iterable(lacking_of)))
        return CoverageGaps(tuple(unfound), bytes_at_most=index.size)
    if index.type not in LISTED and not index.is_vector:
        return CoverageGaps(unread=f"files of {index.type} have no list of rows")
    if rows > _MAX_ROWS or cost > max_bytes:
        return CoverageGaps(unread=f"it has {rows:,} rows, more than the budget lets be read")
    version = max((int(entry.index_version) for entry in base.segments), default=0)
    by_address = not stable or (index.type == "BTree" and version > 0)
    with lance_errors("read row ids of", pinned.uri):
        fragments = [pinned.fragments[fragment] for fragment in claimed]
        live = pinned.dataset.scanner(
            columns=[], fragments=fragments, with_row_address=True, with_row_id=True, use_scalar_index=False
        ).to_table()
    addresses = live[ROW_ADDRESS].to_numpy()
    ids = addresses if by_address else live[ROW_ID].to_numpy()
    lacking = np.sort(addresses[_lacking(table, base, addresses, ids, by_segment=not stable)])
    if not lacking.size:
        return CoverageGaps(bytes_at_most=cost)
    text = index.type == "Inverted"
    chosen = np.sort(np.random.default_rng(table.version).permutation(lacking)[: _TEXTS if text else _LOOKED_AT])
    values = _values(pinned, index, chosen)
    needed = chosen[usable(values)]
    if text and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        # An analyzer leaves nothing of many rows that are alike: stop words, signs. One of each is enough.
        _, first = np.unique(values.combine_chunks().dictionary_encode().indices.fill_null(-1), return_index=True)
        needed = np.intersect1d(needed, chosen[first])[:_LOOKED_AT]
    gone = [
        fragment
        for fragment in _fragment_ids(needed)
        if (fragments_of(lacking) == fragment).sum() == pinned.live[fragment]
    ]
    return CoverageGaps(tuple(gone), tuple(int(fragment) for fragment in needed), int(lacking.size), cost)


def _lacking(
    table: Table, index: BaseIndex, addresses: NDArray[np.uint64], ids: NDArray[np.uint64], *, by_segment: bool
) -> NDArray[np.bool_]:
    """Which rows the files lack: each segment those that it claims; with stable row ids, all together.

    (An update moves rows with stable ids to fragments that it adds to what any segment claims.)
    """
    if not by_segment:
        parts = [ids for entry in index.segments for ids in row_ids_in(table, index, entry)]
        return ~np.isin(ids, np.concatenate([np.empty(0, np.uint64), *parts]))
    lacking = np.zeros(len(ids), bool)
    for entry in index.segments:
        held = np.concatenate([np.empty(0, np.uint64), *row_ids_in(table, index, entry)])
        claimed = np.isin(fragments_of(addresses), np.array(sorted(covered_by([entry])), np.int64))
        lacking |= claimed & ~np.isin(ids, held)
    return lacking


def _fragment_ids(addresses: NDArray[np.uint64]) -> list[int]:
    return [int(fragment) for fragment in np.unique(fragments_of(addresses))]


def _values(pinned: Pinned, index: AskedIndex, addresses: NDArray[np.uint64]) -> pa.ChunkedArray:
    """The values of rows, in order of their addresses, which is that of the dataset's fragments."""
    positions: list[int] = []
    for fragment in _fragment_ids(addresses):
        with lance_errors("read rows of", pinned.uri):
            live = pinned.dataset.scanner(
                columns=[], fragments=[pinned.fragments[fragment]], with_row_address=True, use_scalar_index=False
            ).to_table()[ROW_ADDRESS]
        inside = addresses[fragments_of(addresses) == fragment]
        positions += (pinned.starts[fragment] + np.searchsorted(live.to_numpy(), inside)).tolist()
    return pinned.take(sorted(positions), index)[index.column]


def or_plan(verify: Verify) -> Callable[..., verification.VerifyReport | verification.AnswersPlan]:
    """A job that verifies a table by ``verify``, or, with ``dry_run``, estimates what asking its indexes costs."""

    def verified_or_planned(
        table: Table, options: VerificationOptions, context: RunContext | None = None
    ) -> verification.VerifyReport | verification.AnswersPlan:
        if isinstance(options, AnswersOptions) and options.dry_run:
            return plan_answers(table, options)
        return verify(table, options, context)

    return verified_or_planned


def plan_answers(table: Table, options: AnswersOptions) -> verification.AnswersPlan:
    """What :func:`memwal_ops.formats.lance.answers.check.check_answers` would ask and read with the same options.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
        StorageError: the drawn rows cannot be read.
    """
    pinned = Pinned(table.dataset, table.location.uri)
    names = chosen_indexes(table, options)
    left, seed = options.max_bytes, options.seed_at(table.version)
    planned = []
    for number, name in enumerate(names):
        index = pinned.indexes.get(name)
        if index is None:
            planned.append(not_described(table, name))
            continue
        plan = _planned(pinned, index, options.samples, seed, left // (len(names) - number))
        left = max(0, left - plan.bytes_at_most)
        planned.append(plan)
    return verification.AnswersPlan(table.version, planned, options.max_bytes)


def _planned(pinned: Pinned, index: AskedIndex, samples: int, seed: int, max_bytes: int) -> IndexAnswers:
    held = coverage_bytes(pinned, index, max_bytes // 4)
    drawn = sample_queries(pinned, index, samples, seed, max_bytes - held)
    queries, cost = len(drawn.queries), drawn.bytes_at_most
    if index.is_vector and drawn.rows is not None:
        queries = drawn.rows.num_rows
        if pa.types.is_list(index.arrow):
            queries = min(queries, vector.MULTIVECTOR_QUERIES)
            cost *= queries
        elif vector.metric_of(pinned, index) == "dot":  # its codes are compared, too
            cost += cost + index.size
    skipped = drawn.skipped
    if not skipped and index.is_vector and not drawn.fragments:
        skipped = "no fragment fits into --max-bytes"
    return IndexAnswers(index=index.name, type=index.type, queries=queries, bytes_at_most=cost + held, skipped=skipped)


_TYPES = frozenset({"IVF_PQ", "IVF_HNSW_PQ"})


def recall_of_codes(
    table: Table, pinned: Pinned, index: AskedIndex, base: BaseIndex, drawn: Queries, max_bytes: int, reader: RowReader
) -> tuple[Interval, Interval] | None:
    """The recall of a search of all partitions without refinement, and that of comparing rows by their codes.

    For this metric pylance encodes each row as it is. Its update encodes rows relative to their centroid, and searches
    them as if they were encoded as they are (docs/upstream.md). Where all rows of a segment went through such an
    update, rows of every age are found equally badly, and a search by a row's own vector need not find that row for
    this metric. So the recall is compared with that of the trained codebook itself: rows are encoded here, and compared
    by their codes.

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
    vectors = vector.matrix_of(drawn.rows[index.column])
    asked = vectors[vector.usable_rows(vectors, "dot")].astype(np.float64)
    if not len(asked):
        return None
    exact, coded = vector.Nearest.of(len(asked)), vector.Nearest.of(len(asked))
    work = _Search(index, asked, model.codebook.astype(np.float64))
    for near, by_codes in reader.each(pinned, drawn.fragments, work):
        exact.add(near.distances, near.addresses)
        coded.add(by_codes.distances, by_codes.addresses)
    answers = vector.search(pinned, index, asked, drawn.fragments, nprobes=len(model.centroids))
    truth = [exact.sure(number) for number in range(len(asked))]
    return _share(truth, [answer.addresses for answer in answers], drawn.seed), _share(
        truth, [*coded.addresses], drawn.seed
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the nearest rows of fragments, by vectors and by codes. May be sent to another process."""

    index: AskedIndex
    asked: NDArray[np.float64]
    codebook: NDArray[np.float64]

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> tuple[vector.Nearest, vector.Nearest]:
        exact, coded = vector.Nearest.of(len(self.asked)), vector.Nearest.of(len(self.asked))
        for addresses, rows in vector.batches(pinned, self.index, group):
            usable = vector.usable_rows(rows, "dot")
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
    share = share_by_query(hits, [min(vector.K, len(of)) for of in truth], seed)
    return share or Interval(1.0, 0.0, 1.0)


_ROWS = 256


def ask_for_rows(
    pinned: Pinned, index: AskedIndex, answers: IndexAnswers, held: CoverageGaps, seed: int
) -> tuple[IndexAnswers, CoverageGaps]:
    """Add what is missing, and keep of the coverage what is proven by it."""
    random = np.random.default_rng(seed)
    rows = np.array(held.rows[:_ROWS], np.uint64)
    missing: set[int] = set()
    wrong = asked = 0
    for fragment in np.unique(fragments_of(rows)).tolist():
        inside = rows[fragments_of(rows) == fragment]
        table = pinned.dataset.scanner(
            columns=[index.column], fragments=[pinned.fragments[fragment]], with_row_address=True
        ).to_table()
        here = np.isin(table["_rowaddr"].to_numpy(), inside)
        queries = list(text_queries(index, table.filter(here)[index.column], int(here.sum()) * 4, random))
        truth = text_answers(pinned, index, queries, [fragment])
        for number, query in enumerate(queries):
            asked += 1
            lost = np.setdiff1d(np.intersect1d(truth[number], inside), answer_of(pinned, index, query, [fragment]))
            wrong += bool(lost.size)
            missing.update(lost.tolist())
    fragments = tuple(fragment for fragment in held.fragments if any(row >> 32 == fragment for row in missing))
    held = replace(held, rows=tuple(sorted(missing)), fragments=fragments)
    shown = examples(sorted({*answers.examples_missing, *missing}))
    answers = replace(answers, queries=answers.queries + asked, wrong=answers.wrong + wrong, examples_missing=shown)
    return replace(answers, missing=answers.missing + len(missing)), held


ANSWERS = frozenset({"index_misses_rows", "index_returns_dead_rows", "index_recall_low", "index_coverage_wrong"})
"""The checks of findings on answers."""
PAGE = "runbooks/wrong-answers.md"
# A healthy index of any type finds nearly each row by its own vector.
_FINDS_ITSELF = 0.9
# Beyond the confidence intervals, which are of 99 %.
_MARGIN = 0.05
_GRAPH_MARGIN = 0.2
# Of a healthy index the excess is about 0.
_EXCESS = 0.2
# Codes fit the rows that they were trained with better than any others, if these are fewer than 39 for each of the 256
# centroids of a code (the minimum that faiss advises): then a difference by age shows nothing.
_TRAINED_ENOUGH = 39 * 256
_SHOWN = 5


def check_answers(
    table: Table, options: AnswersOptions, context: RunContext, seed: int, reader: RowReader
) -> tuple[list[IndexAnswers], list[verification.Inconsistency]]:
    """Ask each index, or those that are named, on the pinned version. The budget is shared by them.

    ``seed``: draws the same queries again. ``reader``: reads the rows that answers are compared with.
    Raises ``InvalidUsageError``: there is no index of a name that was given; ``StorageError``: the table cannot be read
    without its indexes.
    """
    pinned = Pinned(table.dataset, table.location.uri)
    names = chosen_indexes(table, options)
    left = options.max_bytes
    results: list[IndexAnswers] = []
    findings: list[verification.Inconsistency] = []
    for number, name in enumerate(names):
        context.advance("asking indexes", "indexes", total=len(names))
        index = pinned.indexes.get(name)
        if index is None:
            results.append(not_described(table, name))
            continue
        share = left // (len(names) - number)
        answers, held = _check(table, pinned, index, options.samples, seed, share, reader)
        left = max(0, left - answers.bytes_at_most)
        if options.show_values:
            answers = replace(answers, values=_shown(pinned, index, answers))
        wrong = [*_findings(answers, held, _remedy(table, name))]
        results.append(verification.with_findings(answers, wrong))
        findings += wrong
    return results, findings


def chosen_indexes(table: Table, options: AnswersOptions) -> list[str]:
    """The names of the indexes that are asked.

    Raises ``InvalidUsageError``: there is no index of a name that was given.
    """
    known = base_indexes(table)
    unknown = sorted(set(options.index) - known.keys())
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidUsageError(f"The table has no index {unknown[0]!r}; it has: {listed}.")
    return [name for name in known if not options.index or name in options.index]


def not_described(table: Table, name: str) -> IndexAnswers:
    """The entry of an index that pylance does not list."""
    return IndexAnswers(index=name, type=base_indexes(table)[name].type, skipped="pylance does not describe it")


def _check(
    table: Table, pinned: Pinned, index: AskedIndex, samples: int, seed: int, max_bytes: int, reader: RowReader
) -> tuple[IndexAnswers, CoverageGaps | None]:
    base = base_indexes(table)[index.name]
    try:
        held = coverage_of(table, pinned, index, base, lambda values: _indexed(index, values), max_bytes // 4)
    except UnsupportedFeatureError as error:
        held = CoverageGaps(unread=str(error))
    except MemwalOpsError as error:
        return IndexAnswers(**index.identified, queries=1, wrong=1, error=str(error)), None
    drawn = sample_queries(pinned, index, samples, seed, max_bytes - held.bytes_at_most)
    if index.is_vector:
        answers = vector.measure(pinned, index, drawn, reader)
        answers = _with_codes(table, pinned, answers, drawn, max_bytes - held.bytes_at_most, reader)
    else:
        answers = ask(pinned, index, drawn, reader)
        if held.rows and index.type == "Inverted" and not answers.error:
            answers, held = ask_for_rows(pinned, index, answers, held, seed)
    return replace(answers, bytes_at_most=answers.bytes_at_most + held.bytes_at_most), held


def _with_codes(
    table: Table, pinned: Pinned, answers: IndexAnswers, drawn: Queries, max_bytes: int, reader: RowReader
) -> IndexAnswers:
    """Compare the recall of an index with the metric dot with that of its codes."""
    index = pinned.indexes[answers.index]
    if answers.error or answers.skipped or vector.metric_of(pinned, index) != "dot":
        return answers
    base = base_indexes(table)[index.name]
    recalls = recall_of_codes(table, pinned, index, base, drawn, max_bytes, reader)
    if recalls is None:
        return answers
    read = answers.bytes_at_most + drawn.bytes_at_most + index.size
    return replace(answers, probed_recall=recalls[0], codes_recall=recalls[1], bytes_at_most=read)


def _indexed(index: AskedIndex, values: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which values an index has to hold: any; of a text index all texts; of a vector index finite vectors."""
    if index.type == "BTree":
        return np.ones(len(values), bool)
    if not index.is_vector:
        return np.asarray(values.is_valid())
    if pa.types.is_fixed_size_list(values.type):
        return np.array(
            [value is not None and bool(np.isfinite(value).all()) and any(value) for value in values.to_pylist()]
        )
    return np.array([bool(value) for value in values.to_pylist()], bool)


def _remedy(table: Table, index: str) -> str:
    build = f"Build it anew: memwal-ops catchup URI --rebuild --index {index}"
    return build if "catchup" in table.jobs else f"Migrate the table first: memwal-ops migrate URI. {build}"


def _findings(answers: IndexAnswers, held: CoverageGaps | None, remedy: str) -> Iterator[verification.Inconsistency]:
    place = f"the index {answers.index!r}"

    def finding(check: str, evidence: str, consequence: str) -> verification.Inconsistency:
        return verification.Inconsistency(
            verification.Severity.ERROR, check, place, evidence, consequence, remedy, PAGE, about=answers.index
        )

    if answers.error:
        yield finding("index_misses_rows", f"It fails: {answers.error}".rstrip(".") + ".", "Queries by it fail.")
    if answers.missing:
        yield finding(
            "index_misses_rows",
            f"{counted(answers.wrong, 'answer')} of {answers.queries:,} {_were(answers.wrong)} wrong; "
            f"{counted(answers.missing, 'row')} {_were(answers.missing)} missing, for example at "
            f"{_listed(answers.examples_missing)}.",
            "Queries by it do not find rows that exist, and pylance's merge_insert would insert their keys again.",
        )
    if answers.extra:
        yield finding(
            "index_returns_dead_rows",
            f"{counted(answers.extra, 'row')} that do not match {_were(answers.extra)} in answers, for example at "
            f"{_listed(answers.examples_extra)}.",
            "Queries by it return rows that do not match, or that a later write replaced.",
        )
    for why in why_low(answers, by_age="PQ" not in answers.type or (answers.trained_rows or 0) >= _TRAINED_ENOUGH):
        yield finding("index_recall_low", why, "Searches by it do not find the nearest rows.")
    if held is not None and held.fragments:
        yield finding(
            "index_coverage_wrong",
            f"It claims to cover {'fragment' if len(held.fragments) == 1 else 'fragments'} "
            f"{_listed(held.fragments[:_SHOWN])}{' and more' if len(held.fragments) > _SHOWN else ''}, of which its "
            "files have no row.",
            "Queries by it do not find rows that exist.",
        )
    elif held is not None and held.rows and not answers.missing:
        yield finding(
            "index_coverage_wrong",
            f"Its files lack {counted(held.lacking, 'row')} of the fragments that it claims, for example at "
            f"{_listed(held.rows[:_SHOWN])}.",
            "Queries by it do not find rows that exist.",
        )


def why_low(answers: IndexAnswers, *, by_age: bool = True) -> Iterator[str]:
    """Why the recall of a vector index is too low for a healthy one; nothing: it is not.

    Recall as such is no reason: that of few probes or coarse codes is low by design.

    Args:
        by_age: whether rows that were appended are compared with those that it was trained with.
    """
    itself, excess = answers.found_itself, answers.appended_rows_excess
    built, appended = answers.built_rows_recall, answers.appended_rows_recall
    probed, codes = answers.probed_recall, answers.codes_recall
    if itself is not None and itself.high < _FINDS_ITSELF:
        yield (
            f"A search by the vector of a row finds that row in {itself.value:.0%} of {answers.queries:,} cases: its "
            "centroids or codes are not those of its rows."
        )
    if excess is not None and excess.low > _EXCESS:
        yield (
            f"Rows that were appended hide older ones: their share of what it finds is larger by {excess.value:.2f} "
            "than their share of the nearest rows."
        )
    elif probed is not None and codes is not None and probed.high < codes.low - _margin(answers.type):
        yield (
            f"It finds {probed.value:.1%} of the nearest rows where their codes would give {codes.value:.1%}: its rows "
            "have other codes."
        )
    elif by_age and built is not None and appended is not None and appended.high < built.low - _MARGIN:
        yield (
            f"It finds {appended.value:.1%} of the nearest rows that were appended since it was trained, and "
            f"{built.value:.1%} of those that it was trained with."
        )


def _margin(type_: str) -> float:
    """How much a search of all partitions may lack of what the codes give: a graph is not searched to its end."""
    return _GRAPH_MARGIN if "HNSW" in type_ else _MARGIN


def _shown(pinned: Pinned, index: AskedIndex, answers: IndexAnswers) -> list[str]:
    wanted = [int(address) for address in (*answers.examples_missing, *answers.examples_extra)]
    values: Mapping[int, object] = {}
    for fragment in sorted({address >> 32 for address in wanted}):
        rows = pinned.dataset.scanner(
            columns=[index.column], fragments=[pinned.fragments[fragment]], with_row_address=True
        ).to_table()
        chosen = rows.filter(pa.array(np.isin(rows[ROW_ADDRESS].to_numpy(), np.array(wanted, np.uint64))))
        values = {**values, **dict(zip(chosen[ROW_ADDRESS].to_pylist(), chosen[index.column].to_pylist(), strict=True))}
    return [f"{address}: {values[address]!r:.200}" for address in wanted if address in values]


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _listed(addresses: object) -> str:
    return ", ".join(map(str, addresses)) or "?"  # type: ignore[call-overload]
