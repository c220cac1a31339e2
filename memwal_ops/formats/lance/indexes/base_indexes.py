"""Read the base table's indexes, and the fragments that their segments cover.

The coverage of an index is read only from its bitmaps: ``index_catchup`` is not reliable, as
the two specifications disagree about an index that is absent from it, and pylance does not update it
when an update moves rows out of an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidFormatError, TableCorruptError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.wire.version_manifest import by_name, decode_fragment_bitmap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

_SCALAR = frozenset({"BTree", "Bitmap", "LabelList", "Inverted", "NGram", "ZoneMap", "BloomFilter"})
# Field numbers of VectorIndexDetails (protos/index.proto of Lance).
_HNSW = 3
_COMPRESSIONS = {4: "PQ", 5: "SQ", 6: "RQ", 8: "FLAT"}


@dataclass(frozen=True, slots=True)
class BaseIndex:
    """One index of a table version; names and types as pylance shows them.

    Attributes:
        name: its name.
        type: for example ``BTree``, ``Inverted``, ``IVF_PQ``.
        segments: its entries, the oldest first.
        covered: ids of all fragments that its segments cover, including those that no longer exist.
    """

    name: str
    type: str
    segments: tuple[table_pb2.IndexMetadata, ...]
    covered: frozenset[int]

    @property
    def is_vector(self) -> bool:
        """Whether it has a codebook; indexes of older releases are recognized only by their type."""
        urls = {entry.index_details.type_url for entry in self.segments}
        return self.type.startswith("IVF_") or any(url.endswith("VectorIndexDetails") for url in urls)

    @property
    def segment_ids(self) -> frozenset[UUID]:
        """Ids of the segments."""
        return frozenset(UUID(bytes=entry.uuid.uuid) for entry in self.segments)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far an index is behind a version. ``uncovered``: ids of fragments; ``uncovered_rows``: live rows in them."""

    fragments: int
    uncovered: frozenset[int]
    uncovered_rows: int

    @property
    def complete(self) -> bool:
        """Whether every fragment is covered."""
        return not self.uncovered


def base_indexes(table: Table) -> Mapping[str, BaseIndex]:
    """The table's indexes by name, in order of name; Lance's system indexes are left out.

    Raises:
        TableCorruptError: a fragment bitmap does not decode.
    """
    entries = by_name(table.manifest)
    if not entries:
        return {}
    types = {name: _type_of(same[0].index_details) for name, same in entries.items()}
    if None in types.values():
        with lance_errors("read the indexes of", table.location.uri):
            types = {index.name: index.index_type for index in table.handle.get().describe_indices()}
    return {
        name: BaseIndex(name, types.get(name) or "unknown", tuple(entries[name]), covered_by(entries[name]))
        for name in sorted(entries)
    }


def _type_of(details: Any) -> str | None:
    """The type of an index as its details show it; None for those that pylance derives from the index's files."""
    kind = details.type_url.rpartition(".")[2].removesuffix("IndexDetails")
    if kind != "Vector":
        return kind if kind in _SCALAR else None
    present = {one.field_number for one in UnknownFieldSet(empty_pb2.Empty.FromString(details.value))}  # type: ignore[attr-defined]  # iterable, missing in the stub
    compressed = [name for number, name in _COMPRESSIONS.items() if number in present]
    return f"IVF_{'HNSW_' if _HNSW in present else ''}{compressed[0]}" if len(compressed) == 1 else None


def covered_by(entries: Iterable[table_pb2.IndexMetadata]) -> frozenset[int]:
    """Ids of the fragments that any of the entries covers."""
    try:
        return frozenset[int]().union(*(decode_fragment_bitmap(entry.fragment_bitmap) for entry in entries))
    except InvalidFormatError as error:
        raise TableCorruptError(str(error)) from error


def is_of_key(table: Table, index: BaseIndex) -> bool:
    """Whether it is the B-tree of the primary key."""
    ids = {one.name: one.id for one in table.manifest.manifest.fields if one.parent_id < 0}
    keys = [ids[name] for name in table.primary_key]
    return index.type.lower() == "btree" and all([*segment.fields] == keys for segment in index.segments)


def is_nested(index: BaseIndex, version: VersionManifest) -> bool:
    """Whether a field of an index is in a struct."""
    outer = {one.id: one.parent_id for one in version.manifest.fields}
    return any(outer.get(one, -1) >= 0 for entry in index.segments for one in entry.fields)


def coverage(covered: frozenset[int], version: VersionManifest) -> Coverage:
    """Compare the fragments that an index covers with the fragments of a version."""
    missing = [fragment for fragment in version.manifest.fragments if fragment.id not in covered]
    return Coverage(
        len(version.manifest.fragments),
        frozenset(fragment.id for fragment in missing),
        sum(fragment.physical_rows - fragment.deletion_file.num_deleted_rows for fragment in missing),
    )
