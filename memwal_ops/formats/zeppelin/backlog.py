"""Compute the backlog of a namespace, find damaged parts, and read WAL fragments. Reads only.

A manifest that is readable does not mean that what it lists is there. Damaged parts are found by names and sizes, and
no object is read as a whole. This costs one listing of the log, one of each prefix of the segment, one request for the
lease, one for the record of each prefix, and a range of a few bytes for each of the first fragments whose size the
manifest does not have.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.polling import built_in_backlog, cached_for_poll
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.errors import (
    FragmentCorruptError,
    FragmentMissingError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
    SegmentCorruptError,
    TableCorruptError,
)
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.lease import LEASE, read_lease
from memwal_ops.formats.zeppelin.namespace import read_revision
from memwal_ops.formats.zeppelin.segments import LEAST_ROW, SegmentReader
from memwal_ops.formats.zeppelin.wire import MANIFEST
from memwal_ops.formats.zeppelin.wire.fragment import WIKI, UnstorableError, decode_fragment
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.segments import Needed
    from memwal_ops.formats.zeppelin.wire.fragment import Fragment
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


def summarize(table: Namespace) -> TableSummary:
    """Backlog metrics of all jobs, and the parts with an object that is missing or cut.

    Raises:
        StorageError: the store failed.
    """
    backlog = built_in_backlog(table)
    found = cached_for_poll(table, "damaged", lambda: damaged_parts(table)) if backlog.get("blocked_parts") else ()
    blocked = tuple(Blocked("", one.error.reason, str(one.error), one.to_json()) for one in found)
    return TableSummary(table.revision, backlog, len(table.manifest.fragments), blocked)


def missing_of(table: Namespace, revision: int, listed: Listed | None = None) -> str | None:
    """An object with rows that a revision lists and that is missing or cut; ``listed``: shared by several revisions."""
    if revision != table.revision and not table.has_revision(revision):
        return None
    manifest = table.manifest if revision == table.revision else read_revision(table, revision)
    found = damaged_parts_of(table, manifest, listed or Listed(table.store))
    return next((one.path for one in found if one.has_rows), None)


_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_LENGTH = 26
_RANDOM_BITS = 80
_HIGHEST = 2**128 - 1


def new_ulid(above: str = "") -> str:
    """A ULID of now, or the next one above ``above`` if that is later, from a clock that is ahead."""
    value = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | int.from_bytes(os.urandom(_RANDOM_BITS // 8))
    least = _value(above)
    if least is not None and value <= least:
        # Far enough above it that two writers that read the same ULID are unlikely to choose the same next one.
        value = min(least + 1 + int.from_bytes(os.urandom(8)), _HIGHEST)
    return _text(value)


def ulid_time(ulid: str) -> datetime | None:
    """The time in a ULID, by its writer's clock; None if it is not a ULID."""
    value = _value(ulid)
    if value is None:
        return None
    try:
        return datetime.fromtimestamp((value >> _RANDOM_BITS) / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _value(ulid: str) -> int | None:
    if len(ulid) != _LENGTH or not all(digit in _VALUES for digit in ulid):
        return None
    value = 0
    for digit in ulid:
        value = value << 5 | _VALUES[digit]
    return value if value <= _HIGHEST else None


def _text(value: int) -> str:
    return "".join(_DIGITS[value >> 5 * place & 31] for place in reversed(range(_LENGTH)))


_NAMED = 3


def figures(table: Namespace) -> Mapping[str, float]:
    """Backlog metrics; for the requests, see :mod:`memwal_ops.formats.zeppelin.backlog`.

    A log of contested rows alone is no backlog: no compaction changes it, and each poll would start another one.
    """
    listed = Listed(table.store)
    blocked = cached_for_poll(table, "damaged", lambda: damaged_parts(table, listed))
    left = cached_for_poll(table, "contested", lambda: contested(table))
    refs, now = () if left.alone else table.manifest.fragments, datetime.now(UTC)
    existing = {ref.id: meta for ref in refs if (meta := listed.folder(ref.key).get(ref.key)) is not None}
    written = [written_at(ref) or (existing[ref.id].last_modified if ref.id in existing else None) for ref in refs]
    oldest = min(filter(None, written), default=None)
    if refs and oldest is None:  # its objects are gone, and say nothing: the manifest that lists them is younger
        oldest = getattr(table.store.head(MANIFEST), "last_modified", None)
    return {
        "fragments": len(refs),
        "rows": sum(ref.vectors for ref in refs),
        "bytes": sum(meta.size for meta in existing.values()),
        "oldest_age": 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds()),
        "blocked_parts": len(blocked),
    }


@dataclass(frozen=True)
class Contested:
    """Ids that are both in wiki ``pending_deletes`` and in the log: it is not defined which came later (S4-014).

    Attributes:
        ids: ascending.
        alone: whether a compaction has nothing else to do.
    """

    ids: tuple[str, ...] = ()
    alone: bool = False

    def __str__(self) -> str:
        """How many there are, and the first ones."""
        some = ", ".join(map(repr, self.ids[:_NAMED])) + (", ..." if len(self.ids) > _NAMED else "")
        return f"{counted(len(self.ids), 'id is', 'ids are')} both in pending_deletes and in the log: {some}"


def contested(table: Namespace) -> Contested:
    """The contested ids of a namespace. Reads the log only if ``pending_deletes`` has ids; memory: the log's ids."""
    hidden = table.manifest.hidden.difference(table.manifest.pending_keys)
    if not hidden:
        return Contested()
    newest: dict[str, bool] = {}
    whole = not any(ref.is_empty for ref in table.manifest.fragments)
    for _, fragment in read_fragments(table, table.manifest.fragments, None):
        if isinstance(fragment, MemwalOpsError):
            whole = False  # it blocks the log, and those behind it are not compacted
            break
        newest |= dict.fromkeys(fragment.deletes, False) | dict.fromkeys(fragment.ids, True)
    ids = {name for name in hidden if newest.get(name)}
    return Contested(tuple(sorted(ids)), whole and ids == hidden and newest.keys() == ids)


def written_at(ref: FragmentRef) -> datetime | None:
    """When a fragment was written, by its writer's clock."""
    try:
        written = None if ref.created_at is None else datetime.fromisoformat(ref.created_at)
    except ValueError:
        written = None
    if written is not None:
        return written if written.tzinfo is not None else written.replace(tzinfo=UTC)
    return ulid_time(ref.id)


def read_fragment(table: Namespace, ref: FragmentRef, dimensions: int | None = None) -> Fragment:
    """Read a listed fragment, verified against its checksum and its entry in the manifest.

    Raises:
        FragmentMissingError: it does not exist.
        FragmentCorruptError: it cannot be read, or is not the fragment that is listed.
    """
    return _decoded(table, ref, dimensions, _fetched(table, ref))


def _fetched(table: Namespace, ref: FragmentRef) -> bytes:
    try:
        return table.store.get(ref.key)
    except ObjectNotFoundError as error:
        raise FragmentMissingError(f"The fragment {ref.key} is listed, but does not exist.") from error


def _decoded(table: Namespace, ref: FragmentRef, dimensions: int | None, data: bytes) -> Fragment:
    try:
        found = decode_fragment(data, table.manifest.dialect)
    except UnstorableError as error:
        raise FragmentCorruptError(
            f"The fragment {ref.key} cannot be used: {error}", remedy=remedies.CORRECT
        ) from error
    except InvalidFormatError as error:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be read: {error}") from error
    if dimensions is not None and found.dimensions not in {None, dimensions}:
        raise other_dimensions(ref, found, dimensions)
    wrong = None
    if found.id != ref.id:
        wrong = f"its id is {found.id}"
    elif found.namespace not in {None, table.manifest.namespace}:
        wrong = f"it belongs to the namespace {found.namespace}"
    elif ref.bytes is not None and len(data) != ref.bytes:
        wrong = f"it has {len(data)} bytes; the manifest has {ref.bytes}"
    elif (len(found.ids), len(found.deletes)) != (ref.vectors, ref.deletes):
        listed = f"{ref.vectors} and {ref.deletes}"
        wrong = f"it has {len(found.ids)} vectors and {len(found.deletes)} deletes; the manifest has {listed}"
    if wrong is not None:
        raise FragmentCorruptError(f"The fragment {ref.key} cannot be used: {wrong}.")
    return found


def other_dimensions(ref: FragmentRef, found: Fragment, dimensions: int) -> FragmentCorruptError:
    """The error of a fragment whose vectors are not of the dimensions of those before."""
    return FragmentCorruptError(
        f"The fragment {ref.key} cannot be used: its vectors have {found.dimensions} dimensions; those before have "
        f"{dimensions}.",
        remedy=remedies.CORRECT,
    )


def read_fragments(
    table: Namespace, refs: Sequence[FragmentRef], dimensions: int | None
) -> Iterator[tuple[FragmentRef, Fragment | MemwalOpsError]]:
    """Read listed fragments in order; an error in place of one that cannot be used.

    The bytes of a few are fetched at once. They are decoded one at a time, as that needs many times their size.
    """

    def fetched(ref: FragmentRef) -> bytes | FragmentMissingError:
        try:
            return _fetched(table, ref)
        except FragmentMissingError as error:
            return error

    for ref, data in concurrently(fetched, refs, threads=_CONCURRENT_READS):
        if isinstance(data, FragmentMissingError):
            yield ref, data
            continue
        try:
            found: Fragment | MemwalOpsError = _decoded(table, ref, dimensions, data)
        except FragmentCorruptError as error:
            found = error
        yield ref, found
        del found  # before the next one is decoded
