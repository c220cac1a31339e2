"""Objects are found to belong to tables by their keys; a pattern shows which of them may be new tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.events import TableRoutes, announces_commit
from memwal_ops.supervisor.scheduling.discovery import FoundTable

TEXT = """
tables:
  - {uri: s3://b/lake/orders.lance/}
  - {uri: "s3://b/lake/a%20b.lance", name: blank}
  - {uri: "s3+ddb://b/lake/dynamo.lance?ddbTableName=t"}
  - {uri: s3://c, name: root}
  - {uri: /lake/local.lance}
  - {uri: gs://b/lake/google.lance}
  - {pattern: "s3://b/lake/*.lance", exclude: [secret*], name: all}
  - {pattern: "s3://b/deep/*/t-*"}
  - {database: s3://b/db}
"""


@pytest.fixture
def routes(tmp_path: Path) -> TableRoutes:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    entries = load_settings(str(path), {}).tables
    found = [FoundTable(entry.name, entry.uri, entry) for entry in entries if entry.uri is not None]
    branch = FoundTable("orders/tree/dev", "s3://b/lake/orders.lance/tree/dev", found[0].settings)
    return TableRoutes([*found, branch], entries)


@pytest.mark.parametrize(
    ("bucket", "key", "table", "path"),
    [
        ("b", "lake/orders.lance/_versions/1.manifest", "orders", "_versions/1.manifest"),
        ("b", "lake/a b.lance/data/x.lance", "blank", "data/x.lance"),
        ("b", "lake/dynamo.lance/_versions/1.manifest", "dynamo", "_versions/1.manifest"),
        ("b", "lake/orders.lance/tree/dev/_versions/1.manifest", "orders/tree/dev", "_versions/1.manifest"),
        ("b", "lake/orders.lance/tree/other/_versions/1.manifest", "orders", "tree/other/_versions/1.manifest"),
        ("c", "_versions/1.manifest", "root", "_versions/1.manifest"),
        ("b", "lake/orders.lance", None, ""),
        ("b", "lake/orders.lance2/_versions/1.manifest", None, ""),
        ("other", "lake/orders.lance/_versions/1.manifest", None, ""),
        ("b", "lake/local.lance/_versions/1.manifest", None, ""),
        ("b", "lake/google.lance/_versions/1.manifest", None, ""),
        ("b", "", None, ""),
        ("b", "/", None, ""),
    ],
)
def test_tables_by_keys(routes: TableRoutes, bucket: str, key: str, table: str | None, path: str) -> None:
    tables, below = routes.tables_of(bucket, key)
    assert ([one.name for one in tables], below) == ([] if table is None else [table], path)


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("lake/new.lance/_versions/1.manifest", "lake/new.lance"),
        ("lake/new.parquet/1", None),
        ("lake/secret1.lance/_versions/1.manifest", None),
        ("lake/new.lance", None),
        ("deep/x/t-1/data/1", "deep/x/t-1"),
        ("deep/x/u-1/data/1", None),
        ("db/new.lance/_versions/1.manifest", "db/new.lance"),
        ("db/__manifest/_versions/1.manifest", "db/__manifest"),
        ("db/notes/1.txt", None),
    ],
)
def test_new_tables(routes: TableRoutes, key: str, folder: str | None) -> None:
    assert routes.new_table("b", key) == folder
    assert routes.new_table("other", key) is None


@pytest.mark.parametrize(
    ("kind", "path", "announces"),
    [
        ("lance", "_versions/18446744073709551614.manifest", True),
        ("lance", "_mem_wal/8b064fec-aec3-4903-a579-f8c5e0d0373c/manifest/1.binpb", True),
        ("lance", "_mem_wal/8b064fec-aec3-4903-a579-f8c5e0d0373c/wal/1.arrow", False),
        ("lance", "data/1.lance", False),
        ("lance", "_indices/1/index.idx", False),
        ("lance", "_mem_wal_ops/leases/merge/1.json", False),
        ("lance", "tree/dev/_versions/1.manifest", False),
        ("zeppelin", "manifest.json", True),
        ("zeppelin", "wal/1", False),
        ("lm_diskann", "anything", True),
        ("lm_diskann", "_mem_wal_ops/leases/merge/1.json", False),
    ],
)
def test_what_announces_a_commit(tmp_path: Path, kind: str, path: str, announces: bool) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"tables: [{{uri: s3://b/t, format: {kind}}}]\n")
    entry = load_settings(str(file), {}).tables[0]
    assert announces_commit(FoundTable("t", "s3://b/t", entry), path) is announces
