"""The writer of a legacy region: claim, append with holes, seal, flush; and a reader beside it."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import legacy, run_job
from memwal_ops.errors import (
    CommitConflictError,
    InvalidUsageError,
    NotALanceTableError,
    UnsupportedFeatureError,
    WriterFencedError,
)
from memwal_ops.memwal import read
from tests.support.tables.legacy_table import (
    LegacyTable,
    base_rows,
    details_of,
    mem_wal,
    put_details,
    rows,
    say_release,
    states_of,
)


@pytest.fixture
def table(tmp_path: Path) -> LegacyTable:
    made = LegacyTable(str(tmp_path / "t.lance")).create()
    made.other("first", 0, "MERGED")
    return made.finish()


def scanned(uri: str) -> dict[int, float]:
    found = read(uri).scan().to_table().to_pydict()
    assert len({*found["id"]}) == len(found["id"])
    return dict(zip(found["id"], found["val"], strict=True))


@pytest.mark.req("S1-001", "S1-002", "S1-003", "S1-004", "S1-026", "S1-030")
def test_rows_go_from_the_log_into_the_base(table: LegacyTable) -> None:
    """Every write is in the index before it is acknowledged, and read from then on."""
    writer = legacy.MemWalWriter(table.uri, "r", "host")
    for number in range(3):
        assert writer.append(rows({1: 100.0 + number, 50 + number: 1.0})) == number
        assert details_of(table.uri)[-1]["entries"] == [*range(number + 1)]
        table.merged |= {1: 100.0 + number, 50 + number: 1.0}
        assert scanned(table.uri) == table.merged
        assert base_rows(table.uri) == table.model, "a state commit carries the rows on"
    assert read(table.uri).scan(["val"], "id = 1").to_table().to_pydict() == {"val": [102.0]}
    assert writer.seal() == 0
    assert states_of(table.uri) == {("first", 0): "MERGED", ("r", 0): "SEALED", ("r", 1): "OPEN"}
    writer.append(rows({2: 200.0}))
    assert writer.flush() == (0,)
    assert scanned(table.uri) == {**table.merged, 2: 200.0}
    assert run_job(table.uri, "merge").decision == "merged"
    assert base_rows(table.uri) == table.merged
    assert scanned(table.uri) == {**table.merged, 2: 200.0}
    assert states_of(table.uri) == {("first", 0): "MERGED", ("r", 0): "MERGED", ("r", 1): "OPEN"}
    assert run_job(table.uri, "verify", deep=True).decision == "healthy"


@pytest.mark.req("S1-005", "S1-022", "S1-023", "S1-025", "S1-027")
def test_a_new_writer_claims_replays_and_fences(table: LegacyTable) -> None:
    old = legacy.MemWalWriter(table.uri, "r", "old")
    old.append(rows({1: 100.0}))
    new = legacy.MemWalWriter(table.uri, "r", "new")
    replayed = new.replay()
    assert replayed is not None
    assert replayed.to_pylist() == [{"id": 1, "val": 100.0}]
    for late in (lambda: old.append(rows({2: 1.0})), old.seal):
        with pytest.raises((WriterFencedError, CommitConflictError)):
            late()
    assert new.append(rows({3: 300.0})) == 2, "the place of the fenced writer's entry is taken"
    assert details_of(table.uri)[-1]["entries"] == [0, 2]
    assert scanned(table.uri) == {**table.model, 1: 100.0, 3: 300.0}
    new.seal()
    new.flush()
    run_job(table.uri, "merge")
    assert base_rows(table.uri) == {**table.model, 1: 100.0, 3: 300.0}


@pytest.mark.req("S1-015", "S1-016")
@pytest.mark.parametrize("taken", [["00000000000000000000.arrow"], ["0.lance", "1.arrow", "2.arrow"]])
def test_places_that_are_taken_become_holes(table: LegacyTable, taken: list[str]) -> None:
    folder = Path(table.uri, "wal/r/0")
    folder.mkdir(parents=True)
    for name in taken:
        folder.joinpath(name).write_bytes(b"another writer's")
    writer = legacy.MemWalWriter(table.uri, "r", "host")
    assert writer.append(rows({1: 100.0})) == len(taken)
    assert writer.append(rows({1: 101.0})) == len(taken) + 1
    assert details_of(table.uri)[-1]["entries"] == [len(taken), len(taken) + 1]
    assert scanned(table.uri) == {**table.model, 1: 101.0}


def test_two_regions_at_once(table: LegacyTable) -> None:
    """States of other MemWALs do not conflict: the change is decided again on the newest version."""
    a, b = legacy.MemWalWriter(table.uri, "a"), legacy.MemWalWriter(table.uri, "b")
    for number in range(3):
        a.append(rows({number: 1.5}))
        b.append(rows({10 + number: 2.5}))
    assert scanned(table.uri) == {**table.model, **dict.fromkeys(range(3), 1.5), **dict.fromkeys(range(10, 13), 2.5)}


def test_flushed_is_not_written_where_it_would_mean_merged(table: LegacyTable) -> None:
    writer = legacy.MemWalWriter(table.uri, "r", "host")
    writer.append(rows({1: 100.0}))
    writer.seal()
    say_release(table.uri, "0.35.0")
    writer = legacy.MemWalWriter(table.uri, "r", "host")
    with pytest.raises(InvalidUsageError, match=r"before 0\.36"):
        writer.flush()


def test_other_tables_are_refused(tmp_path: Path, table: LegacyTable) -> None:
    plain = LegacyTable(str(tmp_path / "p.lance")).create()
    lance.dataset(plain.uri).initialize_mem_wal()
    for attempt in (lambda: legacy.read(plain.uri), lambda: legacy.MemWalWriter(plain.uri, "r")):
        with pytest.raises(NotALanceTableError, match="not a table with the legacy"):
            attempt()
    with pytest.raises(InvalidUsageError, match="names a folder"):
        legacy.MemWalWriter(table.uri, "../r")
    with pytest.raises(InvalidUsageError, match="no column nothing"):
        legacy.read(table.uri).scan(["nothing"]).to_table()
    assert [one.id.region for one in legacy.mem_wals(table.uri)] == ["first"]


def test_rows_that_no_merge_takes_are_refused(tmp_path: Path) -> None:
    """Dictionaries inside of manifests are fixed: a log of such a table would be read, and never merged."""
    uri = str(tmp_path / "t.lance")
    words = pa.array(["a", "b"]).dictionary_encode()
    lance.write_dataset(pa.table({"id": [1, 2], "word": words}), uri, data_storage_version="legacy")
    put_details(uri, [mem_wal("first", 0, "MERGED")])
    with pytest.raises(UnsupportedFeatureError, match="dictionary columns word"):
        legacy.MemWalWriter(uri, "r")
    assert [one.id.region for one in legacy.mem_wals(uri)] == ["first"]
