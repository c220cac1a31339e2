"""What an expiry asks of the store for each version, and what its records have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import lance
import pytest

from benchmarks.server import BUCKET, counting_server
from memwal_ops import open_table
from memwal_ops.errors import TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.retention.garbage import NeededFiles, put_back, record
from memwal_ops.formats.lance.retention.schema_recorder import record_schema
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.integration.formats.lance.jobs.expire.test_expire import ALL
from tests.support.counting_store import CountingStore
from tests.support.tables.gc_tables import make, merged
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import open_dataset


def many_versions(uri: str, versions: int) -> str:
    """A plain table with so many versions before the newest."""
    PlainTable(uri).create()
    _grow(uri, versions)
    return uri


def _grow(uri: str, versions: int) -> None:
    dataset = lance.dataset(uri)
    for number in range(versions):
        dataset.update_config({"version": str(number)})


def recorded(uri: str) -> list[list[int]]:
    """The versions in each record, as its first line has them."""
    records = sorted(Path(uri, "_mem_wal_ops/expired").glob("*"))
    lines = [json.loads(path.read_bytes().partition(b"\n")[0]) for path in records]
    return [[version for version, _ in line["manifests"]] for line in lines]


@pytest.mark.parametrize(("logged", "reads"), [(False, 1), (True, 2)], ids=["plain", "with a log"])
def test_each_manifest_is_read_and_recorded_with_its_batch(tmp_path: Path, *, logged: bool, reads: int) -> None:
    """With a log, first for its progress. All else is asked once for a thousand."""
    calls = []
    for versions in (20, 50):
        folder = tmp_path / str(versions)
        if logged:
            made = make(folder, regions=1, generations=1)
            merged(made)
            _grow(made.uri, versions)
        table = open_table(made.uri if logged else many_versions(str(folder), versions))
        record_schema(table)  # as each poll of the supervisor
        store = CountingStore(table.store)
        assert len(expire.apply(replace(table, store=store), ALL).versions) >= versions
        calls.append(store.calls)
    more = {verb: calls[1][verb] - calls[0][verb] for verb in calls[1]}
    read = more.pop("get")
    assert not any(more.values()), more
    assert 30 * reads <= read <= 30 * reads + 1
    assert calls[1]["put_if_absent"] <= 4, "the record, the announcement, and trials of the store"


@pytest.mark.long
@pytest.mark.s3
def test_requests_for_each_of_a_thousand_versions_on_s3(tmp_path: Path) -> None:
    totals = []
    with counting_server() as (options, requests):
        for versions in (10, 1_010):
            local, uri = tmp_path / str(versions), f"s3://{BUCKET}/{versions}.lance"
            many_versions(str(local), versions)
            store = open_store(resolve(uri, options))
            for path in local.rglob("*.*"):
                store.put(str(path.relative_to(local)), path.read_bytes())
            table = open_table(uri, options)
            requests.clear()
            assert len(expire.apply(table, ALL).versions) == versions
            totals.append(requests.total())
    assert (totals[1] - totals[0]) / 1_000 <= 2 + 2 / 1_000


def test_what_is_kept_for_a_tag_is_recorded_without_the_others(tmp_path: Path) -> None:
    """A record of a thousand would be read by each later run, and may have values that an erase must find deleted."""
    uri = many_versions(str(tmp_path / "t.lance"), 6)
    table = open_table(uri)
    NeededFiles().set_aside(table, [2, 3, 4])
    assert recorded(uri) == [[2, 3, 4]]
    table.store.delete_many([f"_versions/{2**64 - 1 - version}.manifest" for version in (2, 3, 4)])
    open_dataset(uri).tags.create("late", 5)
    Path(uri, "_refs/tags/late.json").write_text(Path(uri, "_refs/tags/late.json").read_text().replace("5", "3", 1))
    report = expire.apply(open_table(uri), ALL)
    assert (report.put_back, report.versions) == ((3,), (1, 5, 6))
    assert recorded(uri) == [[3]]
    open_dataset(uri).tags.delete("late")
    assert expire.apply(open_table(uri), ALL).versions == (3,)
    assert recorded(uri) == []


def test_two_manifests_of_one_number_are_not_put_back(tmp_path: Path) -> None:
    uri, other = (many_versions(str(tmp_path / name), 3) for name in ("t.lance", "other.lance"))
    table = open_table(uri)
    for number, source in enumerate((uri, uri, other)):
        data = Path(source, f"_versions/{2**64 - 1 - 2}.manifest").read_bytes()
        record(table.store, [(2, data), *([(3, b"other")] * number)])
    table.store.delete_many([f"_versions/{2**64 - 1 - 2}.manifest"])
    assert put_back(table, [2], [1, 3]) == ()
    last = max(Path(uri, "_mem_wal_ops/expired").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    last.unlink()
    assert put_back(table, [2], [1, 3]) == (2,), "one manifest in two records"


def test_a_record_that_cannot_be_read_stops_it_before_a_file_is_deleted(tmp_path: Path) -> None:
    uri = many_versions(str(tmp_path / "t.lance"), 4)
    NeededFiles().set_aside(open_table(uri), [2, 3])
    (path,) = Path(uri, "_mem_wal_ops/expired").glob("*")
    whole = path.read_bytes()
    line, _, rest = whole.partition(b"\n")
    files = {str(one) for folder in ("data", "_transactions") for one in Path(uri, folder).iterdir()}
    later = line.replace(b'"format": 1', b'"format": 2') + b"\n" + rest
    swapped = line.replace(b"[[2,", b"[[3,", 1) + b"\n" + rest
    for damaged in (whole[:-3], whole + b"x", rest, b"", swapped, later):
        path.write_bytes(damaged)
        with pytest.raises(UnsupportedFeatureError if damaged == later else TableCorruptError, match=path.name):
            expire.apply(open_table(uri), ALL)
        assert files == {str(one) for folder in ("data", "_transactions") for one in Path(uri, folder).iterdir()}
    path.write_bytes(whole)
    assert expire.apply(open_table(uri), ALL).exit_code == 0
    assert recorded(uri) == []
