"""Map Arrow types that Spark does not have to the nearest one that it has.

Vectors (fixed-size lists) become lists; unsigned integers the next wider signed one; half floats
floats; dictionaries their values. The reverse is a cast to the table's own type.
"""

from __future__ import annotations

import pyarrow as pa
from lance.blob import BlobType

from memwal_ops.errors import UnsupportedFeatureError

_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}
_MAX_DECIMAL = 38


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """The same columns in types that Spark has; metadata is left out."""
    return pa.schema([pa.field(field.name, spark_type(field.type), field.nullable) for field in schema])


def spark_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type in which values of ``kind`` are given to Spark.

    Raises:
        UnsupportedFeatureError: Spark has no type for it.
    """
    if isinstance(kind, BlobType):
        return pa.binary()
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return spark_type(kind.value_type)
    if pa.types.is_nested(kind):
        return _nested(kind)
    if pa.types.is_time(kind) or (pa.types.is_decimal(kind) and kind.precision > _MAX_DECIMAL):
        raise UnsupportedFeatureError(
            f"Spark has no type for {kind}.", remedy='Leave the column out: .option("columns", "id,...").'
        )
    return _flat(kind)


def _flat(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)  # the same instant in any zone; Spark sets its own
    if pa.types.is_duration(kind):
        return pa.duration("us")
    return _WIDER.get(kind, kind)


def _nested(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, spark_type(one.type), one.nullable) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), spark_type(kind.item_type))
    if not hasattr(kind, "value_field"):
        raise UnsupportedFeatureError(f"Spark has no type for {kind}.")
    return pa.list_(pa.field("element", spark_type(kind.value_type), kind.value_field.nullable))


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` (from :func:`spark_schema`) from ``batch``."""
    return pa.RecordBatch.from_arrays([_plain(batch.column(one.name)).cast(one.type) for one in schema], schema=schema)


def _plain(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array
