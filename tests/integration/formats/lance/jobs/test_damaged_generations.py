"""A damaged generation is seen by every command that reports a table's health, before a merge stops at it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.figures import poll_table
from memwal_ops.core.leases import Holder, acquire, release
from memwal_ops.core.maintain import scan_table
from memwal_ops.errors import GenerationCorruptError
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.integration.formats.lance.jobs.test_damage import cut, emptied, inverted
from tests.support.gc_options import AT_ONCE_FLAGS
from tests.support.run_cli import contents, run_here
from tests.support.tables import damage
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable

GENERATIONS = 3


def data_file(table: LsmTable, folder: Path) -> Path:
    """A file with rows of a generation; in the region layout, it is in the log."""
    if not isinstance(table, RegionLayout):
        return next(folder.glob("data/*.lance"))
    (manifest,) = folder.glob("_versions/*.manifest")
    return folder.parent / "wal" / decode_version_manifest(manifest.read_bytes()).manifest.fragments[0].files[0].path


def inverted_bytes(data: bytes) -> bytes:
    return bytes(one ^ 0xFF for one in data)


def deleted(table: LsmTable, folder: Path) -> None:
    data_file(table, folder).unlink()


def halved(table: LsmTable, folder: Path) -> None:
    cut(data_file(table, folder))


def of_no_bytes(table: LsmTable, folder: Path) -> None:
    emptied(data_file(table, folder))


def manifest_flipped(table: LsmTable, folder: Path) -> None:
    del table
    for path in folder.glob("_versions/*.manifest"):
        inverted(path)


def manifest_deleted(table: LsmTable, folder: Path) -> None:
    del table
    shutil.rmtree(folder / "_versions")


def removed(table: LsmTable, folder: Path) -> None:
    del table
    shutil.rmtree(folder)


HARMS = [deleted, halved, of_no_bytes, manifest_flipped, manifest_deleted, removed]


@pytest.fixture(params=LAYOUTS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> LsmTable:
    """Two regions with three generations each that wait."""
    made: LsmTable = request.param(1, regions=2, base_rows=20).create(str(tmp_path / "t.lance"))
    for _ in range(GENERATIONS):
        for at in range(2):
            made.put([at])
        made.flush()
    made.close()
    return made


def damaged(table: LsmTable, harm: Callable[[LsmTable, Path], None], generation: int = GENERATIONS) -> str:
    """Damage a generation of the second region, by default the last; the region."""
    region = read_backlog(open_lance_table(table.uri)).regions[UUID(table.regions[1])]
    (ref,) = (one for one in region.pending if one.generation == generation)
    harm(table, Path(table.uri, ref.folder))
    return table.regions[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("harm", HARMS)
def test_each_command_sees_it(
    table: LsmTable, harm: Callable[[LsmTable, Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(capfd, "check", "--nagios", table.uri).code == 0
    assert run_job(table.uri, "verify").decision == "healthy"
    region = damaged(table, harm)
    folder = Path(table.uri, "_mem_wal", region)
    gone = not any(path.is_file() for path in folder.glob(f"*_gen_{GENERATIONS}/**/*"))
    reason = "generation_missing" if gone else "generation_corrupt"
    before = contents(table.uri)

    document = run_here(capfd, "inspect", table.uri, "--json").document
    (state,) = (one for one in document["regions"] if one["region_id"] == region)
    assert (state["error"]["generation"], state["error"]["reason"]) == (GENERATIONS, reason)
    assert [one["state"] for one in state["generations"]][-1] == ("missing" if gone else "damaged")
    assert state["generation_counts"]["pending"] == GENERATIONS - 1
    assert f"PROBLEM in region {region} at generation {GENERATIONS}" in run_here(capfd, "inspect", table.uri).out

    found = [one for one in run_job(table.uri, "verify").to_json()["findings"] if one["severity"] == "error"]
    assert len(found) == 1
    assert region in found[0]["place"]

    plan = run_here(capfd, "merge", table.uri, "--dry-run", "--json").document
    assert [(one["region_id"], one["generation"]) for one in plan["blocked"]] == [(region, GENERATIONS)]
    assert max(one["regions"].get(region, [0, 0])[1] for one in plan["passes"]) == GENERATIONS - 1

    checked = run_here(capfd, "check", "--nagios", table.uri)
    assert (checked.code, "1 region blocked" in checked.out) == (2, True)
    report = run_here(capfd, "report", table.uri, "--json").document
    assert report["blocked"][0]["generation"] == GENERATIONS
    assert {one["level"] for one in report["findings"]} == {"critical"}
    scanned = scan_table(open_table(table.uri))
    assert [one.document["generation"] for one in scanned.blocked] == [GENERATIONS]
    assert f"Region {region} at generation {GENERATIONS}" in " ".join(run_here(capfd, "scan", table.uri).out.split())
    assert contents(table.uri) == before

    assert run_here(capfd, "merge", table.uri).code == 10, "as each of them said"


def test_the_first_of_several_blocks(table: LsmTable) -> None:
    region = damaged(table, removed, generation=3)
    damaged(table, manifest_flipped, generation=2)
    (state,) = (one for one in run_job(table.uri, "inspect").to_json()["regions"] if one["region_id"] == region)
    assert state["error"]["generation"] == 2
    assert state["generation_counts"] == {"missing": 1, "damaged": 1, "pending": 1, "merged": 0}


def test_a_flipped_end_of_a_data_file_is_seen_by_verify(table: LsmTable) -> None:
    """Its size is right, and so the commands that read no file do not see it."""

    def flip(made: LsmTable, folder: Path) -> None:
        path = data_file(made, folder)
        data = path.read_bytes()
        path.write_bytes(data[:-4] + inverted_bytes(data[-4:]))

    damaged(table, flip)
    (found,) = (one for one in run_job(table.uri, "verify").to_json()["findings"] if one["severity"] == "error")
    assert "truncated or not a Lance file" in found["evidence"]


def test_a_verification_names_what_it_did_not_read(table: LsmTable) -> None:
    report = run_job(table.uri, "verify")
    assert report.describe().endswith("were checked; rows were not read, samples at most.")
    assert report.to_json()["rows_read"] == "none"
    deep = run_job(table.uri, "verify", deep=True)
    assert " were read." in deep.describe()
    assert deep.to_json()["rows_read"] == "all"


def test_a_merged_generation_needs_no_files(table: LsmTable) -> None:
    run_job(table.uri, "merge")
    for folder in Path(table.uri, "_mem_wal").glob("*/*_gen_*"):
        shutil.rmtree(folder)
    figures, faults = poll_table(opened := open_table(table.uri), [opened.jobs["merge"]])
    assert (figures["blocked_regions"], faults) == (0, [])
    assert all(one["error"] is None for one in run_job(table.uri, "inspect").to_json()["regions"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("outcome", "code", "level"), [("partial", 2, "critical"), ("failed", 1, "warning"), ("succeeded", 0, None)]
)
def test_how_the_last_merge_ended_counts_while_something_waits(
    table: LsmTable, capfd: pytest.CaptureFixture[str], outcome: str, code: int, level: str | None
) -> None:
    """A merge reads what these commands only list."""
    store = open_table(table.uri).store
    lease, _ = acquire(store, "merge", Holder("1", "a supervisor"))
    assert lease is not None
    release(store, lease, outcome)
    assert run_here(capfd, "check", "--nagios", table.uri).code == code
    findings = run_here(capfd, "report", table.uri, "--json").document["findings"]
    assert [one["level"] for one in findings if "The last merge" in one["what"]] == ([] if level is None else [level])
    assert run_here(capfd, "merge", table.uri).code == 0
    assert run_here(capfd, "check", "--nagios", table.uri).code == 0
    assert "The last merge" not in run_here(capfd, "report", table.uri, "--json").out


SCHEMA = pa.schema([
    pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
    pa.field("text", pa.string()),
    pa.field("vector", pa.list_(pa.float32(), 2)),
])  # fmt: skip


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A generation that waits, with indexes of each type that writers maintain."""

    def rows(ids: range, word: str) -> pa.Table:
        vectors = pa.array([[float(one), 1.0] for one in ids], SCHEMA.field("vector").type)
        return pa.table([[*ids], [f"{word} {one}" for one in ids], vectors], SCHEMA)

    uri = str(tmp_path_factory.mktemp("indexed") / "t.lance")
    dataset = lance.write_dataset(rows(range(60), "old"), uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("text", "INVERTED")
    dataset.create_index("vector", "IVF_FLAT", num_partitions=1)
    create_mem_wal(uri, maintained_indexes=["text_idx", "vector_idx"])
    with RegionWriter(uri) as writer:
        writer.put(rows(range(40, 80), "new"))
    return uri


@pytest.mark.sampled(1)
@pytest.mark.parametrize("harm", ["gone", "empty", "half", "zeros"])
def test_reads_do_without_damaged_indexes_of_a_generation(indexed: str, tmp_path: Path, harm: str) -> None:
    def answers(uri: str) -> list[object]:
        reader = read(uri)
        return [
            reader.get([3, 45, 79]).sort_by("id").to_pylist(),
            reader.nearest("vector", [75.2, 1.0], 3)["id"].to_pylist(),
            reader.nearest("vector", [75.2, 1.0], 3, filter="id < 70")["id"].to_pylist(),
            sorted(reader.search("text", "new", 99)["id"].to_pylist()),
            sorted(reader.scan(filter="id IN (40, 45, 3)").to_table()["text"].to_pylist()),
        ]

    expected = answers(indexed)
    (folder,) = Path(indexed).glob("_mem_wal/*/*_gen_1")
    for path in sorted([*folder.glob("_indices/*/*"), *folder.glob("_pk_index/*")]):
        uri = damage.copy_table(indexed, str(tmp_path / f"{path.parent.name}-{path.name}"))
        damaged = Path(uri, path.relative_to(indexed))
        data = damaged.read_bytes()
        damaged.write_bytes({"half": data[: len(data) // 2], "zeros": bytes(len(data))}.get(harm, b""))
        if harm == "gone":
            damaged.unlink()
        assert answers(uri) == expected, damaged
        if harm == "gone" and path.parent.name == "_pk_index":
            continue  # a generation has none if its writer made none
        report = run_job(uri, "verify")
        named = {one["place"] for one in report.to_json()["findings"] if one["severity"] == "error"}
        assert (report.exit_code, named) == (9, {str(damaged.relative_to(uri))})
        shutil.rmtree(uri)


def test_generations_that_differ_in_what_may_be_null_are_merged(table: LsmTable) -> None:
    """Other writers, and a flipped bit, make a column nullable in one generation and not in the next."""

    def change(made: LsmTable, folder: Path) -> None:
        del made
        for path in folder.glob("_versions/*.manifest"):
            version = decode_version_manifest(path.read_bytes())
            (tombstone,) = (column for column in version.manifest.fields if column.name == "_tombstone")
            tombstone.nullable = not tombstone.nullable
            path.write_bytes(encode_version_manifest(version))

    damaged(table, change, generation=2)
    expected = table.expected()
    assert run_job(table.uri, "merge").decision == "merged"
    (key,) = table.model.keys
    assert {(row,) for row in lance.dataset(table.uri).to_table(columns=[key])[key].to_pylist()} == {*expected}


@pytest.mark.parametrize("part", ["type", "name"])
def test_a_flipped_bit_in_a_manifest_is_named(table: LsmTable, part: str, capfd: pytest.CaptureFixture[str]) -> None:
    """pylance panics at an unknown type; no store has a name with a control character, and gc sees no entry by it."""

    def flip(made: LsmTable, folder: Path) -> None:
        del made
        for path in folder.glob("_versions/*.manifest"):
            data = path.read_bytes()
            name = decode_version_manifest(data).manifest.fragments[0].files[0].path.encode()
            at = data.find(b"int64") if part == "type" else data.find(name) + name.index(b"0")
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])

    folder = Path(table.uri, "_mem_wal", damaged(table, flip), "wal")
    log = {*folder.iterdir()}
    commands = (
        ("inspect",), ("verify",), ("verify", "--deep"), ("merge", "--dry-run"), ("merge",),
        ("gc", "--apply", *AT_ONCE_FLAGS), ("maintain", "--apply"),
    )  # fmt: skip
    codes = {command: run_here(capfd, command[0], table.uri, *command[1:]).code for command in commands}
    assert not {1, 2, 20}.intersection(codes.values()), codes
    assert (codes["verify",], codes["merge",]) == (9, 10), run_job(table.uri, "verify").describe()
    with pytest.raises((GenerationCorruptError, BlockedRegionsError)):
        read(table.uri).scan().to_table()
    assert log == {*folder.iterdir()}
