"""Copies of generations: what is copied, what is not, and that a copy tells the same as the original.

That merges from copies have the same results is tested wherever there is an ``engine``.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import StoreUnavailableError
from memwal_ops.formats.lance.engines.merge import passes
from memwal_ops.formats.lance.generations import generation as generation_copies
from memwal_ops.formats.lance.generations.generation import (
    GenerationCopies,
    GenerationRef,
    copies_of,
    generation_ref,
    open_generation,
    read_written_by,
)
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload, assert_same, read_base

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

ROOM = 1 << 30


@pytest.fixture
def written(tmp_path: Path) -> Workload:
    """A table with a generation of 30 rows, some of them superseded."""
    table = Workload(5, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    table.put([*range(30)])
    table.put([*range(5)])
    table.flush()
    table.close()
    return table


@pytest.fixture
def copied(tmp_path: Path) -> str:
    (tmp_path / "copies").mkdir()
    return str(tmp_path / "copies")


def only(table: Table) -> GenerationRef:
    (region_id,) = table.regions.region_ids
    (flushed,) = table.region(region_id).latest().flushed_generations
    return generation_ref(region_id, flushed)


def original(written: Workload) -> tuple[Table, GenerationRef, Path]:
    table: Any = open_table(written.uri)
    return table, only(table), Path(written.uri, only(table).folder)


def test_a_copy_tells_what_the_original_does(written: Workload, copied: str) -> None:
    table, ref, _ = original(written)
    history, copies = SchemaHistory(table), GenerationCopies(table, copied, ROOM)
    there, here = open_generation(table, ref, history), open_generation(table, ref, history, copies)
    assert here.dataset.uri.startswith(copied)
    assert here.read_keys().equals(there.read_keys())
    assert [*here.read_rows(max_bytes=1 << 20)] == [*there.read_rows(max_bytes=1 << 20)]
    assert (here.data_bytes, here.physical_rows, here.projection) == (
        there.data_bytes,
        there.physical_rows,
        there.projection,
    )
    assert read_written_by(copies.store, ref.folder, 1) == read_written_by(table.store, ref.folder, 1), "the times too"
    assert {path.parent.name for path in Path(copied).rglob("*") if path.is_file()} == {
        "_versions",
        "data",
        "_deletions",
    }


@pytest.mark.parametrize("why", ["large", "no room", "versions", "a file is gone", "damaged", "no disk"])
def test_what_is_not_copied_is_read_where_it_is(
    written: Workload, copied: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, ref, folder = original(written)
    copies = GenerationCopies(table, copied, 1000 if why == "no room" else ROOM)
    if why == "large":
        monkeypatch.setattr(generation_copies, "MAX_BYTES", 1000)
    if why == "versions":
        lance.dataset(str(folder)).delete("false")
        lance.dataset(str(folder)).update_config({"any": "change"})
    if why == "a file is gone":
        next(iter((folder / "data").iterdir())).rename(folder / "data" / "another.lance")
    if why == "damaged":
        next((folder / "_versions").glob("*.manifest")).write_bytes(b"no manifest")
    if why == "no disk":

        def full(path: Path, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(Path, "write_bytes", full)
    assert not copies.add(ref)


def test_room_is_shared(written: Workload, copied: str) -> None:
    table, ref, folder = original(written)
    size = sum(path.stat().st_size for name in ("data", "_deletions") for path in (folder / name).iterdir())
    copies = GenerationCopies(table, copied, 2 * size - 1)
    assert copies.add(ref)
    assert not copies.add(ref), "the other half is too small by a byte"


def test_an_outage_is_not_a_damaged_generation(written: Workload, copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, ref, _ = original(written)

    def fail(path: str) -> bytes:
        raise StoreUnavailableError(f"{path}: no answer")

    monkeypatch.setattr(table.store, "get", fail)
    with pytest.raises(StoreUnavailableError):
        open_generation(table, ref, SchemaHistory(table), GenerationCopies(table, copied, ROOM))


def test_generations_in_the_log_stay_there(tmp_path: Path, copied: str) -> None:
    written = RegionLayout(5, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    written.put([*range(30)])
    written.flush()
    table: Any = open_table(written.uri)
    assert not GenerationCopies(table, copied, ROOM).add(only(table))


def test_none_of_a_local_table_and_none_without_a_folder(
    written: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _, _ = original(written)
    with copies_of(table, ROOM) as copies:
        assert copies is None
    monkeypatch.setattr(generation_copies, "LOCAL", frozenset())
    with copies_of(table, ROOM) as copies:
        assert copies is not None
        folder = Path(copies.location.uri)
        assert folder.is_dir()
    assert not folder.exists()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with copies_of(table, ROOM) as copies:
        assert copies is None


def test_a_merge_reads_the_copies(written: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's rows are unreadable once it was copied."""
    monkeypatch.setattr(generation_copies, "LOCAL", frozenset())
    _, _, folder = original(written)
    collapse = passes.collapse

    def without_original(*arguments: Any) -> Any:
        for path in (folder / "data").iterdir():
            path.write_bytes(b"")
        return collapse(*arguments)

    monkeypatch.setattr(passes, "collapse", without_original)
    assert run_job(written.uri, "merge").decision == "merged"
    assert_same(read_base(written.uri), written.expected())
