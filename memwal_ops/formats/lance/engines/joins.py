"""Join rows with keys: by row numbers, as rows may have columns that pyarrow does not join (lists, structs)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_ROW = "__memwal_ops_row"


def newest_rows(rows: pa.Table, key: list[str]) -> pa.Table:
    """The last row of each key."""
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(key, use_threads=False).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    return rows.take(last)


def without_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is none of these, in their order."""
    return _chosen(rows, keys, key, among=False)


def with_keys(rows: pa.Table, keys: pa.Table, key: list[str]) -> pa.Table:
    """The rows whose key is one of these, in their order."""
    return _chosen(rows, keys, key, among=True)


def _chosen(rows: pa.Table, keys: pa.Table, key: list[str], *, among: bool) -> pa.Table:
    if not keys.num_rows or not rows.num_rows:
        return rows.slice(0, 0) if among else rows
    if len(key) == 1:
        found = pc.is_in(rows.column(key[0]), value_set=keys.column(key[0]))
        return rows.filter(found if among else pc.invert(found))
    numbered = rows.select(key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    left = numbered.join(keys.select(key), keys=key, join_type="left semi" if among else "left anti").column(_ROW)
    return rows.take(left.combine_chunks().sort())
