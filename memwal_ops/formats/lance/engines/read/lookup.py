"""Look up rows by key: rows in memory, then generations from the newest, then the base table (S0-204)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.merge.joins import newest_rows, with_keys, without_keys
from memwal_ops.formats.lance.engines.merge.locate import MAX_LOOKUPS
from memwal_ops.formats.lance.engines.read.take_last import condition_of, last_keys, last_rows
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.generations.generation import named
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, conformed
from memwal_ops.formats.lance.indexes.index_faults import base_scanner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from memwal_ops.formats.lance.engines.read.opened import Opened
    from memwal_ops.formats.lance.engines.read.pruning import WantedKeys
    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True)
class Found:
    """The result of a look-up: rows in the base's columns. ``opened`` generations were read for them."""

    rows: pa.Table
    opened: int


def keys_of(table: Table, given: pa.Table | Mapping[str, Any] | Sequence[Any]) -> pa.Table:
    """The keys of a lookup, each once, in the columns and types of the table's key.

    Args:
        given: a table or a mapping with the key's columns; or the values of a key of one column.

    Raises:
        InvalidUsageError: a column is missing, a value is NULL or of another type.
    """
    names = [*table.primary_key]
    schema = pa.schema([table.dataset.schema.field(name) for name in names])
    try:
        if isinstance(given, pa.Table):
            found = given.select(names)
        elif isinstance(given, Mapping):
            found = pa.table({name: pa.array(given[name], schema.field(name).type) for name in names})
        elif len(names) == 1:
            found = pa.table({names[0]: pa.array(given, schema.field(0).type)})
        else:
            raise TypeError(f"give a table or a mapping of {len(names)} columns")
        found = found.cast(schema)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise InvalidUsageError(f"These are no keys of {table.location.uri} ({', '.join(names)}): {error}") from error
    if any(column.null_count for column in found.columns):
        raise InvalidUsageError("A key is NULL: keys have no NULL.", remedy="Remove it from the keys.")
    return found.group_by(names, use_threads=False).aggregate([]).select(names)


def look_up(unmerged: Unmerged, keys: pa.Table, wanted: WantedKeys, opened: Opened) -> Found:
    """The newest row of each of these keys that has one; of a key that was deleted none.

    A generation whose bloom filter has none of the keys is not opened (S0-218); one without a filter is. Once all keys
    of a region are found, its older generations are not searched (S0-216).

    Args:
        unmerged: the regions that may have the keys.
        keys: of :func:`keys_of`.
        wanted: the same.
        opened: generations and filters that were read before.
    """
    table = unmerged.table
    names, schema = [*table.primary_key], table.dataset.schema
    parts = [_bytes_for_blobs(table)]
    count, missing = 0, keys
    for region in unmerged.regions:
        sought = with_keys(keys.filter(pa.array(wanted.among(region.values))), missing, names)
        if region.memory is not None and sought.num_rows:
            hits = newest_rows(with_keys(region.memory, sought.cast(_kinds(region.memory, names)), names), names)
            with named(region):
                parts.append(conformed(hits.filter(pc.invert(hits.column(TOMBSTONE))).select(schema.names), schema))
            sought, missing = (
                without_keys(one, hits.select(names).cast(keys.schema), names) for one in (sought, missing)
            )
        if not sought.num_rows:
            continue
        found, done = _in_generations(table, region, sought, opened)
        count += found.opened
        parts.append(found.rows)
        missing = without_keys(missing, done, names)
    parts.append(_in_base(table, missing, names))
    return Found(_joined(parts), count)


def _in_generations(table: Table, region: RegionRead, keys: pa.Table, opened: Opened) -> tuple[Found, pa.Table]:
    """The newest rows in a region's generations, and the keys that were found, deleted ones among them."""
    names = keys.column_names
    newest_first = region.flushed[::-1]
    parts, found, count = [_bytes_for_blobs(table)], [keys.slice(0, 0)], 0
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
            found.append(last.select(names).cast(keys.schema))
            keys = without_keys(keys, found[-1], names)
    return Found(_joined(parts), count), pa.concat_tables(found)


def _in_base(table: Table, keys: pa.Table, names: list[str]) -> pa.Table:
    """The base's rows of these keys, by a filter on the key columns; Lance uses an index if there is one."""
    parts = [_bytes_for_blobs(table)]
    with lance_errors("look up keys in", table.location.uri):
        for start in range(0, keys.num_rows, MAX_LOOKUPS):
            some = keys.slice(start, MAX_LOOKUPS)
            scanner = base_scanner(table, filter=condition_of(some, names), blob_handling="all_binary")
            parts.extend(
                with_keys(pa.Table.from_batches([batch]), some.cast(_kinds(batch, names)), names)
                for batch in scanner.to_batches()
            )
    return _joined(parts)


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """The rows of all, in the columns of the first."""
    return pa.concat_tables([conformed(one, parts[0].schema) for one in parts])


def _kinds(rows: pa.Table | pa.RecordBatch, names: list[str]) -> pa.Schema:
    return pa.schema([rows.schema.field(name) for name in names])


def _bytes_for_blobs(table: Table) -> pa.Table:
    """No row, in the columns that a look-up returns: blobs are bytes."""
    return table.dataset.scanner(limit=1, blob_handling="all_binary").projected_schema.empty_table()
