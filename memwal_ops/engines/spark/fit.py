"""Whether the values of a DataFrame mean in the table what they mean in Spark: types first, then batch by batch.

Arrow casts more than a load may do. It takes the wall clock of no zone for UTC, microseconds for numbers,
1e300 for infinity in float32; it drops the fields of a struct that the table does not have, and lets bytes
pass as text. Each would change a value in silence, so each is refused here.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.engines.spark.types import spark_schema, spark_type
from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pyspark.sql.types import DataType, StructType


def misfits(given: StructType, schema: pa.Schema) -> list[str]:
    """What has to be cast before it can be loaded, one clause for each column; columns go by name."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    wanted = pa.schema([schema.field(name) for name in given.names])
    asked = from_arrow_schema(spark_schema(wanted), prefer_timestamp_ntz=True)
    return [clause for one, other in zip(given, asked, strict=True) for clause in _unlike(one, other, one.name)]


def _unlike(given: Any, wanted: Any, place: str) -> Iterator[str]:
    """Clauses about two fields: whether a value can be carried over without a change of its meaning."""
    yield from _unlike_type(given.dataType, wanted.dataType, place)


def _unlike_type(given: DataType, wanted: DataType, place: str) -> Iterator[str]:
    from pyspark.sql import types as t  # noqa: PLC0415 - an extra

    if isinstance(given, t.ArrayType) and isinstance(wanted, t.ArrayType):
        yield from _unlike_type(given.elementType, wanted.elementType, f"{place}[]")
    elif isinstance(given, t.MapType) and isinstance(wanted, t.MapType):
        yield from _unlike_type(given.keyType, wanted.keyType, f"{place}[key]")
        yield from _unlike_type(given.valueType, wanted.valueType, f"{place}[]")
    elif isinstance(given, t.StructType) and isinstance(wanted, t.StructType):
        yield from _unlike_struct(given, wanted, place)
    elif not (isinstance(given, t.NullType) or isinstance(wanted, _carried_by(given))):
        yield f"{place} is {given.simpleString()} and would have to be {wanted.simpleString()}"


def _unlike_struct(given: StructType, wanted: StructType, place: str) -> Iterator[str]:
    unknown = sorted(set(given.names) - set(wanted.names))
    lacking = sorted(one.name for one in wanted if not one.nullable and one.name not in given.names)
    if unknown or lacking or len(set(given.names)) != len(given.names):
        yield f"{place} has fields not in the table {unknown}, lacks {lacking}, or has one twice"
        return
    for field in given:
        yield from _unlike(field, wanted[field.name], f"{place}.{field.name}")


def _carried_by(given: DataType) -> tuple[type[DataType], ...]:
    """Spark's types that hold the values of ``given``, or refuse those that they cannot hold."""
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


def to_table(batch: pa.RecordBatch, schema: pa.Schema, primary_key: Collection[str]) -> pa.RecordBatch:
    """The batch in the table's types, in its order; absent columns null.

    Raises:
        InvalidUsageError: a value that the table's column cannot hold as it is.
    """
    columns = [
        _column(batch, field, required=not field.nullable or field.name in primary_key)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field, *, required: bool) -> pa.Array:
    given = batch.column(field.name)
    try:
        given.validate(full=True)  # Spark lets bytes pass as text, and whoever read the page after that could not
        plain = _placed(given).cast(spark_type(field.type))
        cast = plain if plain.type.equals(field.type) else plain.cast(field.type)
    except pa.ArrowException as error:
        raise InvalidUsageError(
            f"Column {field.name!r} has a value that is none of {field.type}: {error}", remedy=_REMEDY
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


def _placed(array: pa.Array) -> pa.Array:
    """The same values in memory as pyarrow and Lance need it, copied where Java gave them otherwise.

    A list of nothing but nulls has values at address 0, on which pyarrow's cast to a vector ends the process;
    decimals lie at any multiple of 8 bytes, and Lance takes multiples of 16 only.
    """
    wide = "decimal" in str(array.type)
    if any(one is not None and (one.address == 0 or (wide and one.address % 16)) for one in array.buffers()):
        return array.take(pa.array(np.arange(len(array))))
    return array


def _infinities(array: pa.Array) -> int:
    """How many infinite numbers stand anywhere in it."""
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


_REMEDY = "Nothing was loaded. Mend or leave out these rows, or cast the column in Spark, and run it again."
