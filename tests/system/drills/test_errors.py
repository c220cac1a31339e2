"""Drills of errors about a table: each is brought about, then its page is followed until the trouble is over."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.dataset import DatasetOptimizer

from memwal_ops import open_table
from memwal_ops.core import collector, commit_retry
from memwal_ops.errors import WalCorrupt, WriterFencedError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.engines.merge.passes import LocalMergeEngine
from memwal_ops.formats.lance.generations.generation import Generation
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.log.region_files import entry_path
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.options import CatchupOptions
from tests.integration.formats.lance.jobs.adopt import test_drained as drained
from tests.support.tables import damage, wire
from tests.support.tables.answering import about_to_be_ruined
from tests.support.tables.files import Files
from tests.support.tables.indexed import create, rows, write
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.schemas import PRIMARY_KEY, row_table
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from tests.support.run_cli import Outcome
    from tests.system.drills.drill import Drill

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)])
ROWS = pa.table({"id": [1, 2]}, schema=SCHEMA)
REGION = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def table(drill: Drill, tmp_path: Path) -> Workload:
    """One region with three generations, nothing merged; a copy as ``$BACKUP``."""
    made = Workload(1, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.put([1, 2, 50])
        made.flush()
    shutil.copytree(made.uri, tmp_path / "backup")
    folder = damage.generation_path(made.uri, made.regions[0], 2)
    drill.given(
        URI=made.uri,
        BACKUP=str(tmp_path / "backup"),
        REGION=made.regions[0],
        GENERATION=f"{folder.parent.name}/{folder.name}",
    )
    return made


def all_is_merged(table: Workload) -> None:
    assert_same(read_base(table.uri), table.expected())


def blocked(drill: Drill, outcome: Outcome) -> dict[str, Any]:
    """The one entry of a merge that is blocked for the page's reason."""
    (entry,) = outcome.document["blocked"]
    assert entry["reason"] == drill.reason
    return dict(entry)


def small(uri: str, rows: pa.Table = ROWS) -> str:
    """A table of two rows that no writer has opened."""
    lance.write_dataset(rows, uri)
    return uri


def put(uri: str, rows: pa.Table = ROWS) -> None:
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(rows)


def test_01_error(drill: Drill, table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise RuntimeError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(LocalMergeEngine, "run", fail)
        drill.refused('memwal-ops merge "$URI"')
        *_, report = drill.follow(4)
    assert "unexpected_error" in report.err
    assert "Traceback" in report.err
    assert read_base(table.uri) == table.expected({})
    drill.rest()
    all_is_merged(table)


def test_02_invalid_usage(drill: Drill, table: Workload) -> None:
    drill.refused('memwal-ops merge "$URI" --max-bytes many')
    drill.refused('memwal-ops gc "$URI" --reader-grace 1s')
    form, _, _, _, danger, _ = drill.rest()
    assert "64MiB" in form.err
    assert "--allow-unsafe" in danger.err
    all_is_merged(table)


def test_03_table_not_found(drill: Drill, table: Workload) -> None:
    wrong = table.uri.replace("t.lance", "tt.lance")
    drill.given(URI=wrong)
    drill.refused('memwal-ops merge "$URI"')
    _, beside = drill.follow(2)
    assert "t.lance" in beside.out.splitlines()
    assert not Path(wrong).exists()
    drill.given(URI=table.uri)
    drill.rest()


def test_04_not_a_lance_table(drill: Drill, table: Workload, tmp_path: Path) -> None:
    drill.given(URI=str(tmp_path), TABLE=table.uri)
    drill.refused('memwal-ops merge "$URI"')
    _, found, _ = drill.rest()
    assert f"{table.uri}/_versions" in found.out.splitlines()


def test_05_no_memwal_index(drill: Drill, tmp_path: Path) -> None:
    drill.given(URI=small(str(tmp_path / "t.lance")))
    drill.refused('memwal-ops merge "$URI"')
    about, regions, *_, inspected = drill.rest()
    assert "plain table" in about.out
    assert regions.out == ""
    assert "No writer has opened a region yet" in inspected.out


def test_06_no_primary_key(drill: Drill, tmp_path: Path) -> None:
    plain = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    uri = small(str(tmp_path / "t.lance"), pa.table({"id": [1, 2]}, schema=plain))
    damage.put_empty_details(uri)
    drill.given(URI=uri, COLUMN="id")
    drill.refused('memwal-ops merge "$URI"')
    _, schema, twice, *_ = drill.rest()
    assert schema.out.startswith("id: int64 not null")
    assert twice.out == "0 rows too many\n"
    put(uri)
    assert drill.run('memwal-ops merge "$URI"').code == 0


def test_08_unsupported_feature(drill: Drill, tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    damage.make_v1_named_table(uri, ROWS).initialize_mem_wal()
    put(uri)
    drill.given(URI=uri)
    drill.refused('memwal-ops merge "$URI"')
    drill.rest()
    assert lance.dataset(uri).count_rows() == 2


def test_09_table_corrupt(drill: Drill, table: Workload, tmp_path: Path) -> None:
    drill.run('memwal-ops merge "$URI"')
    name, _ = wire.newest_manifest(Files(table.uri))
    file = Path(table.uri, name)
    shutil.copy(file, tmp_path / "backup/_versions")
    version = lance.dataset(table.uri).version
    file.write_bytes(file.read_bytes()[:500])
    drill.given(FILE=file.name, VERSION=str(version - 1))
    assert file.name in drill.refused('memwal-ops merge "$URI"')["message"]
    with pytest.raises(OSError, match="too small"):
        lance.dataset(table.uri, version=version - 1).restore()  # as the page says
    _, _, rows_before, _, mended = drill.follow(5)
    assert rows_before.out == "30\n"
    assert "Up to date" in mended.out
    drill.rest()
    assert lance.dataset(table.uri).version == version, "merged again"
    all_is_merged(table)


def test_10_blocked(drill: Drill, table: Workload, tmp_path: Path) -> None:
    folder = damage.generation_path(table.uri, table.regions[0], 2)
    shutil.move(folder, tmp_path / "kept")
    outcomes = drill.follow_until(lambda: shutil.move(tmp_path / "kept", folder), before="memwal-ops merge")
    assert outcomes[0].document["decision"] == "blocked"
    assert set(outcomes[0].document["blocked"][0]) >= {"region_id", "generation", "reason", "detail"}
    assert "PROBLEM in region" in outcomes[1].out
    all_is_merged(table)


def test_11_region_manifest_corrupt(drill: Drill, table: Workload) -> None:
    file = damage.truncate_region_manifest(table.uri, table.regions[0])
    drill.given(FILE=file.name)
    assert file.name in drill.refused('memwal-ops why "$URI" "$REGION/1"')["message"]
    first, *_ = drill.rest()
    assert file.name in blocked(drill, first)["detail"]
    all_is_merged(table)


def test_12_region_manifest_gap(drill: Drill, table: Workload) -> None:
    file = damage.remove_region_manifest_version(table.uri, table.regions[0], 3)
    drill.given(FILE=file.name)
    assert file.name in drill.refused('memwal-ops why "$URI" "$REGION/1"')["message"]
    first, _, versions, hint, *_ = drill.rest()
    assert file.name in blocked(drill, first)["detail"]
    assert versions.out.startswith("[1, 2, 4, ")
    assert '"version"' in hint.out
    all_is_merged(table)


def test_13_generation_missing(drill: Drill, table: Workload) -> None:
    damage.remove_generation(table.uri, table.regions[0], 2)
    drill.refused('memwal-ops why "$URI" "$REGION/2"')
    first, _, folders, log, *_ = drill.rest()
    assert blocked(drill, first)["generation"] == 2
    assert "wal" in folders.out.splitlines()
    assert ".arrow" in log.out
    all_is_merged(table)


def test_14_generation_corrupt(drill: Drill, table: Workload) -> None:
    data = next((damage.generation_path(table.uri, table.regions[0], 2) / "data").iterdir())
    data.write_bytes(b"")
    inspected, first, empty, *_ = drill.rest()
    assert "generation 2: generation_corrupt" in inspected.out
    assert data.name in "".join(inspected.out.split())
    assert blocked(drill, first)["generation"] == 2
    assert data.name in empty.out
    all_is_merged(table)


def test_15_schema_projection(drill: Drill, table: Workload) -> None:
    """A rename that no version explains any more."""
    lance.dataset(table.uri).alter_columns({"path": "val", "name": "value"})
    lance.dataset(table.uri).cleanup_old_versions(retain_versions=1)
    drill.given(OLD="val", NEW="value")
    first, base, generation, *_ = drill.rest()
    assert "'val'" in blocked(drill, first)["detail"]
    assert "\nvalue: " in base.out
    assert "\nval: " in generation.out
    assert lance.dataset(table.uri).schema.names == ["id", "value", "txt"]
    lance.dataset(table.uri).alter_columns({"path": "value", "name": "val"})
    all_is_merged(table)


def test_16_duplicate_keys(drill: Drill, tmp_path: Path) -> None:
    table = Workload(1, regions=2, base_rows=10).create(str(tmp_path / "t.lance"))
    # Against the order of their ids, in which a merge of all would take them.
    winner, loser = sorted(table.regions, reverse=False)
    for number, region in enumerate([loser, winner]):
        with lance.dataset(table.uri).mem_wal_writer(region) as writer:
            row = {"id": 5, "val": float(number), "txt": "who wins?"}
            writer.put(pa.Table.from_pylist([row], schema=lance.dataset(table.uri).schema))
    drill.given(URI=table.uri, WINNER=winner, LOSER=loser)
    first, *_ = drill.rest()
    assert {one["reason"] for one in first.document["blocked"]} == {drill.reason}
    assert read_base(table.uri)[(5,)]["val"] == 1.0


def test_17_invalid_format(drill: Drill, table: Workload) -> None:
    """An index is behind, and the manifest of a version that tells how far it got is damaged."""
    drill.run('memwal-ops merge "$URI" --max-generations 1')
    drill.run('memwal-ops catchup "$URI"')
    for number in (51, 52):
        table.put([number])
        table.flush()
        drill.run('memwal-ops merge "$URI"')
    names = wire.manifest_names(Files(table.uri))
    file = Path(table.uri, names[max(names) - 1])
    shutil.copy(file, Path(os.environ["BACKUP"], "_versions"))
    file.write_bytes(file.read_bytes()[:500])
    drill.given(FILE=file.name)
    assert file.name in drill.refused('memwal-ops gc "$URI"')["message"]
    table.put([53])
    table.flush()
    assert drill.run('memwal-ops merge "$URI"').code == 0
    drill.follow(5)
    file.write_bytes(file.read_bytes()[:500])
    assert drill.run('memwal-ops gc "$URI"').code == drill.code
    *_, kept = drill.rest()
    assert f"_versions/{file.name} cannot be read" in " ".join(kept.out.split())
    all_is_merged(table)


def test_18_indexes_behind(drill: Drill, tmp_path: Path) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    (entry,) = base_indexes(open_table(uri))["kind_idx"].segments
    for path in (Path(uri) / "_indices" / str(UUID(bytes=entry.uuid.uuid))).iterdir():
        path.unlink()
    drill.given(URI=uri, INDEX="kind_idx")
    first, *_, last = drill.rest()
    failed = [one for one in first.document["indexes"] if one["decision"] == "failed"]
    assert [(one["name"], one["error"]["reason"]) for one in failed] == [("kind_idx", drill.reason)]
    assert "caught_up" in last.out or "unchanged" in last.out


def test_19_codebook_changed(drill: Drill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance may train again when it merges segments; here it does so each time."""
    uri = create(str(tmp_path / "t.lance"), vector="IVF_FLAT")
    real = DatasetOptimizer.optimize_indices
    for at in range(1, CatchupOptions().max_segments):
        lance.write_dataset(rows([5000 + at], "new"), uri, mode="append")
        lance.dataset(uri).optimize.optimize_indices(index_names=["vector_idx"], num_indices_to_merge=0)

    def retrained(self: object, **options: Any) -> None:
        merges = options.get("num_indices_to_merge") != 0
        real(self, **options, retrain=merges and options["index_names"] == ["vector_idx"])

    monkeypatch.setattr(DatasetOptimizer, "optimize_indices", retrained)
    write(uri, 0)
    drill.given(URI=uri, INDEX="vector_idx", NEW="fresh")
    version = open_table(uri).version
    first, *_ = drill.rest()
    failed = [one for one in first.document["indexes"] if one["decision"] == "failed"]
    assert [(one["name"], one["error"]["reason"]) for one in failed] == [("vector_idx", drill.reason)]
    assert open_table(uri).version > version


def test_25_object_not_found(drill: Drill, table: Workload) -> None:
    drill.refused('memwal-ops why "$URI" _mem_wal/no-such-thing')
    drill.rest()
    all_is_merged(table)


def test_26_version_gone(drill: Drill, table: Workload) -> None:
    drill.refused('memwal-ops hold "$URI" --version 999')
    standing = lance.dataset(table.uri).version
    drill.given(VERSION=str(standing))
    _, versions, _, held, listed = drill.rest()
    assert f"{standing} " in versions.out
    assert held.out.startswith(f"held: version {standing} ")
    assert "long report" in listed.out


def test_28_table_replaced(drill: Drill, table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup takes the table's place after gc has planned its first batch."""
    listed = damage.generation_path(table.uri, table.regions[0], 1)
    orphan = listed.with_name("0badcafe_gen_1")
    shutil.copytree(listed, orphan)
    for path in [orphan, *orphan.rglob("*")]:
        os.utime(path, (1, 1))
    real = collector.delete_proven

    def overtaken(*arguments: Any) -> Any:
        shutil.rmtree(table.uri)
        shutil.copytree(os.environ["BACKUP"], table.uri)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(collector, "delete_proven", overtaken)
        outcome = drill.run('memwal-ops gc "$URI" --apply --json')
    assert outcome.code == drill.code
    assert f"of {table.uri} is not the same object as before" in outcome.document["replaced"]
    assert (outcome.document["decision"], outcome.document["deleted"]["objects"]) == ("incomplete", 0)
    assert Files(table.uri).listing("") == Files(os.environ["BACKUP"]).listing("")
    drill.rest()
    assert drill.run('memwal-ops merge "$URI"').code == 0
    all_is_merged(table)


def test_29_region_replaced(drill: Drill, table: Workload) -> None:
    assert drill.run('memwal-ops merge "$URI"').code == 0
    table.close()
    shutil.rmtree(f"{table.uri}/_mem_wal/{table.regions[0]}")
    for number in (60, 61, 62, 63, 64):
        table.put([number])
        table.flush()
    table.close()
    drill.refused('memwal-ops why "$URI" "$REGION/1"')
    first, _, planned, *_ = drill.rest()
    assert "generation 3 that was merged is not" in blocked(drill, first)["detail"]
    assert planned.out.startswith("planned: 1 region as unmerged.")
    all_is_merged(table)


def test_30_commit_conflict(drill: Drill, table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit.refuse_if_not_newest

    def overtaken(pinned: Any, version: int) -> None:
        lance.dataset(table.uri).update_metadata({"by": f"somebody who is faster than {version}"})
        real(pinned, version)

    with monkeypatch.context() as patch:
        patch.setattr(commit, "refuse_if_not_newest", overtaken)
        patch.setattr(commit_retry, "MAX_CONSECUTIVE_CONFLICTS", 3)
        drill.told(drill.run('memwal-ops snapshot "$URI" --json'))
        _, versions, _ = drill.follow(3)
    assert len(versions.out.splitlines()) > 4
    drill.rest()
    all_is_merged(table)


def test_32_writer_fenced(drill: Drill, tmp_path: Path) -> None:
    made = RegionLayout(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    drill.given(URI=made.uri)
    region = uuid.UUID(made.regions[0])
    old = RegionWriter(open_table(made.uri), region)
    old.put(row_table(made.schema, made.key, [1], made.rng, 1))
    new = RegionWriter(open_table(made.uri), region)
    new.put(row_table(made.schema, made.key, [2], made.rng, 2))
    with pytest.raises(WriterFencedError, match=f"epoch {old.epoch},") as refused:
        old.put(row_table(made.schema, made.key, [3], made.rng, 3))
    assert (refused.value.exit_code, refused.value.reason) == (drill.code, drill.reason)
    new.close()
    *_, merged = drill.rest()
    assert merged.out.startswith("merged")
    assert wire.progress(Files(made.uri)) == {made.regions[0]: 1}


def test_33_wal_corrupt(drill: Drill, tmp_path: Path) -> None:
    made = RegionLayout(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    (region,) = made.regions
    writer = RegionWriter(open_table(made.uri), uuid.UUID(region))
    for number in (1, 2, 300):
        writer.put(row_table(made.schema, made.key, [number], made.rng, 1))
    path = Path(made.uri, entry_path(uuid.UUID(region), 2))
    shutil.copytree(made.uri, tmp_path / "backup")
    path.write_bytes(path.read_bytes()[:100])
    drill.given(URI=made.uri, REGION=region, FILE=path.name, BACKUP=str(tmp_path / "backup"))
    with pytest.raises(WalCorrupt, match=path.name) as refused:
        RegionWriter(open_table(made.uri), uuid.UUID(region))
    assert (refused.value.exit_code, refused.value.reason) == (drill.code, drill.reason)
    read, *_, counted, _ = drill.rest()
    assert "WalCorruptError" in read.err
    assert int(counted.out) == 11


def test_65_foreign_root(drill: Drill, tmp_path: Path) -> None:
    made = RegionLayout(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    made.put([1, 300])
    made.flush()
    (region,) = made.regions
    uri, backup = str(tmp_path / "restored.lance"), shutil.copytree(made.uri, tmp_path / "backup")
    shutil.move(made.uri, uri)
    for entry in Path(uri, "_mem_wal", region, "wal").iterdir():
        entry.unlink()
    drill.given(URI=uri, REGION=region, BACKUP=str(backup))
    drill.refused('memwal-ops adopt "$URI" --moved --apply')
    _, inspected, *_ = drill.rest()
    assert "generation 1: foreign_root" in inspected.out
    assert_same(read_base(uri), made.expected())


def test_66_drained_elsewhere(drill: Drill, tmp_path: Path) -> None:
    made = drained.flushed(tmp_path)
    drained.theirs(made)
    drill.given(URI=made)
    inspected, planned, *_ = drill.rest()
    assert "generation 1: drained_elsewhere" in inspected.out
    assert "would be recorded as merged up to generation 4" in " ".join(planned.out.split())
    assert open_table(made).index.merged_generations == {uuid.UUID(drained.small.REGION): 4}
    assert drained.small.values(made) == drained.EXPECTED


def test_40_invariant_violated(drill: Drill, table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come back in another order than that of their addresses, as a broken reader might give them."""
    real = Generation.read_keys

    def read_keys(self: Generation) -> pa.Table:
        rows = real(self)
        return rows.take(list(reversed(range(rows.num_rows))))

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "read_keys", read_keys)
        drill.refused('memwal-ops merge "$URI"')
        drill.follow(3)
    assert read_base(table.uri) == table.expected({})
    drill.rest()
    all_is_merged(table)


def test_41_answers_worse(drill: Drill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pylance ruins an index with product quantization and the metric dot; here nobody foresees that."""
    uri = str(tmp_path / "t.lance")
    about_to_be_ruined(uri, "by_vector")
    drill.given(URI=uri, INDEX="by_vector")
    with monkeypatch.context() as patch:
        patch.setattr("memwal_ops.formats.lance.jobs.catchup.building.refusal", lambda *_, **__: None)
        refused, verified = drill.follow(2)
        assert [one["decision"] for one in refused.document["indexes"]] == ["answers_worse"]
        assert verified.code == 0
    [rebuilt] = drill.rest()
    assert "updated (rebuild)" in rebuilt.out


def test_45_spark_unavailable(drill: Drill, table: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    drill.refused('memwal-ops merge "$URI" --engine spark')
    drill.rest()
    all_is_merged(table)


def test_63_held(drill: Drill, tmp_path: Path) -> None:
    uri = small(str(tmp_path / "t.lance"))
    lance.dataset(uri).tags.create("audit", 1)
    drill.given(URI=uri, WHERE="id = 1")
    at_once = "--older-than 0s --allow-unsafe"
    assert drill.run(f'memwal-ops erase "$URI" --where "$WHERE" --apply {at_once}').code == drill.code
    told, _ = drill.follow(2)
    assert "tag audit at version 1" in told.out
    lance.dataset(uri).tags.delete("audit")
    (outcome,) = drill.rest()
    assert outcome.out.startswith("waiting")
    assert drill.run(f'memwal-ops erase "$URI" --where "$WHERE" --apply {at_once}').out.startswith("erased")


def test_64_certificate(drill: Drill, tmp_path: Path) -> None:
    uri, certificate = small(str(tmp_path / "t.lance")), str(tmp_path / "proof.json")
    lance.dataset(uri).delete("id = 1")
    drill.given(URI=uri, WHERE="id = 1", CERTIFICATE=certificate)
    data = next(Path(uri, "data").iterdir())
    kept = shutil.copy2(data, tmp_path / "kept")
    drill.run(
        'memwal-ops erase "$URI" --where "$WHERE" --apply --older-than 0s --allow-unsafe --certificate "$CERTIFICATE"'
    )
    shutil.copy2(kept, data)  # a backup was restored, with its times
    (told,) = drill.follow(1)
    assert told.document["decision"] == "changed"
    assert data.name in told.document["wrong"][0]
    data.unlink()
    drill.rest()
