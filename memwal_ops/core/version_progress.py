"""What one version says of MemWAL: its merge progress, and which index entry carries it.

Read by ranges where the manifest is large: a table with 10,000 fragments has manifests of
megabytes, and a collector asks every version that anybody may still open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.format.version_manifest import decode_version_manifest, index_section_by_ends, index_section_length

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.format._pb import table_pb2
    from memwal_ops.storage.api import ObjectMeta, Store

_WHOLE = 64 << 10
_HEAD = 32 << 10
_TRAILER = 16


@dataclass(frozen=True, slots=True)
class VersionProgress:
    """The MemWAL index of a version, as far as a collector needs it.

    Attributes:
        merged_generations: per region the last generation that the version's base table holds.
        index_uuid: of the index entry; an external snapshot stands under it.
    """

    merged_generations: Mapping[UUID, int]
    index_uuid: UUID


def read_version_progress(store: Store, manifest: ObjectMeta) -> VersionProgress | None:
    """Read it; None where the version has no MemWAL index. At most four requests, one for a small manifest.

    Args:
        manifest: the version's file as a listing shows it.

    Raises:
        InvalidFormatError: the file does not decode.
        TableCorruptError: its MemWAL index does not.
        LegacyLayoutError: the MemWAL index is that of older releases.
        ObjectNotFoundError: it was expired since.
    """
    section = _index_section(store, manifest)
    entry = None if section is None else find_memwal_entry(section)
    if entry is None:
        return None
    index = decode_memwal_index(entry)
    return VersionProgress(index.merged_generations, index.uuid)


def _index_section(store: Store, manifest: ObjectMeta) -> table_pb2.IndexSection | None:
    if manifest.size > _WHOLE:
        head = store.get_range(manifest.path, 0, _HEAD)
        needed = index_section_length(head)
        if len(head) < needed <= manifest.size:
            head += store.get_range(manifest.path, len(head), needed - len(head))
        tail = store.get_range(manifest.path, manifest.size - _TRAILER, _TRAILER)
        told, section = index_section_by_ends(head, tail)
        if told:
            return section
    data = store.get(manifest.path)
    if not data:
        raise InvalidFormatError(f"{manifest.path} is empty.")
    return decode_version_manifest(data).indexes
