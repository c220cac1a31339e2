"""What one version asks of its regions: the generations that its readers do not need, and where its files are.

Read by ranges where the manifest is large: a table with 10,000 fragments has manifests of
megabytes, and a collector asks every version that anybody may still open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.base_indexes import covered_by
from memwal_ops.core.layout import MEM_WAL_FOLDER
from memwal_ops.errors import InvalidFormatError
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.format.version_manifest import decode_version_manifest, index_section_by_ends, index_section_length

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from uuid import UUID

    from memwal_ops.format._pb import table_pb2
    from memwal_ops.format.memwal_index import MemWalIndex
    from memwal_ops.storage.api import ObjectMeta, Store

_WHOLE = 64 << 10
_HEAD = 24 << 10
# The trailer, and in front of it the small fields of the manifest, base paths among them.
_TAIL = 8 << 10
# Searches by these ask the generations that the index does not cover, and nothing else, for their rows; by a scalar
# index, rows that it does not cover are found by scanning.
_SEARCHED = ("VectorIndexDetails", "InvertedIndexDetails")


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """What a collector has to know of a version.

    Attributes:
        merged_generations: per region the last generation that its base table holds and that its vector and
            text indexes cover; a search by one that is behind still asks the generations above.
        index_uuid: of the MemWAL index entry, under which an external snapshot stands; None: no MemWAL index,
            so that nobody looks for generations.
        points_into_mem_wal: whether files of its base table may stand below ``_mem_wal/``.
    """

    merged_generations: Mapping[UUID, int]
    index_uuid: UUID | None
    points_into_mem_wal: bool = False


def read_version_progress(store: Store, manifest: ObjectMeta) -> VersionProgress:
    """Read it: one request for a small manifest, two or three for a large one, four where an index is behind.

    Args:
        manifest: the version's file as a listing shows it.

    Raises:
        InvalidFormatError: the file does not decode.
        TableCorruptError: its MemWAL index does not.
        LegacyLayoutError: the MemWAL index is that of older releases.
        ObjectNotFoundError: it was expired since.
    """
    if manifest.size > _WHOLE:
        found = _by_ends(store, manifest)
        if found is not None:
            return found
    data = store.get(manifest.path)
    if not data:
        raise InvalidFormatError(f"{manifest.path} is empty.")
    version = decode_version_manifest(data)
    points = any(MEM_WAL_FOLDER in base.path.split("/") for base in version.manifest.base_paths)
    index = None if version.indexes is None else _memwal(version.indexes)
    if version.indexes is None or index is None:
        return VersionProgress({}, None, points)
    return VersionProgress(_lowered(index, version.indexes, version.manifest.fragments) or {}, index.uuid, points)


def _by_ends(store: Store, manifest: ObjectMeta) -> VersionProgress | None:
    """The same from the two ends of the file; None where they do not tell."""
    head = store.get_range(manifest.path, 0, _HEAD)
    needed = index_section_length(head)
    if len(head) < needed <= manifest.size:
        head += store.get_range(manifest.path, len(head), needed - len(head))
    end = max(len(head), manifest.size - _TAIL)
    tail = head[manifest.size - _TAIL :] + store.get_range(manifest.path, end, manifest.size - end)
    told, section = index_section_by_ends(head, tail)
    # A base path stands as it is in the message's last fields; something else of that name does no harm.
    if not told or f"{MEM_WAL_FOLDER}/".encode() in tail:
        return None
    index = None if section is None else _memwal(section)
    if section is None or index is None:
        return VersionProgress({}, None)
    merged = _lowered(index, section, None)
    return None if merged is None else VersionProgress(merged, index.uuid)


def _memwal(section: table_pb2.IndexSection) -> MemWalIndex | None:
    entry = find_memwal_entry(section)
    return None if entry is None else decode_memwal_index(entry)


def _lowered(
    index: MemWalIndex, section: table_pb2.IndexSection, fragments: Collection[table_pb2.DataFragment] | None
) -> Mapping[UUID, int] | None:
    """Merge progress, lowered to what vector and text indexes cover: by their claims, or by fragments (S0-188).

    None: the fragments would have to be asked, and are not given.
    """
    merged = dict(index.merged_generations)
    segments: dict[str, list[table_pb2.IndexMetadata]] = {}
    for entry in section.indices:
        if entry.index_details.type_url.endswith(_SEARCHED):
            segments.setdefault(entry.name, []).append(entry)
    reached = dict(merged)
    for name, entries in segments.items():
        claim = index.index_catchup.get(name, {})
        if all(claim.get(region_id, 0) >= generation for region_id, generation in merged.items()):
            continue
        if fragments is None:
            return None
        covered = covered_by(entries)
        if all(fragment.id in covered for fragment in fragments):
            continue
        reached = {region_id: min(generation, claim.get(region_id, 0)) for region_id, generation in reached.items()}
    return reached
