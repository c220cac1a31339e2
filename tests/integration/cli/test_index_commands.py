"""``snapshot`` and ``catchup`` at the command line: documents, words, exit codes, and what a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import lance
import pytest
from lance.dataset import DatasetOptimizer

from memwal_ops import open_table
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs import merge
from tests.support.run_cli import contents, run_here, run_process
from tests.support.tables import damage
from tests.support.tables.indexed import create, write
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

INDEX_KEYS = {
    *("name", "type", "uncovered_fragments", "uncovered_rows", "segments", "before", "after", "decision"),
    *("method", "why", "engine", "engine_reason", "stages", "answers", "partitions", "error", "seconds"),
    "bytes_written",
}


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    table = Workload(1, regions=2, base_rows=60).create(str(tmp_path / "t.lance")).step(8)
    for at, _ in enumerate(table.regions):
        table.put([at])
    table.close()
    return table


def test_snapshot(made: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(made.uri)
    dry = run_here(capfd, "snapshot", made.uri, "--dry-run", "--json")
    assert (dry.code, dry.document["decision"]) == (0, "dry_run")
    assert contents(made.uri) == before
    ran = run_here(capfd, "snapshot", made.uri, "--json")
    assert ran.code == 0
    assert set(ran.document) == {
        *("decision", "num_regions", "stored", "current", "wal_hints_updated", "skipped", "version", "seconds"),
        *("commit_conflicts", "lost_races", "run_id"),
    }
    assert {key: ran.document[key] for key in ("decision", "num_regions", "stored", "version")} == {
        "decision": "built",
        "num_regions": 2,
        "stored": "inline",
        "version": lance.dataset(made.uri).version,
    }
    assert run_here(capfd, "snapshot", made.uri, "--json").document["decision"] == "unchanged"
    external = run_here(capfd, "snapshot", made.uri, "--inline-threshold", "1")
    assert external.code == 0
    assert external.out.startswith("built: 2 regions, in a file next to the index, as version")
    assert (
        "unchanged: the stored snapshot of 2 regions"
        in run_here(capfd, "snapshot", made.uri, "--inline-threshold", "1").out
    )
    shown = run_here(capfd, "inspect", made.uri, "--json").document["snapshot"]
    assert (shown["stored"], shown["num_regions"]) == ("external", 2)
    assert "Snapshot of 2 regions, taken " in run_here(capfd, "inspect", made.uri).out


def test_a_region_that_cannot_be_read(made: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    damage.truncate_region_manifest(made.uri, made.regions[0])
    ran = run_here(capfd, "snapshot", made.uri, "--json")
    assert (ran.code, ran.document["decision"], ran.document["num_regions"]) == (10, "built", 1)
    (skipped,) = ran.document["skipped"]
    assert set(skipped) == {"path", "reason", "detail", "fault"}
    assert (skipped["path"], skipped["reason"]) == (f"_mem_wal/{made.regions[0]}", "region_manifest_corrupt")
    text = run_here(capfd, "snapshot", made.uri)
    assert text.code == 10
    assert f"NOT READ: _mem_wal/{made.regions[0]} (region_manifest_corrupt)" in text.out


def test_a_stray_is_named_and_no_fault(made: Workload, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.lance/_mem_wal/notes.txt").write_text("x")
    ran = run_here(capfd, "snapshot", made.uri)
    assert ran.code == 0
    assert "skipped: _mem_wal/notes.txt (stray)" in ran.out


def test_catchup(made: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    lance.dataset(made.uri).create_scalar_index("val", "BTREE")
    merge.apply(open_table(made.uri), merge.MergeOptions())
    before = contents(made.uri)
    dry = run_here(capfd, "catchup", made.uri, "--dry-run", "--json")
    assert (dry.code, dry.document["decision"]) == (0, "dry_run")
    assert {one["decision"] for one in dry.document["indexes"]} == {"would_update"}
    assert contents(made.uri) == before
    assert (
        "dry_run: would update 2 indexes; nothing was changed." in run_here(capfd, "catchup", made.uri, "--dry-run").out
    )
    one = run_here(capfd, "catchup", made.uri, "--index", "val_idx", "--json")
    assert one.code == 0
    assert set(one.document) == {
        "decision",
        "indexes",
        "blocked",
        "version",
        "seconds",
        "commit_conflicts",
        "lost_races",
        "run_id",
    }
    (index,) = one.document["indexes"]
    assert set(index) == INDEX_KEYS
    assert (index["name"], index["type"], index["decision"], index["before"]) == ("val_idx", "BTree", "updated", {})
    assert index["uncovered_fragments"] > 0
    assert index["uncovered_rows"] > 0
    progress = {str(region): merged for region, merged in open_table(made.uri).index.merged_generations.items()}
    assert index["after"] == progress
    text = run_here(capfd, "catchup", made.uri)
    assert text.out.startswith("caught_up: 1 index updated")
    assert run_here(capfd, "catchup", made.uri, "--json").document["decision"] == "unchanged"
    assert "unchanged: all indexes were caught up" in run_here(capfd, "catchup", made.uri).out
    shown = {one["name"]: one for one in run_here(capfd, "inspect", made.uri, "--json").document["indexes"]}
    assert shown["val_idx"]["index_catchup"] == progress


def test_no_indexes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = Workload(1, regions=1, base_rows=20, with_btree=False).create(str(tmp_path / "t.lance"))
    ran = run_here(capfd, "catchup", made.uri)
    assert (ran.code, ran.out) == (0, "no_indexes: the base table has no index.\n")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["snapshot", "--inline-threshold", "-1"], "must be at least 0, not -1"),
        (["snapshot", "--inline-threshold", "many"], "is not a whole number"),
        (["snapshot", "--inline-threshold", "1__000"], "is not a whole number"),
        (["catchup", "--index", "nope"], "no index nope"),
        (["catchup", "--min-uncovered-rows", "-1"], "must be at least 0, not -1"),
        (["catchup", "--max-segments", "0"], "must be at least 1, not 0"),
        (["catchup", "--migrate-codebook", "id_idx", "new"], "no codebook"),
        (["catchup", "--migrate-codebook", "one"], "requires 2 arguments"),
    ],
)
def test_usage(made: Workload, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    before = contents(made.uri)
    ran = run_here(capfd, arguments[0], made.uri, *arguments[1:])
    assert ran.code == 2
    assert says in ran.err
    assert contents(made.uri) == before


@pytest.mark.parametrize("command", ["snapshot", "catchup"])
def test_not_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert run_here(capfd, command, str(tmp_path / "nothing.lance")).code == 3
    damaged = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    damage.set_feature_flag(damaged.uri, reader=False)
    before = contents(damaged.uri)
    ran = run_here(capfd, command, damaged.uri, "--json")
    assert (ran.code, ran.document["error"]["reason"]) == (8, "unsupported_feature")
    assert contents(damaged.uri) == before


@pytest.mark.long
def test_a_store_that_is_read_only(made: Workload) -> None:
    merge.apply(open_table(made.uri), merge.MergeOptions())
    damage.make_read_only(made.uri)
    try:
        for command in ("snapshot", "catchup"):
            ran = run_process(command, made.uri, "--json", wrap=damage.held_by_permissions)
            assert (ran.code, ran.document["error"]["reason"]) == (22, "read_only_store")
        idle = run_process("catchup", made.uri, "--min-uncovered-rows", "100000", wrap=damage.held_by_permissions)
        assert idle.code == 0, "what does not write needs no permission"
    finally:
        damage.make_writable(made.uri)


def test_an_index_that_fails_is_named_and_the_others_are_updated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    (entry,) = base_indexes(open_table(uri))["kind_idx"].segments
    for path in (tmp_path / "t.lance/_indices" / str(UUID(bytes=entry.uuid.uuid))).iterdir():
        path.unlink()
    ran = run_here(capfd, "catchup", uri, "--json")
    assert (ran.code, ran.document["decision"]) == (18, "incomplete")
    decisions = {one["name"]: one["decision"] for one in ran.document["indexes"]}
    assert decisions.pop("kind_idx") == "failed"
    assert set(decisions.values()) == {"updated"}
    error = next(one["error"] for one in ran.document["indexes"] if one["name"] == "kind_idx")
    assert error["reason"] == "indexes_behind"
    assert "catchup URI --index kind_idx --rebuild" in error["detail"]
    text = run_here(capfd, "catchup", uri)
    assert text.code == 18
    assert "incomplete: 1 index failed" in text.out
    assert "FAILED: kind_idx" in text.out


def test_a_refused_codebook_has_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = create(str(tmp_path / "t.lance"), vector="IVF_FLAT")
    write(uri, 0)
    lance.dataset(uri).optimize.optimize_indices(index_names=["vector_idx"], num_indices_to_merge=0)
    write(uri, 1)
    real = DatasetOptimizer.optimize_indices

    def retrained(self: object, **options: object) -> None:
        real(self, **{**options, "retrain": options["index_names"] == ["vector_idx"]})

    monkeypatch.setattr(DatasetOptimizer, "optimize_indices", retrained)
    before = open_table(uri)
    ran = run_here(capfd, "catchup", uri, "--index", "vector_idx")
    assert ran.code == 19
    assert "codebook_changed" in ran.out
    assert "--rebuild" in ran.out
    assert open_table(uri).version == before.version


def test_migration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    go_on = ("catchup", uri, "--migrate-codebook", "vector_idx", "fresh")
    assert run_here(capfd, *go_on, "--dry-run", "--json").document["decision"] == "dry_run"
    words = []
    for _ in range(6):
        ran = run_here(capfd, *go_on, "--json")
        assert ran.code == 0
        assert set(ran.document) == {"decision", "old", "new", "holds", "next", "version", "seconds", "run_id"}
        words.append(ran.document["decision"])
    assert words[0] == "created"
    assert words[-1] == "done"
    assert "dropped" in words
    text = run_here(capfd, *go_on)
    assert text.out == "done: vector_idx is dropped, and fresh replaces it.\nNext: Nothing is left to do.\n"
