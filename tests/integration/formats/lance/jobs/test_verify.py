"""verify finds each kind of damage, names place and remedy, and calls a table healthy that is."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from tests.support.run_cli import contents, run_here
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.tables.lsm_table import LsmTable

KEYS = {"severity", "check", "place", "evidence", "consequence", "remedy", "runbook"}
ROOT = Path(__file__).parents[5]


def verified(uri: str, **options: Any) -> dict[str, Any]:
    """The document of a verification, which changes nothing and says the same in its exit code and its decision."""
    before = contents(uri)
    report = run_job(uri, "verify", **options)
    assert contents(uri) == before
    document = report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert report.describe()
    worst = {one["severity"] for one in document["findings"]}
    assert document["decision"] == ("findings" if worst - {"info"} else "healthy")
    assert report.exit_code == (9 if "error" in worst else 0)
    for one in document["findings"]:
        assert one.keys() == KEYS
        assert all(one[key] for key in KEYS - {"runbook"}), one
        assert one["runbook"] is None or (ROOT / one["runbook"]).exists()
    return document


def checks(uri: str, **options: Any) -> dict[str, str]:
    """Per check of a finding its severity."""
    return {one["check"]: one["severity"] for one in verified(uri, **options)["findings"]}


def build(kind: type[LsmTable], path: Path) -> LsmTable:
    """Two regions; some generations are merged, some wait, and so do rows of the log."""
    table = kind(3, regions=2, base_rows=40).create(str(path))
    for _ in range(2):
        table.step(12)
        for at in range(2):
            table.put([at])
        table.flush()
    run_job(table.uri, "merge")
    for _ in range(2):
        for at in range(2):
            table.put([at, at + 10])
        table.flush()
    for at in range(2):
        table.put([at])  # stays in the log
    return table


@pytest.fixture(scope="module", params=[Workload, RegionLayout])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    table = build(request.param, tmp_path_factory.mktemp("whole") / "t.lance")
    yield table
    table.close()


@pytest.fixture
def copy(whole: LsmTable, tmp_path: Path) -> tuple[str, str]:
    """A copy, and a region of it that has unmerged generations."""
    return damage.copy_table(whole.uri, str(tmp_path / "t.lance")), whole.regions[0]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("deep", [False, True])
def test_a_table_is_healthy_through_its_life(tmp_path: Path, kind: type[LsmTable], deep: bool) -> None:
    table = build(kind, tmp_path / "t.lance")
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    for job in ("merge", "catchup", "snapshot", "compact"):
        run_job(table.uri, job)
        assert verified(table.uri, deep=deep)["decision"] == "healthy", job
    run_job(
        table.uri, "gc", apply=True, reader_grace="0s", orphan_min_age="0s", manifest_retention=1, allow_unsafe=True
    )
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    table.put([1])
    table.flush()
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    table.close()


def waiting(uri: str, region: str) -> int:
    """The newest generation of a region, which is not merged."""
    return max(wire.region_manifest(Files(uri), region).generations)


def manifest_folder(uri: str, region: str) -> Path:
    return Path(uri, "_mem_wal", region, "manifest")


def rewrite(uri: str, region: str, change: Callable[[memwal_pb2.RegionManifest], None], version: int = 0) -> None:
    """Change one manifest of a region in place, the newest by default."""
    newest = wire.region_manifest(Files(uri), region).version
    path = damage.region_manifest_path(uri, region, version or newest)
    message = memwal_pb2.RegionManifest()
    message.ParseFromString(path.read_bytes())
    change(message)
    path.write_bytes(message.SerializeToString())


def lower_epoch(message: memwal_pb2.RegionManifest) -> None:
    message.writer_epoch = 0


def lower_replay(message: memwal_pb2.RegionManifest) -> None:
    message.replay_after_wal_id = 0


def turn_order(message: memwal_pb2.RegionManifest) -> None:
    listed = [*message.flushed_generations]
    del message.flushed_generations[:]
    message.flushed_generations.extend(reversed(listed))


def log_entries(uri: str, region: str) -> list[Path]:
    folder = Path(uri, "_mem_wal", region, "wal")
    return sorted(folder.iterdir(), key=lambda one: int(one.name[:64][::-1], 2))


def add_entries(uri: str, region: str, *numbers: int) -> None:
    """Copies of the newest entry under numbers above it."""
    entries = log_entries(uri, region)
    last = int(entries[-1].name[:64][::-1], 2)
    for number in numbers:
        name = wire.bit_reversed(last + number)
        shutil.copy2(entries[-1], entries[-1].with_name(f"{name}{entries[-1].suffix}"))


def data_file(uri: str) -> Path:
    """A data file of the newest version."""
    return Path(uri, "data", lance.dataset(uri).get_fragments()[0].metadata.files[0].path)


def unlink_data(uri: str, _region: str) -> None:
    data_file(uri).unlink()


def cut_data(uri: str, _region: str) -> None:
    path = data_file(uri)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_transaction(uri: str, _region: str) -> None:
    for path in Path(uri, "_transactions").iterdir():
        path.unlink()


def tag_of_a_gone_version(uri: str, _region: str) -> None:
    dataset = lance.dataset(uri)
    dataset.tags.create("old", 2)
    names = wire.manifest_names(Files(uri))
    Path(uri, names[2]).unlink()


def cut_old_manifest(uri: str, _region: str) -> None:
    names = wire.manifest_names(Files(uri))
    Path(uri, names[2]).write_bytes(b"cut short")


def swap_version_manifests(uri: str, _region: str) -> None:
    names = wire.manifest_names(Files(uri))
    shutil.copyfile(Path(uri, names[2]), Path(uri, names[3]))


def expired_lease(uri: str, _region: str) -> None:
    from datetime import timedelta

    acquire(open_table(uri).store, "merge", Holder("1", "op@host pid 7"), timedelta(seconds=1))
    time.sleep(1.2)


def unreadable_lease(uri: str, region: str) -> None:
    expired_lease(uri, region)
    for path in Path(uri, "_mem_wal_ops/leases").rglob("*.json"):
        path.write_bytes(b"{")


def hold_of_a_gone_version(uri: str, _region: str) -> None:
    from datetime import timedelta

    from memwal_ops.core.holds import take_hold

    take_hold(open_table(uri), 2, timedelta(hours=1))
    Path(uri, wire.manifest_names(Files(uri))[2]).unlink()


def hint_behind(uri: str, region: str) -> None:
    (manifest_folder(uri, region) / "version_hint.json").write_text('{"version":1}')


def hint_ahead(uri: str, region: str) -> None:
    (manifest_folder(uri, region) / "version_hint.json").write_text('{"version":99}')


def hint_gone(uri: str, region: str) -> None:
    (manifest_folder(uri, region) / "version_hint.json").unlink()


def stray(uri: str, region: str) -> None:
    Path(uri, "_mem_wal", region, "notes.txt").write_text("mine")


def stray_region(uri: str, _region: str) -> None:
    Path(uri, "_mem_wal", "notes.txt").write_text("mine")


def unlisted(uri: str, region: str) -> None:
    path = damage.generation_path(uri, region, waiting(uri, region))
    shutil.copytree(path, path.with_name(f"deadbeef_gen_{9}"))


def newer_writer_in_log(uri: str, region: str) -> None:
    rewrite(uri, region, lower_epoch)


def writer_that_was_restored(uri: str, region: str) -> None:
    newest = wire.region_manifest(Files(uri), region).version
    rewrite(uri, region, lambda one: setattr(one, "current_generation", 99), newest - 1)


DAMAGES: list[tuple[str, Callable[[str, str], Any], str, str]] = [
    ("a generation's folder is gone", lambda u, r: damage.remove_generation(u, r, waiting(u, r)),
     "generation_missing", "error"),
    ("a merged generation's folder is gone", lambda u, r: damage.remove_generation(u, r, 1),
     "merged_generation_missing", "warning"),
    ("a generation's manifest is cut", lambda u, r: damage.truncate_generation_manifest(u, r, waiting(u, r)),
     "generation", "error"),
    ("the newest region manifest is cut", damage.truncate_region_manifest, "region_manifest_corrupt", "error"),
    ("the newest region manifest is inverted", damage.flip_region_manifest, "region_manifest_corrupt", "error"),
    ("a region manifest is missing", lambda u, r: damage.remove_region_manifest_version(u, r, 3),
     "region_manifest_gap", "error"),
    ("an old region manifest is cut",
     lambda u, r: damage.region_manifest_path(u, r, 2).write_bytes(b"\xff"), "old_manifest", "warning"),
    ("the hint is behind", hint_behind, "version_hint", "info"),
    ("the hint is gone", hint_gone, "version_hint", "info"),
    ("the hint is ahead", hint_ahead, "region_manifest_gap", "error"),
    ("the epoch falls", lambda u, r: rewrite(u, r, lower_epoch), "writer_epoch", "error"),
    ("the end of the replay falls", lambda u, r: rewrite(u, r, lower_replay), "replay_after_wal_id", "error"),
    ("the list of generations is out of order", lambda u, r: rewrite(u, r, turn_order), "generation_order", "info"),
    ("the generations were restored", writer_that_was_restored, "current_generation", "error"),
    ("a file that nobody knows", stray, "unrecognized", "info"),
    ("a file that is no region", stray_region, "unrecognized", "info"),
    ("a generation that no manifest lists", unlisted, "unlisted_generation", "info"),
    ("a gap in the log", lambda u, r: add_entries(u, r, 2), "wal_gap", "error"),
    ("entries of a later writer", newer_writer_in_log, "wal_epoch", "error"),
    ("an entry of the log is cut", lambda u, r: log_entries(u, r)[-1].write_bytes(b"ARROW1"), "wal_entry", "error"),
    ("a data file is gone", unlink_data, "base_file", "error"),
    ("a data file is cut", cut_data, "base_file", "error"),
    ("the newest transaction file is gone", drop_transaction, "transaction_file", "warning"),
    ("a tag of a version that is gone", tag_of_a_gone_version, "tag", "warning"),
    ("an old version manifest is cut", cut_old_manifest, "version_manifest", "error"),
    ("a version manifest is another's", swap_version_manifests, "version_manifest", "error"),
    ("a lease expired", expired_lease, "lease_expired", "info"),
    ("a hold of a version that is gone", hold_of_a_gone_version, "hold", "warning"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "check", "severity"), [pytest.param(*one[1:], id=one[0]) for one in DAMAGES])
def test_each_damage_is_found(
    copy: tuple[str, str], harm: Callable[[str, str], Any], check: str, severity: str
) -> None:
    uri, region = copy
    harm(uri, region)
    assert checks(uri).get(check) == severity


def test_keys_that_stand_twice_are_found(tmp_path: Path) -> None:
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    row = lance.dataset(table.uri).take([0])
    lance.write_dataset(row, table.uri, mode="append")
    assert checks(table.uri) == {}
    assert checks(table.uri, deep=True) == {"duplicate_keys": "error"}


def test_a_key_in_two_regions_is_found(tmp_path: Path) -> None:
    table = Workload(5, regions=2, base_rows=10).create(str(tmp_path / "t.lance"))
    rows = lance.dataset(table.uri).take([0])
    for region in table.regions:
        with lance.dataset(table.uri).mem_wal_writer(region) as writer:
            writer.put(rows)
    table.close()
    assert checks(table.uri) == {}
    assert checks(table.uri, deep=True) == {"shared_keys": "error"}


def test_a_table_that_lost_all_rows_is_told(tmp_path: Path) -> None:
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    lance.dataset(table.uri).delete("true")
    assert checks(table.uri)["version_emptied"] == "warning"


def test_the_command(copy: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    uri, region = copy
    outcome = run_here(capfd, "verify", uri, "--json")
    assert (outcome.code, outcome.document["decision"]) == (0, "healthy")
    damage.remove_generation(uri, region, waiting(uri, region))
    outcome = run_here(capfd, "verify", uri)
    assert outcome.code == 9
    assert "ERROR generation_missing" in outcome.out
    assert "runbooks/errors/13-generation_missing.md" in outcome.out
    limited = run_here(capfd, "verify", uri, "--json", "--max-findings", "1")
    assert len(limited.document["findings"]) <= sum(limited.document["counts"].values())
