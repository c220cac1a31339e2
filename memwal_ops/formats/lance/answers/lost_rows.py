"""Ask a text index for rows that its files lack: an analyzer may leave nothing of a text, and then nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.core.answers import IndexAnswers, examples
from memwal_ops.formats.lance.answers.ask import answer_of, text_answers
from memwal_ops.formats.lance.answers.sample import text_queries
from memwal_ops.formats.lance.wire.bitmaps import fragments_of

if TYPE_CHECKING:
    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned
    from memwal_ops.formats.lance.answers.coverage import Coverage

_ROWS = 256


def ask_for_rows(
    pinned: Pinned, index: AskedIndex, answers: IndexAnswers, held: Coverage, seed: int
) -> tuple[IndexAnswers, Coverage]:
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
    return (
        replace(
            answers,
            queries=answers.queries + asked,
            wrong=answers.wrong + wrong,
            missing=answers.missing + len(missing),
            examples_missing=examples(sorted({*answers.examples_missing, *missing})),
        ),
        replace(
            held,
            rows=tuple(sorted(missing)),
            fragments=tuple(one for one in held.fragments if any(row >> 32 == one for row in missing)),
        ),
    )
