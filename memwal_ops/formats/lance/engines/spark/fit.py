"""Cast the values of a DataFrame to the table's types, and refuse casts that would change a value.

Types are compared first, then values, batch by batch. Arrow casts more than a load may do: timestamps without a
zone to UTC, microseconds to numbers, 1e300 to infinity in float32; it drops the fields of a struct that the table
does not have, and accepts bytes as text. Each would silently change a value, so each is refused here.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.blob import BlobType

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.spark.types import spark_schema, spark_type
from memwal_ops.formats.lance.files.blobs import from_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pyspark.sql.types import DataType, StructType


def misfits(given: StructType, schema: pa.Schema) -> list[str]:
    """The columns that have to be cast before a load, one clause each; columns are matched by name."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    wanted = pa.schema([schema.field(name) for name in given.names])
    expected = from_arrow_schema(spark_schema(wanted), prefer_timestamp_ntz=True)
    return [
        clause
        for one, other in zip(given, expected, strict=True)
        for clause in _unlike(one.dataType, other.dataType, one.name)
    ]


def _unlike(given: DataType, wanted: DataType, place: str) -> Iterator[str]:
    """Clauses about two types between which a value cannot be converted without a change of its meaning."""
    from pyspark.sql import types as t  # noqa: PLC0415 - an extra

    if isinstance(given, t.ArrayType) and isinstance(wanted, t.ArrayType):
        yield from _unlike(given.elementType, wanted.elementType, f"{place}[]")
    elif isinstance(given, t.MapType) and isinstance(wanted, t.MapType):
        yield from _unlike(given.keyType, wanted.keyType, f"{place}[key]")
        yield from _unlike(given.valueType, wanted.valueType, f"{place}[]")
    elif isinstance(given, t.StructType) and isinstance(wanted, t.StructType):
        yield from _unlike_struct(given, wanted, place)
    elif not (isinstance(given, t.NullType) or isinstance(wanted, _carried_by(given))):
        yield f"{place} is {given.simpleString()} and would have to be {wanted.simpleString()}"


def _unlike_struct(given: StructType, wanted: StructType, place: str) -> Iterator[str]:
    unknown = sorted(set(given.names) - set(wanted.names))
    lacking = sorted(one.name for one in wanted if not one.nullable and one.name not in given.names)
    if unknown or lacking or len(set(given.names)) != len(given.names):
        yield f"{place} has fields not in the table {unknown}, lacks {lacking}, or has duplicates"
        return
    for field in given:
        yield from _unlike(field.dataType, wanted[field.name].dataType, f"{place}.{field.name}")


def _carried_by(given: DataType) -> tuple[type[DataType], ...]:
    """Spark's types to which values of ``given`` are cast without loss, or with an error."""
    from pyspark.sql import types as t  # noqa: PLC0415 - an extra

    for whole in (t.ByteType, t.ShortType, t.IntegerType, t.LongType):
        if isinstance(given, whole):
            return (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType, t.FloatType, t.DoubleType)
    if isinstance(given, t.DecimalType):
        return (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType)
    if isinstance(given, (t.FloatType, t.DoubleType)):
        return (t.FloatType, t.DoubleType)
    if isinstance(given, t.StringType):
        return (t.StringType,)
    return (type(given),)


def to_table(
    batch: pa.RecordBatch, schema: pa.Schema, primary_key: Collection[str], vectors: Collection[Sequence[str]] = ()
) -> pa.RecordBatch:
    """The batch in the table's types and column order; absent columns are null.

    Args:
        primary_key: names of the key columns.
        vectors: paths of columns with a vector index, which must not have NaN or infinity.

    Raises:
        InvalidUsageError: a value that the table's column or its index cannot hold unchanged.
    """
    columns = [
        _column(batch, field, required=not field.nullable or field.name in primary_key)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    for path in vectors:
        _refuse_non_finite(rows, path)
    return rows


def _refuse_non_finite(rows: pa.RecordBatch, path: Sequence[str]) -> None:
    """Distances to such a vector are NaN: its row would never be found, or corrupt the centroid of its partition."""
    column = rows.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    if any(pc.all(pc.is_finite(leaf)).as_py() is False for leaf in _floats(column)):
        raise InvalidUsageError(
            f"Column {'.'.join(path)!r} has NaN or infinity in a vector, which its vector index cannot hold.",
            remedy=_REMEDY,
        )


def _column(batch: pa.RecordBatch, field: pa.Field, *, required: bool) -> pa.Array:
    given = batch.column(field.name)
    try:
        given.validate(full=True)  # Spark accepts bytes as text, and readers of the page would fail
        plain = _aligned(given).cast(spark_type(field.type))
        cast = _cast(plain, field.type)
    except pa.ArrowException as error:
        raise InvalidUsageError(
            f"Column {field.name!r} has a value that is not a valid {field.type}: {error}", remedy=_REMEDY
        ) from error
    if required and cast.null_count:
        raise InvalidUsageError(
            f"Column {field.name!r} has NULL in {cast.null_count} of {batch.num_rows} rows of a batch, "
            "and needs a value in every row.",
            remedy=_REMEDY,
        )
    if _infinities(cast) != _infinities(given):
        raise InvalidUsageError(
            f"Column {field.name!r} has a number that is too large for {field.type}.", remedy=_REMEDY
        )
    return cast


def _cast(plain: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(kind, BlobType):
        return from_bytes(plain)
    return plain if plain.type.equals(kind) else plain.cast(kind)


def _aligned(array: pa.Array) -> pa.Array:
    """The same values, copied if Java aligned them otherwise than pyarrow and Lance require.

    A list of nulls alone has values at address 0, on which pyarrow's cast to a vector crashes the process;
    decimals are aligned to 8 bytes, and Lance accepts multiples of 16 only.
    """
    wide = "decimal" in str(array.type)
    if any(one is not None and (one.address == 0 or (wide and one.address % 16)) for one in array.buffers()):
        return array.take(pa.array(np.arange(len(array))))
    return array


def _infinities(array: pa.Array) -> int:
    """The number of infinite values in an array, nested ones included."""
    return sum(int(pc.sum(pc.is_inf(leaf)).as_py() or 0) for leaf in _floats(array))


def _floats(array: pa.Array) -> Iterator[pa.Array]:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _floats(array.storage)
    elif pa.types.is_floating(kind):
        yield array.cast(pa.float32()) if pa.types.is_float16(kind) else array
    elif pa.types.is_struct(kind):
        yield from chain.from_iterable(_floats(child) for child in array.flatten())
    elif pa.types.is_map(kind):
        yield from chain(_floats(array.keys), _floats(array.items))
    elif pa.types.is_nested(kind):
        yield from _floats(array.flatten())


_REMEDY = "Nothing was loaded. Fix or drop these rows, or cast the column in Spark, and run it again."
