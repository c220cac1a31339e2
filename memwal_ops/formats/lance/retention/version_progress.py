"""Read the merge progress of a version, that is, the generations that its readers do not need.

Large manifests are read by ranges: a table with 10,000 fragments has manifests of
megabytes, and garbage collection reads every version that can still be opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.files.versions import decode_named
from memwal_ops.formats.lance.indexes.base_indexes import covered_by
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry, is_legacy
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import index_section_by_ends, index_section_length, last_fields

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.storage.api import ObjectMeta, Store

_WHOLE = 64 << 10
_HEAD = 24 << 10
# The trailer, and in front of it the small fields of the manifest, unless the table has much metadata.
_TAIL = 8 << 10
# A search by one of these finds rows that the index does not cover only in the generations; with a scalar index,
# such rows are found by scanning the base.
_SEARCHED = ("VectorIndexDetails", "InvertedIndexDetails")


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """The properties of a version that garbage collection depends on.

    Attributes:
        merged_generations: per region the last generation that the base table contains and that its vector and
            text indexes cover; a search by an index that is behind still reads the generations above.
        index_uuid: id of the MemWAL index entry, by which an external snapshot is named; None: no MemWAL index,
            so that readers do not read generations.
        points_into_mem_wal: whether files of its base table may be below ``_mem_wal/``.
        base_generations: per region the last generation that the base table contains, whatever indexes cover; None:
            the same as ``merged_generations``.
    """

    merged_generations: Mapping[UUID, int]
    index_uuid: UUID | None
    points_into_mem_wal: bool = False
    base_generations: Mapping[UUID, int] | None = None


def read_version_progress(store: Store, manifest: ObjectMeta) -> VersionProgress:
    """Read the progress: one request for a small manifest, 2 or 3 for a large one, 4 if an index is behind.

    Args:
        manifest: the version's file, from a listing.

    Raises:
        InvalidFormatError: the file does not decode.
        TableCorruptError: its MemWAL index does not decode.
        ObjectNotFoundError: the version was expired since.
    """
    if manifest.size > _WHOLE:
        progress = _by_ends(store, manifest)
        if progress is not None:
            return progress
    data = store.get(manifest.path)
    if not data:
        raise InvalidFormatError(f"{manifest.path} is empty.")
    version = decode_named(manifest.path, data)
    progress = _progress(version.indexes, version.manifest, version.manifest.fragments)
    assert progress is not None  # noqa: S101 - the fragments are given
    return progress


def _by_ends(store: Store, manifest: ObjectMeta) -> VersionProgress | None:
    """Read the progress from the two ends of the file; None if the whole file is needed."""
    head = store.get_range(manifest.path, 0, _HEAD)
    needed = index_section_length(head)
    if len(head) < needed <= manifest.size:
        head += store.get_range(manifest.path, len(head), needed - len(head))
    end = max(len(head), manifest.size - _TAIL)
    tail = head[manifest.size - _TAIL :] + store.get_range(manifest.path, end, manifest.size - end)
    decided, section = index_section_by_ends(head, tail)
    last = last_fields(tail)
    return None if not decided or last is None else _progress(section, last, None)


def _progress(
    section: table_pb2.IndexSection | None,
    manifest: table_pb2.Manifest,
    fragments: Collection[table_pb2.DataFragment] | None,
) -> VersionProgress | None:
    """The progress of a version by its index section and base paths; None: the fragments are needed, too."""
    points = any(MEM_WAL_FOLDER in base.path.split("/") for base in manifest.base_paths)
    entry = find_memwal_entry(section)
    # Readers of the legacy layout open no generation below _mem_wal/.
    if section is None or entry is None or is_legacy(entry):
        return VersionProgress({}, None, points)
    index = decode_memwal_index(entry)
    base, merged = index.merged_generations, _lowered(index, section, fragments)
    return None if merged is None else VersionProgress(merged, index.uuid, points, None if base == merged else base)


def _lowered(
    index: MemWalIndex, section: table_pb2.IndexSection, fragments: Collection[table_pb2.DataFragment] | None
) -> Mapping[UUID, int] | None:
    """Merge progress, lowered to what vector and text indexes cover: by catch-up entries, or by fragments (S0-188).

    None: the fragments are needed, and are not given.
    """
    merged = dict(index.merged_generations)
    segments: dict[str, list[table_pb2.IndexMetadata]] = {}
    for entry in section.indices:
        if entry.index_details.type_url.endswith(_SEARCHED):
            segments.setdefault(entry.name, []).append(entry)
    reached = dict(merged)
    for name, entries in segments.items():
        catchup = index.index_catchup.get(name, {})
        if all(catchup.get(region_id, 0) >= generation for region_id, generation in merged.items()):
            continue
        if fragments is None:
            return None
        covered = covered_by(entries)
        if all(fragment.id in covered for fragment in fragments):
            continue
        reached = {region_id: min(generation, catchup.get(region_id, 0)) for region_id, generation in reached.items()}
    return reached
