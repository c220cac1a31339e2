"""Ask an index state that is not published yet, and compare its answers with those of the state before.

Scalar and text indexes are compared with a scan of the fragments whose segments are others than before: answers that
the later state gets wrong, and more of them than the earlier one, make it worse. Searches of vector indexes are
compared with each other: their cost does not depend on the size of the table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

import numpy as np

from memwal_ops.core.documents import document
from memwal_ops.errors import AnswersWorseError, MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.answers.ask import BY_MEMORY, ask
from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned, RowReader
from memwal_ops.formats.lance.answers.sample import MAX_BYTES, SAMPLES, Queries, sample_queries
from memwal_ops.formats.lance.answers.vector import SearchError, compare_searches
from memwal_ops.formats.lance.commit.commit import opened_with
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, covered_by
from memwal_ops.text import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set as AbstractSet

    import pyarrow as pa

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.commit.publication import CommitNote
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

OFF, SAMPLE, STRICT = "off", "sample", "strict"
_ATTEMPTS = 3
_FEW = 16
_FEW_BYTES = 8 << 20
# Texts are indexed in memory to know the right answers, which costs ten times a scan of other values.
_FEW_BYTES_OF_TEXTS = 1 << 20
# Above, a sample asks for single values, which read a few pages of it, and for no ranges, which read all.
_SMALL_INDEX = 8 << 20
_WHOLE = frozenset({"range", "null"})
# By how much the share of the pool may fall, beyond its interval of confidence.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """Compared answers of one index, before and after.

    Attributes:
        wrong: of a scalar or text index: answers of the later state that are wrong.
        wrong_before: the same of the earlier state; None: it was not asked, since none was wrong.
        found: of a vector index: the share of the nearest rows that the later state finds.
        found_before: and that of the earlier one.
        worse: why the later state is worse; empty: it is not.
        skipped: why nothing was asked; empty: it was.
        bytes_at_most: an upper bound of what was read.
        finds: of a scalar or text index: the share of wrong rows from which on it finds one with 99 %.
    """

    queries: int = 0
    wrong: int = 0
    wrong_before: int | None = None
    found: float | None = None
    found_before: float | None = None
    worse: str = ""
    skipped: str = ""
    bytes_at_most: int = 0
    seconds: float = 0.0
    finds: float | None = None

    def to_json(self) -> dict[str, object]:
        """The ``answers`` entry of an index in a report."""
        recall, before = (None if value is None else round(value, 4) for value in (self.found, self.found_before))
        worse, skipped = self.worse or None, self.skipped or None
        return document(self, found=recall, found_before=before, worse=worse, skipped=skipped)


def compare_answers(
    table: Table,
    index: BaseIndex,
    entries: Sequence[table_pb2.IndexMetadata],
    mode: str,
    note: CommitNote,
    context: RunContext,
    later: Table | None = None,
) -> AnswerComparison:
    """Compare the answers of an index of ``table`` with those that it would give with other segments: ``entries``.

    ``mode``: ``sample``: a few queries, and recall may fall by a tolerance; ``strict``: more queries, and it must not
    fall; ``off``: none. ``context``: can stop the run between two queries. ``later``: the version that would have the
    segments, with the same rows; None: ``table`` with them. Raises ``StorageError``: rows cannot be read.
    """
    if mode == OFF:
        return AnswerComparison(skipped="--answers off")
    started = time.monotonic()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with opened_with(later or table, entries, note) as dataset:
                after = Pinned(dataset, table.location.uri)
                compared = _compare(table, index, after, mode, note, context)
            break
        except ObjectNotFoundError:  # the manifest of the trial was taken for a leftover: the table is unchanged
            if attempt == _ATTEMPTS:
                raise
    return replace(compared, seconds=time.monotonic() - started)


def refuse_worse(index: BaseIndex, compared: AnswerComparison, remedy: str) -> None:
    """Raise ``AnswersWorseError``, with the figures, if the later state is worse."""
    if compared.worse:
        raise AnswersWorseError(
            f"Index {index.name} ({index.type}) would answer worse, and was not published: {compared.worse}.",
            remedy=f"{remedy} With --answers off it is published as it is.",
        )


def cost_of(compared: Iterable[AnswerComparison], indexes: int, seconds: float) -> str | None:
    """What it took to compare answers, as text; None: nothing was asked.

    ``compared``: the comparisons of a run. ``indexes``: of how many indexes. ``seconds``: how long the run took.
    """
    asked = [comparison for comparison in compared if comparison.queries]
    if not asked:
        return None
    spent = sum(comparison.seconds for comparison in asked)
    share = spent / max(seconds, spent, 1e-9)
    finds = max((comparison.finds for comparison in asked if comparison.finds is not None), default=None)
    power = "" if finds is None else f" If {finds:.2%} of the rows were wrong, that would show with 99% certainty."
    return (
        f"answers: {counted(sum(comparison.queries for comparison in asked), 'query', 'queries')} of "
        f"{counted(indexes, 'index', 'indexes')} before and after; at most "
        f"{size_text(sum(comparison.bytes_at_most for comparison in asked))} read, {share:.1%} of the time.{power}"
    )


def _compare(
    table: Table, index: BaseIndex, after: Pinned, mode: str, note: CommitNote, context: RunContext
) -> AnswerComparison:
    asked = after.indexes.get(index.name)
    if asked is None:
        return AnswerComparison(skipped="pylance does not describe it")
    few = mode == SAMPLE
    if not asked.is_vector:
        return _of_scalar(table, index, after, note, context, few=few)
    before = Pinned(table.dataset, table.location.uri)
    # Rows that both states have: others would be found by one of them alone. Fragments that were not there before have
    # rows of those that they replace.
    uncovered = before.fragments.keys() - index.covered
    known = _some(sorted(asked.covered & after.fragments.keys() - uncovered), table.version)
    if not known:
        return AnswerComparison(skipped="it had no rows")
    drawn = _draw(after, asked, known, table.version, MAX_BYTES, few=few)
    return _of_vectors(before, after, asked, drawn, few=few)


def _of_scalar(
    table: Table, index: BaseIndex, after: Pinned, note: CommitNote, context: RunContext, *, few: bool
) -> AnswerComparison:
    asked = after.indexes[index.name]
    small = asked.size <= _SMALL_INDEX
    texts = asked.type in BY_MEMORY
    rows = MAX_BYTES if not few else _FEW_BYTES_OF_TEXTS if texts else _FEW_BYTES
    budget = rows + (asked.size * 2 if small or not few else 0)
    same = {(str(UUID(bytes=entry.uuid.uuid)), covered_by([entry])) for entry in index.segments}
    others = [part.fragments for part in asked.segments if (part.uuid, part.fragments) not in same]
    changed = after.fragments.keys() & set().union(*others)
    drawn = _draw(after, asked, changed or asked.covered, table.version, budget, few=few)
    if few and not small:
        drawn = replace(drawn, queries=tuple(query for query in drawn.queries if query.what not in _WHOLE))
    answers = ask(after, asked, drawn, RowReader(context.checkpoint))
    if answers.skipped:
        return AnswerComparison(skipped=answers.skipped)
    rows = answers.rows_compared if any(query.what == "range" for query in drawn.queries) else answers.queries
    finds = round(1 - 0.01 ** (1 / max(rows, 1)), 6)
    compared = AnswerComparison(answers.queries, answers.wrong, bytes_at_most=answers.bytes_at_most, finds=finds)
    if not answers.wrong and not answers.error:
        return compared
    wrong_before, failed = _wrong_before(table, index, after, drawn, note, context)
    compared = replace(compared, wrong_before=wrong_before, bytes_at_most=2 * answers.bytes_at_most)
    if answers.error and not failed:
        return replace(compared, worse=f"it fails: {answers.error}".rstrip("."))
    if answers.wrong <= wrong_before:
        return compared
    wrong = f"{answers.wrong:,} of {counted(answers.queries, 'answer')} are wrong, {wrong_before:,} before"
    differ = f"{answers.missing:,} rows are missing, {answers.extra:,} do not match"
    return replace(compared, worse=f"{wrong} ({differ})")


def _wrong_before(
    table: Table, index: BaseIndex, after: Pinned, drawn: Queries, note: CommitNote, context: RunContext
) -> tuple[int, bool]:
    """How many of the same queries the index answers wrongly as it is, and whether it fails."""
    with opened_with(table, index.segments, note) as dataset:
        before = Pinned(dataset, table.location.uri)
        asked = before.indexes.get(index.name)
        if asked is None:
            return 0, False
        answers = ask(before, asked, _of_before(drawn, before, after), RowReader(context.checkpoint))
    return answers.wrong, bool(answers.error)


def _of_before(drawn: Queries, before: Pinned, after: Pinned) -> Queries:
    """The same queries of the earlier state: of fragments that were replaced since, all rows are compared."""
    there, replaced = before.fragments.keys(), before.fragments.keys() - after.fragments.keys()
    fragments = sorted(there & set(drawn.fragments) | replaced)
    return replace(drawn, fragments=fragments, others=sorted(there & set(drawn.others)))


def _draw(pinned: Pinned, index: AskedIndex, of: AbstractSet[int], seed: int, budget: int, *, few: bool) -> Queries:
    """Queries of rows in the fragments ``of``."""
    segments = tuple(replace(segment, fragments=segment.fragments & of) for segment in index.segments)
    return sample_queries(pinned, replace(index, segments=segments), _FEW if few else SAMPLES, seed, budget)


def _some(fragments: Sequence[int], seed: int) -> frozenset[int]:
    chosen = np.random.default_rng(seed).permutation(fragments)[:_FEW].tolist()
    return frozenset([*fragments[:1], *fragments[-1:], *chosen])


def _of_vectors(before: Pinned, after: Pinned, index: AskedIndex, drawn: Queries, *, few: bool) -> AnswerComparison:
    if drawn.skipped or drawn.rows is None:
        return AnswerComparison(skipped=drawn.skipped or "no rows could be drawn")
    rows: pa.Table = drawn.rows
    try:
        pooled = compare_searches(before, after, index, rows, drawn.seed, _TOLERANCE if few else None)
    except SearchError as error:
        return _failing(before, index, rows, error)
    read = 3 * rows.nbytes * 10
    compared = AnswerComparison(pooled.queries, found=pooled.after, found_before=pooled.before, bytes_at_most=read)
    if pooled.change is None:
        return replace(compared, skipped="fewer than 10 rows can be searched by")
    fell = pooled.change.high < -_TOLERANCE if few else pooled.change.high < 0
    if not fell:
        return compared
    return replace(
        compared,
        worse=f"of the nearest rows that are found before or after, {pooled.after:.1%} are found after, and "
        f"{pooled.before:.1%} before, in {counted(pooled.queries, 'search', 'searches')}",
    )


def _failing(before: Pinned, index: AskedIndex, rows: pa.Table, error: SearchError) -> AnswerComparison:
    """A search failed: worse, if it does not fail before."""
    try:
        compare_searches(before, before, index, rows)
    except SearchError:
        return AnswerComparison(skipped="it fails as it is")
    except MemwalOpsError as failed:
        return AnswerComparison(skipped=str(failed))
    return AnswerComparison(1, 1, wrong_before=0, worse=f"it fails: {error}".rstrip("."))
