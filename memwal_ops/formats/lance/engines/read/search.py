"""Search by text: BM25 over all live rows, each counted once, as if they were in one table (S0-206)."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.merge.joins import with_keys
from memwal_ops.formats.lance.engines.read.lookup import look_up
from memwal_ops.formats.lance.engines.read.plans import deduplicated, indented
from memwal_ops.formats.lance.engines.read.pruning import WantedKeys
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.log.generation_indexes import GenerationIndex, planned_index

if TYPE_CHECKING:
    from memwal_ops.formats.lance.engines.read.scan import Scan, Winning
    from memwal_ops.formats.lance.engines.read.unmerged import Unmerged
    from memwal_ops.formats.lance.table import Table

SCORE = "_score"
_ROW, _WANTED = "__memwal_ops_row", "__memwal_ops_wanted"


def search(scan: Scan, found: Winning, column: str, text: str, k: int, condition: str | None) -> pa.Table:
    """The ``k`` live rows that match a text best, with ``_score``, the best first.

    Frequencies and lengths of documents are those of all live rows, whatever the filter: an index of them, with the
    tokenizer of the base's, is built for the search in a temporary folder. Costs a scan of the column and the keys.

    Args:
        scan: of the reader, without a filter.
        found: the rows that it reads.
        column: of text.
        k: how many, at least 1.
        condition: SQL; only rows that meet it are returned.
    """
    table = found.unmerged.table
    check(table, column, k)
    key = [*table.primary_key]
    live = replace(scan, columns=tuple(dict.fromkeys([*key, column]))).stream(found).read_all()
    wanted = np.ones(live.num_rows, bool)
    if condition is not None:
        matching = replace(scan, columns=tuple(key), filter=condition).stream(found).read_all()
        numbered = live.select(key).append_column(_ROW, pa.array(np.arange(live.num_rows)))
        wanted[:] = False
        wanted[with_keys(numbered, matching, key).column(_ROW).to_numpy()] = True
    rows = live.select([column]).append_column(_ROW, pa.array(np.arange(live.num_rows)))
    rows = rows.append_column(_WANTED, pa.array(wanted))
    if not live.num_rows:
        return table.schema.empty_table().append_column(SCORE, pa.array([], pa.float32()))
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder, lance_errors("search", table.location.uri):
        made = lance.write_dataset(rows, f"{folder}/rows")
        index = text_index(table, column)
        if index is None:
            made.create_scalar_index(column, "INVERTED")
        else:
            index.build(made)
        best = made.scanner(
            columns=[_ROW, SCORE],
            full_text_query={"columns": [column], "query": text},
            filter=None if condition is None else _WANTED,
            prefilter=True,
            limit=k,
        ).to_table()
    best = best.take(pc.sort_indices(best, [(SCORE, "descending"), (_ROW, "ascending")]))
    return _with_columns(scan, found, live.select(key).take(best.column(_ROW)), best.column(SCORE))


def search_plan(unmerged: Unmerged, column: str, text: str, k: int, condition: str | None) -> str:
    """The plan of :func:`search`."""
    check(unmerged.table, column, k)
    index = text_index(unmerged.table, column)
    pushed = "" if condition is None else f", filter=[{condition}]"
    return "\n".join(
        [
            f"GlobalLimitExec: limit={k}",
            "  SortExec: order_by=[_bm25 DESC]",
            f"    GlobalBM25Exec: one index of all live rows, as {'by default' if index is None else index.name}",
            f'      FTSExec: {column}, query="{text}"{pushed}',
            *indented(deduplicated(unmerged, None), 8),
        ]
    )


def check(table: Table, column: str, k: int) -> None:
    """Refuse a search in a missing column, or with ``k`` below 1."""
    if column not in table.schema.names:
        raise InvalidUsageError(f"{table.location.uri} has no column {column}.")
    if k < 1:
        raise InvalidUsageError(f"k is {k}; it must be at least 1.")


def text_index(table: Table, column: str) -> GenerationIndex | None:
    """How to build an index like the base's of a text column; None: it has none."""
    known = [one for one in base_indexes(table).values() if one.type.upper() == "INVERTED"]
    planned = (planned_index(table, one) for one in known)
    return next((one for one in planned if one.column == column), None)


def _with_columns(scan: Scan, found: Winning, keys: pa.Table, scores: pa.ChunkedArray) -> pa.Table:
    """The rows of these keys, in their order, with their scores."""
    table = found.unmerged.table
    names = [*table.primary_key]
    keys = keys.cast(pa.schema([table.schema.field(name) for name in names]))
    rows = look_up(found.unmerged, keys, WantedKeys(table, keys), scan.opened).rows
    numbered = keys.append_column(_ROW, pa.array(np.arange(keys.num_rows)))
    places = {tuple(row[name] for name in names): row[_ROW] for row in numbered.to_pylist()}
    order = [places[tuple(row.values())] for row in rows.select(names).to_pylist()]
    best = rows.append_column(SCORE, scores.take(pa.array(order, pa.int64())))
    return best.take(pa.array(np.argsort(order), pa.int64()))
