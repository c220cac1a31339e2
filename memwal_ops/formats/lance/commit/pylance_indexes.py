"""Convert index entries of a manifest to pylance's ``Index`` and back."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from google.protobuf.unknown_fields import UnknownFieldSet
from lance.dataset import Index, IndexFile
from lance.lance import Bitmap

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.fragment_bitmap import decode_fragment_bitmap, encode_fragment_bitmap


def to_pylance(entry: table_pb2.IndexMetadata) -> Index:
    """An entry as an argument for pylance.

    Raises:
        UnsupportedFeatureError: it has fields that this release does not define, and would drop.
    """
    if len(UnknownFieldSet(entry)):
        raise UnsupportedFeatureError(f"The entry of index {entry.name} has fields that this release does not define.")
    return Index(
        uuid=str(UUID(bytes=entry.uuid.uuid)),
        name=entry.name,
        fields=[*entry.fields],
        dataset_version=entry.dataset_version,
        fragment_ids=Bitmap(decode_fragment_bitmap(entry.fragment_bitmap)),
        index_version=entry.index_version,
        created_at=datetime.fromtimestamp(entry.created_at / 1000, UTC) if entry.created_at else None,
        base_id=entry.base_id if entry.HasField("base_id") else None,
        files=[IndexFile(file.path, file.size_bytes) for file in entry.files] or None,
        index_details=(entry.index_details.type_url, entry.index_details.value),
    )


def from_pylance(index: Index) -> table_pb2.IndexMetadata:
    """The entry of a segment that pylance wrote without publishing it.

    Raises:
        UnsupportedFeatureError: it has columns beside those that are indexed, which this release does not define.
    """
    if index.covering_fields:
        raise UnsupportedFeatureError(f"Index {index.name} covers columns, which this release does not define.")
    entry = table_pb2.IndexMetadata(
        fields=index.fields,
        name=index.name,
        dataset_version=index.dataset_version,
        fragment_bitmap=encode_fragment_bitmap(frozenset(index.fragment_ids)),
        index_version=index.index_version,
    )
    entry.uuid.uuid = UUID(index.uuid).bytes
    if index.index_details is not None:
        entry.index_details.type_url, entry.index_details.value = index.index_details
    if index.created_at is not None:
        entry.created_at = int(index.created_at.timestamp() * 1000)
    for file in index.files or ():
        entry.files.add(path=file.path, size_bytes=file.size_bytes)
    return entry
