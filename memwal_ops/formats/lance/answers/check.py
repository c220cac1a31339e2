"""Ask every index of a table, and turn what is wrong into findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.verification import Finding, Severity, with_findings
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, UnsupportedFeatureError
from memwal_ops.formats.lance.answers.ask import ask
from memwal_ops.formats.lance.answers.asked_index import Pinned
from memwal_ops.formats.lance.answers.coverage import Coverage, coverage_of
from memwal_ops.formats.lance.answers.dot_codes import recall_of_codes
from memwal_ops.formats.lance.answers.lost_rows import ask_for_rows
from memwal_ops.formats.lance.answers.sample import sample_queries
from memwal_ops.formats.lance.answers.vector import measure, metric_of
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.verification import AnswersOptions
    from memwal_ops.formats.lance.answers.asked_index import AskedIndex
    from memwal_ops.formats.lance.answers.reading import Reader
    from memwal_ops.formats.lance.answers.sample import Queries
    from memwal_ops.formats.lance.table import Table

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
    table: Table, options: AnswersOptions, context: RunContext, seed: int, reader: Reader
) -> tuple[list[IndexAnswers], list[Finding]]:
    """Ask each index, or those that are named, on the pinned version. The budget is shared by them.

    Args:
        seed: draws the same queries again.
        reader: reads the rows that answers are compared with.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
        StorageError: the table cannot be read without its indexes.
    """
    pinned = Pinned(table.dataset, table.location.uri)
    names = chosen_indexes(table, options)
    left = options.max_bytes
    results: list[IndexAnswers] = []
    findings: list[Finding] = []
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
        results.append(with_findings(answers, wrong))
        findings += wrong
    return results, findings


def chosen_indexes(table: Table, options: AnswersOptions) -> list[str]:
    """The names of the indexes that are asked.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
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
    table: Table, pinned: Pinned, index: AskedIndex, samples: int, seed: int, max_bytes: int, reader: Reader
) -> tuple[IndexAnswers, Coverage | None]:
    """Ask one index, then for rows that its files lack."""
    base = base_indexes(table)[index.name]
    try:
        held = coverage_of(table, pinned, index, base, lambda values: _indexed(index, values), max_bytes // 4)
    except UnsupportedFeatureError as error:
        held = Coverage(unread=str(error))
    except MemwalOpsError as error:
        return IndexAnswers(**index.identified, queries=1, wrong=1, error=str(error)), None
    drawn = sample_queries(pinned, index, samples, seed, max_bytes - held.bytes_at_most)
    if index.is_vector:
        answers = measure(pinned, index, drawn, reader)
        answers = _with_codes(table, pinned, answers, drawn, max_bytes - held.bytes_at_most, reader)
    else:
        answers = ask(pinned, index, drawn, reader)
        if held.rows and index.type == "Inverted" and not answers.error:
            answers, held = ask_for_rows(pinned, index, answers, held, seed)
    return replace(answers, bytes_at_most=answers.bytes_at_most + held.bytes_at_most), held


def _with_codes(
    table: Table, pinned: Pinned, answers: IndexAnswers, drawn: Queries, max_bytes: int, reader: Reader
) -> IndexAnswers:
    """Compare the recall of an index with the metric dot with that of its codes."""
    index = pinned.indexes[answers.index]
    if answers.error or answers.skipped or metric_of(pinned, index) != "dot":
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
        return np.array([one is not None for one in values.to_pylist()], bool)
    if pa.types.is_fixed_size_list(values.type):
        return np.array([one is not None and bool(np.isfinite(one).all()) and any(one) for one in values.to_pylist()])
    return np.array([bool(one) for one in values.to_pylist()], bool)


def _remedy(table: Table, index: str) -> str:
    build = f"Build it anew: memwal-ops catchup URI --rebuild --index {index}"
    return build if "catchup" in table.jobs else f"Migrate the table first: memwal-ops migrate URI. {build}"


def _findings(answers: IndexAnswers, held: Coverage | None, remedy: str) -> Iterator[Finding]:
    place = f"the index {answers.index!r}"

    def finding(check: str, evidence: str, consequence: str) -> Finding:
        return Finding(Severity.ERROR, check, place, evidence, consequence, remedy, PAGE, about=answers.index)

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
    """The values of the rows that are examples."""
    wanted = [int(one) for one in (*answers.examples_missing, *answers.examples_extra)]
    values: Mapping[int, object] = {}
    for fragment in sorted({one >> 32 for one in wanted}):
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
