"""Search by text: BM25 over all live rows, each counted once, as if they were in one table (S0-206).

Look up rows by key: rows in memory, then generations from the newest, then the base table (S0-204).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.merge import locate
from memwal_ops.formats.lance.engines.merge.collapse import read_keys
from memwal_ops.formats.lance.engines.read.opened import Opened, deduplicated, indented
from memwal_ops.formats.lance.engines.read.pruning import WantedKeys
from memwal_ops.formats.lance.files import datasets
from memwal_ops.formats.lance.generations.generation import Generation, named
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, conformed
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.index_faults import base_scanner
from memwal_ops.formats.lance.log.memtable import GenerationIndex, planned_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from memwal_ops.formats.lance.engines.read.scan import Scan, Winning
    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged
    from memwal_ops.formats.lance.table import Table


SCORE = "_score"
_ROW, _WANTED = "__memwal_ops_row", "__memwal_ops_wanted"


def search(scan: Scan, found: Winning, column: str, text: str, k: int, condition: str | None) -> pa.Table:
    """The ``k`` live rows that match a text best, with ``_score``, the best first.

    Frequencies and lengths of documents are those of all live rows, whatever the filter: an index of them, with the
    tokenizer of the base's, is built for the search in a temporary folder. Costs a scan of the column and the keys.

    ``scan``: of the reader, without a filter. ``found``: the rows that it reads. ``column``: of text. ``k``: how many,
    at least 1. ``condition``: SQL; only rows that meet it are returned.
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
        wanted[locate.with_keys(numbered, matching, key).column(_ROW).to_numpy()] = True
    rows = live.select([column]).append_column(_ROW, pa.array(np.arange(live.num_rows)))
    rows = rows.append_column(_WANTED, pa.array(wanted))
    if not live.num_rows:
        return table.schema.empty_table().append_column(SCORE, pa.array([], pa.float32()))
    with (
        tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder,
        datasets.lance_errors("search", table.location.uri),
    ):
        made = lance.write_dataset(rows, f"{folder}/rows")
        index = text_index(table, column)
        if index is None:
            made.create_scalar_index(column, "INVERTED")
        else:
            index.arguments.create(made, index.name)
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
    lines = [
        f"GlobalLimitExec: limit={k}",
        "  SortExec: order_by=[_bm25 DESC]",
        f"    GlobalBM25Exec: one index of all live rows, as {'by default' if index is None else index.name}",
        f'      FTSExec: {column}, query="{text}"{pushed}',
    ]
    return "\n".join([*lines, *indented(deduplicated(unmerged, None), 8)])


def check(table: Table, column: str, k: int) -> None:
    """Refuse a search in a missing column, or with ``k`` below 1."""
    if column not in table.schema.names:
        raise InvalidUsageError(f"{table.location.uri} has no column {column}.")
    if k < 1:
        raise InvalidUsageError(f"k is {k}; it must be at least 1.")


def text_index(table: Table, column: str) -> GenerationIndex | None:
    """How to build an index like the base's of a text column; None: it has none."""
    known = [base_index for base_index in base_indexes(table).values() if base_index.type.upper() == "INVERTED"]
    planned = (planned_index(table, base_index) for base_index in known)
    return next((index for index in planned if index.arguments.column == column), None)


def _with_columns(scan: Scan, found: Winning, keys: pa.Table, scores: pa.ChunkedArray) -> pa.Table:
    """The rows of these keys, in their order, with their scores."""
    table = found.unmerged.table
    names = [*table.primary_key]
    keys = keys.cast(pa.schema([table.schema.field(name) for name in names]))
    rows = look_up(found.unmerged, keys, WantedKeys(table, keys), scan.opened).rows
    places = {key: at for at, key in enumerate(zip(*map(datasets.plain, keys.columns), strict=True))}
    order = [places[key] for key in zip(*(datasets.plain(rows[name]) for name in names), strict=True)]
    best = rows.append_column(SCORE, scores.take(pa.array(order, pa.int64())))
    return best.take(pa.array(np.argsort(order), pa.int64()))


_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class LookupResult:
    """The result of a look-up: rows in the base's columns. ``opened`` generations were read for them."""

    rows: pa.Table
    opened: int


def keys_of(table: Table, given: pa.Table | Mapping[str, Any] | Sequence[Any]) -> pa.Table:
    """The keys of a lookup, each once, in the columns and types of the table's key.

    ``given``: a table or a mapping with the key's columns; or the values of a key of one column.
    Raises ``InvalidUsageError``: a column is missing, a value is NULL or of another type.
    """
    names = [*table.primary_key]
    schema = pa.schema([table.schema.field(name) for name in names])
    try:
        if isinstance(given, pa.Table):
            keys = given.select(names)
        elif isinstance(given, Mapping):
            keys = pa.table({name: pa.array(given[name], schema.field(name).type) for name in names})
        elif len(names) == 1:
            keys = pa.table({names[0]: pa.array(given, schema.field(0).type)})
        else:
            raise TypeError(f"give a table or a mapping of {len(names)} columns")
        keys = keys.cast(schema)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise InvalidUsageError(f"These are no keys of {table.location.uri} ({', '.join(names)}): {error}") from error
    if any(column.null_count for column in keys.columns):
        raise InvalidUsageError("A key is NULL: keys have no NULL.", remedy="Remove it from the keys.")
    return keys.group_by(names, use_threads=False).aggregate([]).select(names)


def look_up(unmerged: Unmerged, keys: pa.Table, wanted: WantedKeys, opened: Opened) -> LookupResult:
    """The newest row of each of these keys that has one; of a key that was deleted none.

    A generation whose bloom filter has none of the keys is not opened (S0-218); one without a filter is. Once all keys
    of a region are found, its older generations are not searched (S0-216).

    ``unmerged``: the regions that may have the keys. ``keys``: of :func:`keys_of`. ``wanted``: the same. ``opened``:
    generations and filters that were read before.
    """
    table = unmerged.table
    names, schema = [*table.primary_key], table.schema
    parts = [_bytes_for_blobs(table)]
    count, missing = 0, keys
    for region in unmerged.regions:
        sought = locate.with_keys(keys.filter(pa.array(wanted.among(region.values))), missing, names)
        if region.memory is not None and sought.num_rows:
            hits = locate.newest_rows(
                locate.with_keys(region.memory, sought.cast(_kinds(region.memory, names)), names), names
            )
            with named(region):
                parts.append(conformed(hits.filter(pc.invert(hits.column(TOMBSTONE))).select(schema.names), schema))
            sought, missing = (
                locate.without_keys(wanted, hits.select(names).cast(keys.schema), names) for wanted in (sought, missing)
            )
        if not sought.num_rows:
            continue
        in_log, done = _in_generations(table, region, sought, opened)
        count += in_log.opened
        parts.append(in_log.rows)
        missing = locate.without_keys(missing, done, names)
    parts.append(_in_base(table, missing, names))
    return LookupResult(_joined(parts), count)


def _in_generations(table: Table, region: RegionRead, keys: pa.Table, opened: Opened) -> tuple[LookupResult, pa.Table]:
    """The newest rows in a region's generations, and the keys that were found, deleted ones among them."""
    names = keys.column_names
    newest_first = region.flushed[::-1]
    parts, found_keys, count = [_bytes_for_blobs(table)], [keys.slice(0, 0)], 0
    for ref, bloom in zip(newest_first, opened.filters(table, newest_first), strict=True):
        if not keys.num_rows:
            break
        sought = keys
        if bloom is not None:
            sought = keys.filter(pa.array(bloom.may_have([column.combine_chunks() for column in keys.columns])))
        if not sought.num_rows:
            continue
        (generation,) = opened.generations(table, [ref])
        count += 1
        last = last_keys(generation, sought)
        if last.num_rows:
            parts.append(last_rows(generation, last))
            found_keys.append(last.select(names).cast(keys.schema))
            keys = locate.without_keys(keys, found_keys[-1], names)
    return LookupResult(_joined(parts), count), pa.concat_tables(found_keys)


def _in_base(table: Table, keys: pa.Table, names: list[str]) -> pa.Table:
    """The base's rows of these keys, by a filter on the key columns; Lance uses an index if there is one."""
    parts = [_bytes_for_blobs(table)]
    with datasets.lance_errors("look up keys in", table.location.uri):
        for start in range(0, keys.num_rows, locate.MAX_LOOKUPS):
            some = keys.slice(start, locate.MAX_LOOKUPS)
            scanner = base_scanner(table, filter=condition_of(some, names), blob_handling="all_binary")
            parts.extend(
                locate.with_keys(pa.Table.from_batches([batch]), some.cast(_kinds(batch, names)), names)
                for batch in scanner.to_batches()
            )
    return _joined(parts)


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables([conformed(part, parts[0].schema) for part in parts])


def _kinds(rows: pa.Table | pa.RecordBatch, names: list[str]) -> pa.Schema:
    return pa.schema([rows.schema.field(name) for name in names])


def _bytes_for_blobs(table: Table) -> pa.Table:
    """No row, in the columns that a look-up returns: blobs are bytes."""
    return table.dataset.scanner(limit=1, blob_handling="all_binary").projected_schema.empty_table()


def last_keys(generation: Generation, keys: pa.Table) -> pa.Table:
    """Of each of the keys that the generation has, its newest row: the key, ``_tombstone`` and ``_rowaddr``.

    Its key columns are read from the end, in parts that double, until all keys are found: the newest row of a key is
    the last one; with old releases, the first.
    """
    names = keys.column_names
    if not keys.num_rows:
        return _none(keys)
    if keys.num_rows > locate.MAX_LOOKUPS or condition_of(keys, names) is None:
        rows = read_keys(generation, names)
        return _newest(generation, locate.with_keys(rows, keys.cast(rows.select(names).schema), names), names)
    parts: list[pa.Table] = []
    missing = keys
    for fragments in _from_the_end(generation):
        condition = condition_of(missing, generation.projection.keys)
        rows = generation.find_keys(condition or "", fragments)
        rows = rows.rename_columns([*names, TOMBSTONE, datasets.ROW_ADDRESS])
        rows = _newest(generation, locate.with_keys(rows, missing.cast(rows.select(names).schema), names), names)
        parts.append(rows)
        missing = locate.without_keys(missing, rows.select(names).cast(missing.schema), names)
        if not missing.num_rows:
            break
    return pa.concat_tables(parts) if parts else _none(keys)


def last_rows(generation: Generation, found: pa.Table) -> pa.Table:
    """The rows that :func:`last_keys` found and that are no tombstones, in the base's columns."""
    alive = found.filter(pc.invert(found.column(TOMBSTONE)))
    parts = [generation.projection.with_blobs_as_bytes().schema.empty_table()]
    if alive.num_rows:
        addresses = alive.column(datasets.ROW_ADDRESS).to_numpy()
        for batch in generation.read_rows(max_bytes=_MAX_BYTES, addresses=addresses):
            projected = generation.projected(batch, max_bytes=_MAX_BYTES, references=False)
            parts += [conformed(pa.Table.from_batches([batch]), parts[0].schema) for batch in projected]
    return pa.concat_tables(parts)


def condition_of(keys: pa.Table, columns: Sequence[str]) -> str | None:
    """A condition in SQL that all rows with these keys meet; None: no column's values have SQL literals.

    ``columns``: the names of the key's columns in the dataset on which the condition is used.
    """
    parts = [
        datasets.is_one_of(name, column.unique().to_pylist())
        for name, column in zip(columns, keys.columns, strict=True)
        if "`" not in name and datasets.has_sql_literals(column)
    ]
    return " AND ".join(parts) or None


def key_index(dataset: lance.LanceDataset, columns: Sequence[str]) -> bool:
    """Whether an index finds the rows of a key."""
    return len(columns) == 1 and locate.has_key_index(dataset, columns[0])


def _from_the_end(generation: Generation) -> Iterator[list[lance.LanceFragment] | None]:
    """The fragments to search, each time; None: all of them."""
    if generation.newest_row_first:
        yield None
        return
    fragments = generation.dataset.get_fragments()
    size = 1
    while fragments:
        yield fragments[-size:]
        del fragments[-size:]
        size *= 2


def _newest(generation: Generation, rows: pa.Table, names: list[str]) -> pa.Table:
    order = "descending" if generation.newest_row_first else "ascending"
    last = locate.newest_rows(rows.take(pc.sort_indices(rows, [(datasets.ROW_ADDRESS, order)])), names)
    dead = pc.fill_null(last.column(TOMBSTONE), fill_value=False)  # NULL means not deleted
    return last.set_column(len(names), pa.field(TOMBSTONE, pa.bool_()), dead)


def _none(keys: pa.Table) -> pa.Table:
    empty = keys.slice(0, 0).append_column(TOMBSTONE, pa.array([], pa.bool_()))
    return empty.append_column(datasets.ROW_ADDRESS, pa.array([], pa.uint64()))
