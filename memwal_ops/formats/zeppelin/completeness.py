"""Find parts of a namespace whose objects are missing or cut, by names and sizes: no object is read as a whole.

A manifest that is readable does not mean that what it lists is there. This costs one listing of the log, one of each
prefix of the segment, one request for the lease, one for the record of each prefix, and a range of a few bytes for each
of the first fragments whose size the manifest does not have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import (
    FragmentCorruptError,
    FragmentMissingError,
    MemwalOpsError,
    ObjectNotFoundError,
    SegmentCorruptError,
    TableCorruptError,
)
from memwal_ops.formats.zeppelin.lease import read_lease
from memwal_ops.formats.zeppelin.segments import LEAST_ROW, SegmentReader
from memwal_ops.formats.zeppelin.wire.fragment import WIKI
from memwal_ops.formats.zeppelin.wire.lease import LEASE
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.segments import Needed
    from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, Manifest, SegmentRef
    from memwal_ops.storage.api import ObjectMeta, Store

_CONCURRENT_READS = 8
# As many objects are asked for one by one; of more that a listing lacks, the listing is right.
_CHECKED = 64
_TAIL = 512
# How a fragment's text ends, by its last member. A text that was cut behind a brace in its vectors ends differently,
# unless it is the brace of a vector whose id is its last member.
_ENDS = re.compile(
    rb'(?:[}"\[]\s*\]|"checksum"\s*:\s*[0-9]+|"(?:id|namespace|created_at)"\s*:\s*(?:null|"[^"]*"))\s*\}\s*\Z'
)
REWRITE = "memwal-ops merge URI --retrain writes it again: no row is lost."


@dataclass(frozen=True)
class BlockedPart:
    """A part of a namespace that cannot be used: the log from a fragment on, a segment, or the lease.

    Attributes:
        kind: ``fragment``, ``segment`` or ``lease``.
        id: of the fragment or segment; of the lease its path.
        error: the reason.
        path: of the object.
        missing: whether it does not exist.
        has_rows: whether rows are lost with it: a merge cannot write it again.
    """

    kind: str
    id: str
    error: MemwalOpsError
    path: str = ""
    missing: bool = False
    has_rows: bool = True

    def to_json(self) -> dict[str, Any]:
        """The ``blocked`` entry of a report."""
        error = self.error
        return {self.kind: self.id, "reason": error.reason, "detail": str(error), "remedy": error.remedy}


class Listed:
    """Sizes of a namespace's objects; each folder is listed once."""

    def __init__(self, store: Store) -> None:
        """Keep the store; nothing is listed."""
        self._store = store
        self._folders: dict[str, Mapping[str, ObjectMeta]] = {}

    def folder(self, path: str) -> Mapping[str, ObjectMeta]:
        """The objects of the folder of a path."""
        name = path.rpartition("/")[0]
        if name not in self._folders:
            self._folders[name] = {meta.path: meta for meta in self._store.list(name)}
        return self._folders[name]

    def exists(self, path: str) -> bool:
        """Whether an object exists. A listing is not a snapshot: one that is not in it is asked for."""
        return path in self.folder(path) or self._store.head(path) is not None


def damaged_parts(table: Namespace, listed: Listed | None = None) -> tuple[BlockedPart, ...]:
    """The parts of the live manifest with an object that is missing or cut: fragments in their order, then segments.

    And the lease, if it cannot be read: no compaction can start.

    Raises:
        StorageError: the store failed.
    """
    found = damaged_parts_of(table, table.manifest, listed or Listed(table.store))
    if found and (newest := table.newest()).data != table.data:
        # A compaction replaced them meanwhile, and gc collected them.
        live = {*_ids(newest.manifest)}
        found = tuple(one for one in found if one.id in live)
    try:
        read_lease(table)
    except TableCorruptError as error:
        found = (*found, BlockedPart("lease", LEASE, error, LEASE, has_rows=False))
    return found


def unchecked(manifest: Manifest) -> tuple[str, ...]:
    """Fragments and segments of which no object is looked for: those of other namespaces, and trees of nodes."""
    trees = {one.id for one in manifest.segments if one.hierarchical}
    return tuple(one for one in _ids(manifest) if one in manifest.borrowed | trees)


def damaged_parts_of(table: Namespace, manifest: Manifest, listed: Listed) -> tuple[BlockedPart, ...]:
    """As :func:`damaged_parts`, of a manifest of the namespace."""
    skipped = {*unchecked(manifest)}
    refs = [one for one in manifest.fragments if one.id not in skipped]
    segments = [one for one in manifest.segments if one.id not in skipped]
    found = [*_missing(refs, listed), *_cut(table.store, manifest, refs, listed)]
    order = {one.id: place for place, one in enumerate(refs)}
    found.sort(key=lambda part: order[part.id])
    faults = (_segment_fault(table, one, listed) for one in segments)
    return (*found, *(one for one in faults if one is not None))


def _ids(manifest: Manifest) -> list[str]:
    return [*(one.id for one in manifest.fragments), *(one.id for one in manifest.segments)]


def _missing(refs: list[FragmentRef], listed: Listed) -> Iterator[BlockedPart]:
    absent = [one for one in refs if one.key not in listed.folder(one.key)]
    for number, one in enumerate(absent):
        if number >= _CHECKED or not listed.exists(one.key):
            error = FragmentMissingError(f"The fragment {one.key} is listed, but does not exist.")
            yield BlockedPart("fragment", one.id, error, one.key, missing=True)


def _cut(store: Store, manifest: Manifest, refs: list[FragmentRef], listed: Listed) -> Iterator[BlockedPart]:
    """Fragments whose size differs from the recorded one, or whose text has no end."""
    sizes = {one.key: meta.size for one in refs if (meta := listed.folder(one.key).get(one.key)) is not None}
    existing = [one for one in refs if one.key in sizes]
    unsized = [one for one in existing if one.bytes is None][:_CHECKED] if manifest.dialect == WIKI else []

    def whole(ref: FragmentRef) -> bool:
        start = max(0, sizes[ref.key] - _TAIL)
        try:
            return _ENDS.search(store.get_range(ref.key, start, sizes[ref.key] - start)) is not None
        except ObjectNotFoundError:
            return True  # listed, and collected since

    for one in existing:
        if one.bytes is not None and one.bytes != sizes[one.key]:
            yield _corrupt(one, f"has {sizes[one.key]} bytes; the manifest has {one.bytes}")
    for one, is_whole in concurrently(whole, unsized, threads=_CONCURRENT_READS):
        if not is_whole:
            yield _corrupt(one, f"is cut: its {sizes[one.key]} bytes do not end as a JSON document does")


def _corrupt(ref: FragmentRef, wrong: str) -> BlockedPart:
    return BlockedPart("fragment", ref.id, FragmentCorruptError(f"The fragment {ref.key} {wrong}."), ref.key)


def _segment_fault(table: Namespace, segment: SegmentRef, listed: Listed) -> BlockedPart | None:
    """The first object of a segment that is missing or cut, with the number of others."""
    dimensions = table.meta.dimensions
    needed = SegmentReader(table.store, segment).needed(dimensions)
    absent = [one for one in needed if one.path not in listed.folder(one.path)]
    gone = next((one for one in absent[:_CHECKED] if not listed.exists(one.path)), None)
    if gone is not None:
        also = f", and so are {len(absent) - 1:,} more of its objects" if len(absent) > 1 else ""
        return _segment_part(segment, gone, f", which the manifest needs, is missing{also}", missing=True)
    sizes = {one.path: meta.size for one in needed if (meta := listed.folder(one.path).get(one.path)) is not None}
    for one in needed:
        size = sizes.get(one.path, one.size or one.least)
        if size < one.least or one.size not in {None, size}:
            wanted = f"at least {one.least}" if one.size is None else one.size
            return _segment_part(segment, one, f" has {size} bytes; it must have {wanted}")
    clusters = [one for one in needed if one.path.rpartition("/")[2].startswith("cluster_")]
    least = 8 * segment.clusters + segment.vectors * (LEAST_ROW + 4 * (dimensions or 1))
    total = sum(sizes.get(one.path, least) for one in clusters)
    if total < least and not segment.objects:
        return _segment_part(
            segment, clusters[0], f", or another cluster, is cut: they have {total} bytes, and need at least {least}"
        )
    return None


def _segment_part(segment: SegmentRef, needed: Needed, wrong: str, *, missing: bool = False) -> BlockedPart:
    error = SegmentCorruptError(f"{needed.path}{wrong}.", remedy=None if needed.has_rows else REWRITE)
    return BlockedPart("segment", segment.id, error, needed.path, missing, needed.has_rows)
