"""Region specs for tests: stored and decoded as a writer does, and the values that their fields have."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal_ops.formats.lance.regions.specs import (
    RegionField,
    RegionSpec,
    decode_spec,
    encode_specs,
    region_values,
)
from memwal_ops.formats.lance.wire._pb import memwal_pb2


def spec_of(schema: pa.Schema, *fields: RegionField | str) -> RegionSpec:
    """A spec as a writer reads it from the index; all columns are key columns."""
    wanted = tuple(RegionField.parse(one) if isinstance(one, str) else one for one in fields)
    ids = {name: at * 3 for at, name in enumerate(schema.names)}
    (stored,) = encode_specs([RegionSpec(wanted)], schema, ids, schema.names)
    again = memwal_pb2.RegionSpec.FromString(stored.SerializeToString())
    return decode_spec(again, {number: name for name, number in ids.items()})


def values(field: RegionField | str, **columns: Any) -> list[Any]:
    rows = pa.table(columns)
    return region_values(spec_of(rows.schema, field), rows).column(0).to_pylist()


def value_type(field: RegionField | str, **columns: Any) -> pa.DataType:
    rows = pa.table(columns)
    return region_values(spec_of(rows.schema, field), rows).schema.types[0]


def expression(sql: str, result: str, *sources: str) -> RegionField:
    return RegionField("e", sources, expression=sql, result_type=result)
