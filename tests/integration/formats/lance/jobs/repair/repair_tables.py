"""Tables whose damage repair fixes, and what it did to them."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal_ops import open_table, run_job
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.indexes.snapshots import is_external, snapshot_path
from memwal_ops.formats.lance.table import Table
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.memwal_index import with_catchup, with_snapshot
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from tests.integration.formats.lance.jobs.verify_tables import log_entries, manifest_folder, waiting
from tests.support.run_cli import contents
from tests.support.tables import damage, wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable


def opened(uri: str) -> Table:
    table = open_table(uri)
    assert isinstance(table, Table)
    return table


# -- damages that have a safe fix


def hint_unreadable(uri: str, region: str) -> None:
    (manifest_folder(uri, region) / "version_hint.json").write_bytes(b"")


def merged_generations_gone(uri: str, region: str) -> None:
    for generation in wire.region_manifest(Files(uri), region).generations:
        if generation <= wire.progress(Files(uri))[region]:
            damage.remove_generation(uri, region, generation)
    # They were merged so long ago that no reader keeps an earlier version open (gc's drain_after).
    at = time.time() - 31 * 86400
    for version in Path(uri, "_versions").glob("*.manifest"):
        os.utime(version, (at, at))


def generation_and_log_gone(uri: str, region: str) -> None:
    """Of the newest generation, with the last entry that it was flushed from."""
    damage.remove_generation(uri, region, waiting(uri, region))
    last = wire.region_manifest(Files(uri), region).replay_after
    for path in log_entries(uri, region):
        if path.name.startswith(wire.bit_reversed(last)):
            path.unlink()


def change_details(uri: str, change: Callable[[Any], Any]) -> None:
    table = opened(uri)
    commit_indexes(table, IndexChange(change(table.index.details)), CommitNote("damage"))


def snapshot_unreadable(uri: str, _region: str) -> None:
    index = opened(uri).index
    change_details(
        uri,
        lambda details: with_snapshot(
            details, timestamp_millis=index.snapshot_ts_millis or 0, num_regions=2, inline=b"no Lance file"
        ),
    )


def snapshot_file_cut(uri: str, _region: str) -> None:
    run_job(uri, "snapshot", inline_threshold=0)
    table = opened(uri)
    assert is_external(table)
    Path(uri, snapshot_path(table.index.uuid)).write_bytes(b"cut")


def catchup_too_high(uri: str, _region: str) -> None:
    """The index covers nothing of the merge, and its entry is that of all that is merged."""
    assert run_job(uri, "merge").decision == "merged"
    merged = opened(uri).index.merged_generations
    change_details(uri, lambda details: with_catchup(details, {"id_idx": merged}))


def emptied_by_an_index_commit(uri: str, _region: str) -> None:
    """What a faulty writer publishes: a commit of an index that does not carry the fragments on (lance#8438)."""
    table = opened(uri)
    manifest = table_pb2.Manifest()
    manifest.CopyFrom(table.manifest.manifest)
    del manifest.fragments[:]
    manifest.version += 1
    transaction = table_pb2.Transaction(read_version=table.version, uuid=str(uuid.uuid4()))
    transaction.create_index.SetInParent()
    manifest.transaction_file = f"{table.version}-{transaction.uuid}.txn"
    data = encode_version_manifest(replace(table.manifest, manifest=manifest, transaction=transaction))
    Path(uri, "_transactions", manifest.transaction_file).write_bytes(transaction.SerializeToString())
    Path(uri, version_path(table.version + 1, table.naming)).write_bytes(data)


def counts(uri: str) -> dict[str, int]:
    """What verify finds."""
    found: dict[str, int] = run_job(uri, "verify").to_json()["counts"]
    return found


def quarantine(uri: str) -> dict[str, bytes]:
    return {name: data for name, (_, data) in contents(uri).items() if name.startswith(QUARANTINE_FOLDER)}


def without_quarantine(uri: str) -> dict[str, bytes]:
    """All files but those of the suite itself."""
    return {name: data for name, (_, data) in contents(uri).items() if not name.startswith("_mem_wal_ops/")}


def repaired(uri: str, **options: Any) -> dict[str, Any]:
    report = run_job(uri, "repair", apply=True, **options)
    document = report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert report.describe()
    return document
