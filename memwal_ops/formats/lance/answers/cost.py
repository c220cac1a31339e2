"""Estimate what asking the indexes of a table costs, before they are asked: only the rows to ask for are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.verification import AnswersOptions, AnswersPlan
from memwal_ops.formats.lance.answers.asked_index import Pinned
from memwal_ops.formats.lance.answers.check import chosen_indexes, not_described
from memwal_ops.formats.lance.answers.coverage import coverage_bytes
from memwal_ops.formats.lance.answers.sample import sample_queries
from memwal_ops.formats.lance.answers.vector import MULTIVECTOR_QUERIES, metric_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.verification import VerifyOptions, VerifyReport
    from memwal_ops.formats.lance.answers.asked_index import AskedIndex
    from memwal_ops.formats.lance.table import Table

    Verify = Callable[[Table, VerifyOptions, RunContext | None], VerifyReport]


def or_plan(verify: Verify) -> Callable[..., VerifyReport | AnswersPlan]:
    """A job that verifies a table by ``verify``, or, with ``dry_run``, estimates what asking its indexes costs."""

    def verified_or_planned(
        table: Table, options: VerifyOptions, context: RunContext | None = None
    ) -> VerifyReport | AnswersPlan:
        if isinstance(options, AnswersOptions) and options.dry_run:
            return plan_answers(table, options)
        return verify(table, options, context)

    return verified_or_planned


def plan_answers(table: Table, options: AnswersOptions) -> AnswersPlan:
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
        one = _planned(pinned, index, options.samples, seed, left // (len(names) - number))
        left = max(0, left - one.bytes_at_most)
        planned.append(one)
    return AnswersPlan(table.version, planned, options.max_bytes)


def _planned(pinned: Pinned, index: AskedIndex, samples: int, seed: int, max_bytes: int) -> IndexAnswers:
    held = coverage_bytes(pinned, index, max_bytes // 4)
    drawn = sample_queries(pinned, index, samples, seed, max_bytes - held)
    queries, cost = len(drawn.queries), drawn.bytes_at_most
    if index.is_vector and drawn.rows is not None:
        queries = drawn.rows.num_rows
        if pa.types.is_list(index.arrow):
            queries = min(queries, MULTIVECTOR_QUERIES)
            cost *= queries
        elif metric_of(pinned, index) == "dot":  # its codes are compared, too
            cost += cost + index.size
    skipped = drawn.skipped
    if not skipped and index.is_vector and not drawn.fragments:
        skipped = "no fragment fits into --max-bytes"
    return IndexAnswers(index=index.name, type=index.type, queries=queries, bytes_at_most=cost + held, skipped=skipped)
