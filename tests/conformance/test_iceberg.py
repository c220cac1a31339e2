"""A read-only format whose catalog locates its tables and decides commits: Iceberg, by pyiceberg's SQL catalog."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.core.registry import clear_caches
from memwal_ops.errors import (
    InvalidUsageError,
    ObjectNotFoundError,
    TableCorruptError,
    TableNotFoundError,
    TableReplacedError,
)
from tests.support.plugin_packages import install
from tests.support.run_cli import contents, run_process

if TYPE_CHECKING:
    from collections.abc import Iterator

WHY = "pip install -c constraints.txt 'pyiceberg[sql-sqlite]'"
pytest.importorskip("pyiceberg", reason=f"needs pyiceberg: {WHY}")
pytest.importorskip("sqlalchemy", reason=f"needs pyiceberg's SQL catalog: {WHY}")


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a process needs to see the package; this one sees it."""
    found = install(["iceberg"], tmp_path_factory.mktemp("iceberg"), Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        for path in found["PYTHONPATH"].split(os.pathsep):
            if path not in sys.path:
                patch.syspath_prepend(path)
        clear_caches()
        yield found
    clear_caches()


class Orders:
    """The table ``sales.orders`` of a catalog in a file: two appends, and a delete that rewrites a file."""

    def __init__(self, folder: Path, **properties: str) -> None:
        self.catalog = folder / "catalog.db"
        self.uri = f"iceberg+sql://{self.catalog}#sales.orders"
        with closing(self.open()) as catalog:
            catalog.create_namespace("sales")
            schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
            catalog.create_table("sales.orders", schema=schema, properties=properties)
        self.append(1, 2)
        self.append(3)
        with closing(self.open()) as catalog:
            catalog.load_table("sales.orders").delete("k = 1")

    def open(self) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("default", uri=f"sqlite:///{self.catalog}", warehouse=f"file://{self.catalog.parent}/lake")

    def append(self, *keys: int) -> None:
        with closing(self.open()) as catalog:
            rows = pa.table({"k": pa.array(keys, pa.int64()), "v": [str(key) for key in keys]})
            catalog.load_table("sales.orders").append(rows)

    @property
    def folder(self) -> Path:
        return self.catalog.parent / "lake/sales/orders"

    def newest(self, pattern: str) -> Path:
        """The file of a pattern that was written last."""
        return max(self.folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def verify(self, **options: Any) -> Any:
        return run_job(self.uri, "verify", **options)


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path)


def found(report: Any) -> set[tuple[str, str, str]]:
    """Severity, check and file of all findings."""
    return {(one.severity.value, one.check, one.place.rpartition("/")[2]) for one in report.listed}


def test_what_is_there(orders: Orders) -> None:
    before = contents(str(orders.catalog.parent))
    shown = run_job(orders.uri, "inspect").to_json()
    assert (shown["format"], shown["catalog"], shown["version"]) == ("iceberg", orders.uri, 3)
    assert (shown["files"], shown["delete_files"], shown["rows"], shown["missing"]) == (2, 0, 2, None)
    live = sorted(orders.folder.glob("data/*"), key=lambda path: path.stat().st_mtime_ns)[1:]
    assert shown["bytes"] == sum(path.stat().st_size for path in live)
    assert [one["operation"] for one in shown["snapshots"]] == ["overwrite", "append", "append"]
    assert [one["refs"] for one in shown["snapshots"]] == [["main"], [], []]
    listed = run_job(orders.uri, "inspect", limit=1).to_json()
    assert (len(listed["snapshots"]), listed["truncated"]) == (1, True)
    assert "2 files, 0 delete files, 2 rows" in run_job(orders.uri, "inspect").describe()
    assert contents(str(orders.catalog.parent)) == before


def test_a_healthy_table(orders: Orders) -> None:
    before = contents(str(orders.catalog.parent))
    shallow, deep = orders.verify(), orders.verify(deep=True)
    assert (shallow.decision, shallow.exit_code, found(shallow)) == ("healthy", 0, set())
    assert shallow.checked == {"snapshots": 3, "manifests": 4, "files": 3}
    assert deep.checked == {"snapshots": 3, "manifests": 4, "files": 3, "rows": 4}
    assert (deep.decision, shallow.rows_read, deep.rows_read) == ("healthy", "none", "all")
    assert contents(str(orders.catalog.parent)) == before


def test_an_empty_table(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    with closing(orders.open()) as catalog:
        catalog.create_table("sales.none", schema=pa.schema([("k", pa.int64())]))
    uri = orders.uri.replace("orders", "none")
    assert run_job(uri, "inspect").to_json()["files"] == 0
    assert run_job(uri, "verify", deep=True).decision == "healthy"


@pytest.mark.parametrize(
    ("pattern", "check"),
    [("data/*.parquet", "file"), ("metadata/*-m0.avro", "manifest"), ("metadata/snap-*", "manifest_list")],
)
def test_a_file_that_is_missing(orders: Orders, pattern: str, check: str) -> None:
    lost = orders.newest(pattern)
    lost.unlink()
    report = orders.verify()
    assert report.exit_code == TableCorruptError.exit_code
    assert {(severity, name) for severity, name, _ in found(report)} == {("error", check)}
    assert lost.name in report.describe()
    shown = run_job(orders.uri, "inspect").to_json()
    assert (shown["missing"] is None) == (check == "file")


def test_files_that_are_damaged(orders: Orders) -> None:
    cut = orders.newest("data/*.parquet")
    cut.write_bytes(cut.read_bytes()[:-1])
    assert found(orders.verify()) == {("error", "file", cut.name)}
    cut.write_bytes(b"x" * (cut.stat().st_size + 1))
    assert orders.verify().decision == "healthy", "its size alone is right"
    assert found(orders.verify(deep=True)) == {("error", "rows", cut.name)}


def test_counts_that_disagree(orders: Orders) -> None:
    """The total in a summary, and the counts in a manifest list."""
    current = orders.newest("metadata/*.metadata.json")
    document = json.loads(current.read_text())
    newest = document["snapshots"][-1]
    newest["summary"]["total-records"] = "7"
    current.write_text(json.dumps(document))
    report = orders.verify()
    assert (report.decision, report.exit_code) == ("findings", 0)
    assert found(report) == {("warning", "summary", f"snapshot {newest['snapshot-id']}")}
    assert "total-records is 7, counted 2" in report.describe()
    manifest = miscount(orders)
    assert ("error", "counts", manifest) in found(orders.verify())


def miscount(orders: Orders) -> str:
    """Write the newest manifest list again, with one more added row; return the manifest's name."""
    from pyiceberg.manifest import write_manifest_list

    table = open_table(orders.uri).iceberg  # type: ignore[attr-defined]  # of the package
    snapshot = table.current_snapshot()
    manifests = snapshot.manifests(table.io)
    wrong = next(one for one in manifests if one.added_files_count)
    wrong[9] += 1  # added_rows_count
    with write_manifest_list(
        2, table.io.new_output(snapshot.manifest_list), snapshot.snapshot_id, snapshot.parent_snapshot_id,
        snapshot.sequence_number, "null",
    ) as writer:  # fmt: skip
        writer.add_manifests(manifests)
    return str(wrong.manifest_path.rpartition("/")[2])


def test_files_outside_of_the_tables_folder(tmp_path: Path) -> None:
    orders = Orders(tmp_path, **{"write.data.path": f"file://{tmp_path}/elsewhere"})
    assert orders.verify(deep=True).checked["rows"] == 4
    lost = min((tmp_path / "elsewhere").rglob("*.parquet"))
    lost.unlink()
    assert found(orders.verify()) == {("error", "file", lost.name)}


def test_a_revision_is_pinned_and_the_catalog_has_the_newest(orders: Orders) -> None:
    table = open_table(orders.uri)
    orders.append(4)
    assert (table.revision, table.newest().revision) == (3, 4)
    assert [table.has_revision(number) for number in range(6)] == [True, True, True, True, True, False]
    assert run_job(table, "inspect").to_json()["rows"] == 2
    assert table.format.missing_of(table, 2) is None
    first = min(orders.folder.glob("metadata/00000-*"))
    first.unlink()
    assert table.format.missing_of(table, 0) == f"metadata/{first.name}"


def test_refusals(orders: Orders, tmp_path: Path) -> None:
    for uri in (orders.uri.replace("orders", "none"), orders.uri.replace("catalog.db", "other.db")):
        with pytest.raises(TableNotFoundError):
            open_table(uri)
    assert not (tmp_path / "other.db").exists()
    for uri in (orders.uri.partition("#")[0], orders.uri.replace("sales.", "")):
        with pytest.raises(InvalidUsageError, match="names no table"):
            open_table(uri)
    table = open_table(orders.uri)
    with pytest.raises(InvalidUsageError, match="merge does not apply to iceberg"):
        run_job(table, "merge")
    with pytest.raises(InvalidUsageError, match="keeps nothing"):
        take_hold(table, table.revision, timedelta(hours=1))
    current = orders.newest("metadata/*.metadata.json")
    text = current.read_text()
    current.write_text("{")
    with pytest.raises(TableCorruptError):
        open_table(orders.uri)
    current.write_text(text.replace('"location":"', '"location":"file:///moved', 1))
    with pytest.raises(TableReplacedError):
        table.newest()
    current.unlink()
    with pytest.raises(ObjectNotFoundError):
        open_table(orders.uri)


def test_commands_and_a_configuration(orders: Orders, tmp_path: Path, environment: dict[str, str]) -> None:
    healthy = run_process("verify", orders.uri, "--deep", "--json", **environment)
    assert (healthy.code, healthy.document["decision"]) == (0, "healthy")
    assert (
        "iceberg+sql:///data/catalog.db#sales.orders"
        in run_process("verify", "--help-for", "iceberg", **environment).out
    )
    file = tmp_path / "c.yaml"
    file.write_text(f"state_dir: {tmp_path}/s\ntables: [{{name: orders, uri: '{orders.uri}'}}]\n")
    assert run_process("config", "check", str(file), **environment).code == 0
    shown = run_process("status", "--config", str(file), "--json", **environment).document
    assert [(one["uri"], one["version"], one["level"]) for one in shown["tables"]] == [(orders.uri, 3, "ok")]
    page = tmp_path / "page.html"
    assert run_process("report", orders.uri, "-o", str(page), **environment).code == 0
    assert "sales.orders" in page.read_text()
    orders.newest("data/*.parquet").unlink()
    broken = run_process("verify", orders.uri, "--json", **environment)
    assert (broken.code, broken.document["counts"]) == (9, {"file": 1})
