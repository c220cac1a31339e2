"""The real inputs that fuzzing starts from; they are stored, so that a seed means the same run everywhere.

``python -m tests.campaigns.fuzz.corpus`` writes them again, with the pylance that is installed.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest

FOLDER = Path(__file__).parent / "corpus"


@cache
def real(kind: str) -> tuple[bytes, ...]:
    """The stored inputs of one kind, in a fixed order."""
    found = tuple(path.read_bytes() for path in sorted((FOLDER / kind).iterdir()))
    assert found, kind
    return found


def main() -> None:
    from tests.support.tables.region_layout import RegionLayout
    from tests.support.tables.workload import Workload

    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Workload, RegionLayout):
            made = kind(1, regions=2, base_rows=12).create(f"{folder}/{kind.__name__}.lance")
            made.step(6)
            made.flush(made.regions[0])
            uri = made.uri
            snapshot.apply(open_table(uri), snapshot.SnapshotOptions())
            merge.apply(open_table(uri), merge.MergeOptions())
            made.step(4)
            _collect(Path(uri), kind.__name__.lower())


def _collect(table: Path, layout: str) -> None:
    for path in sorted((table / "_versions").glob("*.manifest")):
        data = path.read_bytes()
        _add("version_manifest", layout, data)
        indexes = decode_version_manifest(data).indexes
        entry = find_memwal_entry(indexes)
        if entry is not None and indexes is not None:
            _add("memwal_details", layout, entry.index_details.value)
            inline = open_table(table).index.inline_snapshots
            for one in indexes.indices:
                _add("index_entry", layout, one.SerializeToString(deterministic=True))
                if one.fragment_bitmap:
                    _add("fragment_bitmap", layout, one.fragment_bitmap)
            if inline is not None:
                _add("snapshot_file", layout, inline)
    for kind, pattern in {
        "region_manifest": "_mem_wal/*/manifest/*.binpb",
        "version_hint": "_mem_wal/*/manifest/version_hint.json",
        "wal_arrow": "_mem_wal/*/wal/*.arrow",
        "wal_lance": "_mem_wal/*/wal/*.lance",
    }.items():
        for path in sorted(table.glob(pattern)):
            _add(kind, layout, path.read_bytes())


def _add(kind: str, layout: str, data: bytes) -> None:
    folder = FOLDER / kind
    folder.mkdir(parents=True, exist_ok=True)
    there = [path for path in folder.iterdir() if path.name.startswith(layout)]
    if len(there) < 4 and all(path.read_bytes() != data for path in there):
        (folder / f"{layout}-{len(there)}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
