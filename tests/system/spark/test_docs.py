"""docs/spark.md: its Python runs on the session of the tests; test_spark_commands.py runs its commands."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("text", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("txt", pa.string()),
    ]
)


def rows(*keys: int) -> pa.Table:
    when = datetime(2026, 5, 1, tzinfo=UTC)
    found = [{"id": key, "text": f"text {key}", "at": when, "txt": None if key % 2 else "even"} for key in keys]
    return pa.Table.from_pylist(found, schema=SCHEMA)


def test_its_python_runs(spark: SparkSession, tmp_path: Path) -> None:
    """A merge in a session, reads of base and log, a load into another table."""
    uri, copy = str(tmp_path / "table.lance"), str(tmp_path / "copy.lance")
    lance.write_dataset(rows(1, 2, 1001), uri).initialize_mem_wal()
    lance.write_dataset(rows(), copy).initialize_mem_wal()
    names: dict[str, Any] = {"spark": spark, "uri": uri}
    first, *others = (
        block.replace("s3://bucket/table.lance", uri).replace("s3://bucket/copy.lance", copy)
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    )
    put(uri, 3, 1002)
    exec(compile(first, "docs/spark.md", "exec"), names)
    assert names["report"].decision == "merged"
    names["spark"] = spark.newSession()  # a source that the first one has, no session that is made later can register
    put(uri, 4, 1003)
    for block in others:
        exec(compile(block, "docs/spark.md", "exec"), names)
    assert sorted(row.id for row in names["few"].collect()) == [1001, 1002, 1003]
    assert sorted(row.id for row in names["late"].collect()) == [2, 4, 1002]
    assert sorted(lance.dataset(copy).to_table()["id"].to_pylist()) == [1, 2, 3, 4, 1001, 1002, 1003]


def put(uri: str, *keys: int) -> None:
    with lance.dataset(uri).mem_wal_writer("6f1c2d3e-4b5a-4c6d-8e7f-9a0b1c2d3e4f") as writer:
        writer.put(rows(*keys))
