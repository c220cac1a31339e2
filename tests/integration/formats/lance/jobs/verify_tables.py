"""The table that tests of verify damage, and the kinds of damage: each with the check that finds it."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from tests.support.tables import damage, wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable


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


def raise_log_position(message: memwal_pb2.RegionManifest) -> None:
    message.wal_id_last_seen |= 1 << 40


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


def unlink_index_file(uri: str, _region: str) -> None:
    next(Path(uri, "_indices").glob("*/page_data.lance")).unlink()


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


def timestamp_out_of_range(uri: str, _region: str) -> None:
    path = Path(uri, wire.manifest_names(Files(uri))[2])
    manifest = decode_version_manifest(path.read_bytes())
    manifest.manifest.timestamp.seconds = 1 << 54
    path.write_bytes(encode_version_manifest(manifest))


def swap_version_manifests(uri: str, _region: str) -> None:
    names = wire.manifest_names(Files(uri))
    shutil.copyfile(Path(uri, names[2]), Path(uri, names[3]))


def expired_lease(uri: str, _region: str) -> None:
    acquire(open_table(uri).store, "merge", Holder("1", "op@host pid 7"), timedelta(seconds=1))
    time.sleep(1.2)


def unreadable_lease(uri: str, region: str) -> None:
    expired_lease(uri, region)
    for path in Path(uri, "_mem_wal_ops/leases").rglob("*.json"):
        path.write_bytes(b"{")


def hold_of_a_gone_version(uri: str, _region: str) -> None:
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
    ("a log position beyond every entry", lambda u, r: rewrite(u, r, raise_log_position), "wal_gap", "error"),
    ("entries of a later writer", newer_writer_in_log, "wal_epoch", "error"),
    ("an entry of the log is cut", lambda u, r: log_entries(u, r)[-1].write_bytes(b"ARROW1"), "wal_entry", "error"),
    ("a data file is gone", unlink_data, "base_file", "error"),
    ("a file of an index is gone", unlink_index_file, "base_file", "error"),
    ("a data file is cut", cut_data, "base_file", "error"),
    ("the newest transaction file is gone", drop_transaction, "transaction_file", "warning"),
    ("a tag of a version that is gone", tag_of_a_gone_version, "tag", "warning"),
    ("an old version manifest is cut", cut_old_manifest, "version_manifest", "error"),
    ("a version manifest is another's", swap_version_manifests, "version_manifest", "error"),
    ("a timestamp is out of range", timestamp_out_of_range, "version_manifest", "error"),
    ("a lease expired", expired_lease, "lease_expired", "info"),
    ("a hold of a version that is gone", hold_of_a_gone_version, "hold", "warning"),
]  # fmt: skip
