"""Look up the newest row of some keys in one generation (S0-215)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.formats.lance.engines.merge.collapse import read_keys
from memwal_ops.formats.lance.engines.merge.joins import newest_rows, with_keys, without_keys
from memwal_ops.formats.lance.engines.merge.locate import MAX_LOOKUPS, has_key_index
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS
from memwal_ops.formats.lance.files.sql_literals import has_sql_literals, is_one_of
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, conformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import lance

    from memwal_ops.formats.lance.generations.generation import Generation

_MAX_BYTES = 64 << 20


def last_keys(generation: Generation, keys: pa.Table) -> pa.Table:
    """Of each of the keys that the generation has, its newest row: the key, ``_tombstone`` and ``_rowaddr``.

    Uses the generation's key index if it has one. Otherwise its key columns are read from the end, in parts that
    double, until all keys are found: the newest row of a key is the last one; with old releases, the first.
    """
    names = keys.column_names
    if not keys.num_rows:
        return _none(keys)
    if keys.num_rows > MAX_LOOKUPS or condition_of(keys, names) is None:
        found = read_keys(generation, names)
        return _newest(generation, with_keys(found, keys.cast(found.select(names).schema), names), names)
    parts: list[pa.Table] = []
    missing = keys
    for fragments in _from_the_end(generation):
        condition = condition_of(missing, generation.projection.keys)
        found = generation.find_keys(condition or "", fragments)
        found = found.rename_columns([*names, TOMBSTONE, ROW_ADDRESS])
        found = _newest(generation, with_keys(found, missing.cast(found.select(names).schema), names), names)
        parts.append(found)
        missing = without_keys(missing, found.select(names).cast(missing.schema), names)
        if not missing.num_rows:
            break
    return pa.concat_tables(parts) if parts else _none(keys)


def last_rows(generation: Generation, found: pa.Table) -> pa.Table:
    """The rows that :func:`last_keys` found and that are no tombstones, in the base's columns."""
    alive = found.filter(pc.invert(found.column(TOMBSTONE)))
    parts = [generation.projection.with_blobs_as_bytes().schema.empty_table()]
    if alive.num_rows:
        addresses = alive.column(ROW_ADDRESS).to_numpy()
        for batch in generation.read_rows(max_bytes=_MAX_BYTES, addresses=addresses):
            projected = generation.projected(batch, max_bytes=_MAX_BYTES, references=False)
            parts += [conformed(pa.Table.from_batches([one]), parts[0].schema) for one in projected]
    return pa.concat_tables(parts)


def condition_of(keys: pa.Table, columns: Sequence[str]) -> str | None:
    """A condition in SQL that all rows with these keys meet; None: no column's values have SQL literals.

    Args:
        columns: the names of the key's columns in the dataset on which the condition is used.
    """
    parts = [
        is_one_of(name, column.unique().to_pylist())
        for name, column in zip(columns, keys.columns, strict=True)
        if "`" not in name and has_sql_literals(column)
    ]
    return " AND ".join(parts) or None


def key_index(dataset: lance.LanceDataset, columns: Sequence[str]) -> bool:
    """Whether an index finds the rows of a key."""
    return len(columns) == 1 and has_key_index(dataset, columns[0])


def _from_the_end(generation: Generation) -> Iterator[list[lance.LanceFragment] | None]:
    """The fragments to search, each time; None: all of them through the key index."""
    if generation.newest_row_first or key_index(generation.dataset, generation.projection.keys):
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
    last = newest_rows(rows.take(pc.sort_indices(rows, [(ROW_ADDRESS, order)])), names)
    dead = pc.fill_null(last.column(TOMBSTONE), fill_value=False)  # NULL means not deleted
    return last.set_column(len(names), pa.field(TOMBSTONE, pa.bool_()), dead)


def _none(keys: pa.Table) -> pa.Table:
    empty = keys.slice(0, 0).append_column(TOMBSTONE, pa.array([], pa.bool_()))
    return empty.append_column(ROW_ADDRESS, pa.array([], pa.uint64()))
