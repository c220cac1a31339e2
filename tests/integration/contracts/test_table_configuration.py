"""Where a record of ours outlasts pylance's own commits: in the table's configuration, not in the MemWAL details."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus
from tests.integration.contracts import small
from tests.support.tables import wire
from tests.support.tables.files import Files

CONFIG, TABLE_METADATA = 16, 19
OURS = (9999, b"ours")
_KEY = "memwal-ops.regions"


def marked(folder: Path) -> str:
    """A table with one generation to merge, a configuration of ours, and a field of ours in the MemWAL details."""
    uri = small.make(folder)
    small.flush(uri, small.rows(0, 5, 1.0))
    lance.dataset(uri).update_config({_KEY: "ours"})
    name, manifest = wire.newest_manifest(Files(uri))
    details = wire.encode([*wire.decode(wire.mem_wal_details(manifest)), OURS])
    Files(uri).put(name, wire.build_manifest(wire.with_details(manifest, details)))
    return uri


def has_config(uri: str) -> bool:
    _, manifest = wire.newest_manifest(Files(uri))
    entries = [{field.number: field.value for field in entry} for entry in wire.sub(manifest.fields, CONFIG)]
    return {1: _KEY.encode(), 2: b"ours"} in entries


def has_details(uri: str) -> bool:
    details = wire.decode(wire.mem_wal_details(wire.newest_manifest(Files(uri))[1]))
    return wire.get(details, OURS[0], b"") == OURS[1]


def clone(uri: str) -> str:
    lance.dataset(uri).shallow_clone(f"{uri}.clone", lance.dataset(uri).version)
    return f"{uri}.clone"


def branch(uri: str) -> str:
    lance.dataset(uri).create_branch("side")
    return f"{uri}/tree/side"


def restore(uri: str) -> None:
    version = lance.dataset(uri).version
    lance.dataset(uri).update_config({_KEY: "later"})
    lance.dataset(uri, version=version).restore()


# Whether the field in the details outlasts it, too.
COMMITS: Mapping[str, tuple[Callable[[str], object], bool]] = {
    "append": (lambda uri: lance.write_dataset(small.rows(200, 201), uri, mode="append"), True),
    "delete": (lambda uri: lance.dataset(uri).delete("id = 3"), True),
    "update": (lambda uri: lance.dataset(uri).update({"val": "3"}, where="id = 5"), True),
    "add columns": (lambda uri: lance.dataset(uri).add_columns(pa.field("n", pa.int32())), True),
    "drop columns": (lambda uri: lance.dataset(uri).drop_columns(["txt"]), True),
    "restore, with the version": (restore, True),
    "branch": (branch, True),
    "clone": (clone, True),
    "marked merge": (lambda uri: small.upsert(lance.dataset(uri), small.rows(0, 5, 1.0), 1), False),
    "create an index": (lambda uri: lance.dataset(uri).create_scalar_index("val", "BTREE"), True),
}


@pytest.mark.parametrize("name", COMMITS)
def test_what_outlasts_a_commit(tmp_path: Path, name: str) -> None:
    uri = marked(tmp_path)
    commit, details_too = COMMITS[name]
    made = commit(uri)
    seen = made if isinstance(made, str) else uri
    assert has_config(seen)
    assert has_details(seen) is details_too


def test_an_overwritten_table_keeps_its_configuration_and_loses_its_index(tmp_path: Path) -> None:
    uri = marked(tmp_path)
    lance.write_dataset(small.rows(900, 901), uri, mode="overwrite")
    assert has_config(uri)
    assert wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1]) is None


def test_compaction_and_optimized_indexes_keep_the_configuration(tmp_path: Path) -> None:
    uri = marked(tmp_path)
    lance.write_dataset(small.rows(200, 201), uri, mode="append")
    lance.dataset(uri).optimize.optimize_indices()
    assert has_config(uri)
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert has_config(uri)


def test_a_sealed_shard_takes_no_writer_and_a_claim_fences_the_one_before(tmp_path: Path) -> None:
    """What giving a region's generations another id rests on (memwal_ops.formats.lance.log.region_seal)."""

    uri = small.make(tmp_path)
    live = small.writer(uri)
    live.put(small.rows(0, 3, 1.0))
    small.writer(uri).close()
    region = open_table(uri).region(uuid.UUID(small.REGION))
    manifest = region.latest()
    assert [one.physical_rows for one in manifest.flushed_generations] == [3]
    with pytest.raises(OSError, match="fenced"):
        live.put(small.rows(3, 6, 1.0))
    assert region.commit(replace(manifest.next(), status=RegionStatus.SEALED))
    with pytest.raises(Exception, match="sealed"):
        small.writer(uri)
