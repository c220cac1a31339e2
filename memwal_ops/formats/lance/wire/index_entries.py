"""Tell from the index entries of a version which of them are Lance's own, and which may lack rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

FRAGMENT_REUSE = "__lance_frag_reuse"
SYSTEM_INDEX = "__lance_"


def by_name(manifest: VersionManifest) -> dict[str, list[table_pb2.IndexMetadata]]:
    """The segments of each index, without Lance's own."""
    found: dict[str, list[table_pb2.IndexMetadata]] = {}
    for entry in manifest.index_entries:
        if not entry.name.startswith(SYSTEM_INDEX):
            found.setdefault(entry.name, []).append(entry)
    return found


def moved_later(manifest: VersionManifest) -> list[table_pb2.IndexMetadata]:
    """Segments of indexes that are older than a compaction that left it to their readers to find the moved rows.

    (``defer_index_remap``.) If pylance compacts these rows again without deferring it, they may be missing in the
    segment from then on, and nothing else shows that: docs/upstream.md. A segment that was built anew is younger.
    """
    entries = manifest.index_entries
    deferred = max((entry.dataset_version for entry in entries if entry.name == FRAGMENT_REUSE), default=0)
    return [one for one in entries if not one.name.startswith(SYSTEM_INDEX) and one.dataset_version < deferred]


def had_moves(manifest: VersionManifest) -> bool:
    """Whether a compaction left it to readers to find rows that it moved."""
    return any(entry.name == FRAGMENT_REUSE for entry in manifest.index_entries)
