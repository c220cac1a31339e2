"""Encode keys for Spark: one ``bigint`` or one ``binary`` column, equal exactly if the keys are equal.

Spark has no unsigned integers and no fixed-size binary, and represents decimals and time zones differently. None of
that may affect whether two keys are equal, so a key is encoded as the bits that Lance stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class KeyCode:
    """The code of a table's keys. It follows from the base's schema, and is the same on driver and executors.

    Attributes:
        spark_type: ``bigint`` or ``binary``.
        framed: each column with a mark for null and its length before it, so that ("a", "bc") is not ("ab", "c").
    """

    spark_type: str
    framed: bool

    def encode(self, keys: pa.Table) -> pa.Array:
        """One value per row of ``keys`` (the key columns in key order): int64 or binary, never null."""
        columns = [_stored(column) for column in keys.columns]
        if self.spark_type == "bigint":
            return _int64(columns[0])
        if not self.framed:
            return _bytes(columns[0])
        marks = pa.array([b"\x00", b"\x01"])
        parts: list[pa.Array] = []
        for column in columns:
            values = pc.fill_null(_bytes(column), b"")
            lengths = pc.binary_length(values).cast(pa.int32())
            parts += [marks.take(column.is_valid().cast(pa.int8())), _bytes(lengths), values]
        return pc.binary_join_element_wise(*parts, b"")

    def decode(self, codes: pa.Array, kind: pa.DataType) -> pa.Array:
        """Decode keys of the types that can be looked up in the key index: integers and strings."""
        if self.spark_type != "bigint":
            return codes.cast(kind)
        return codes.view(kind) if pa.types.is_uint64(kind) else codes.cast(kind)


def key_code(schema: pa.Schema, primary_key: Sequence[str]) -> KeyCode:
    """The code for a base table's key."""
    fields = [schema.field(name) for name in primary_key]
    if len(fields) != 1 or fields[0].nullable:
        return KeyCode("binary", framed=True)
    return KeyCode("bigint" if _is_number(_stored_type(fields[0].type)) else "binary", framed=False)


def _stored_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type)
    return _stored_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _stored(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunks at all, in some releases
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    while isinstance(array.type, pa.BaseExtensionType) or pa.types.is_dictionary(array.type):
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array.storage
    return array


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)) and not (
        pa.types.is_interval(kind)
    )


def _int64(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width < 64):  # noqa: PLR2004
        return array.cast(pa.int64())
    return array.view(pa.int64()) if kind.bit_width == 64 else array.view(pa.int32()).cast(pa.int64())  # noqa: PLR2004


def _bytes(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return _bytes(array.cast(pa.int8()))
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        return array.cast(pa.binary())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    return array.view(pa.binary(kind.bit_width // 8)).cast(pa.binary())
