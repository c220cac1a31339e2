"""Read the log of a namespace, compute its backlog, find damaged parts, and show all of that. Reads only.

A manifest that is readable does not mean that what it lists is there. Damaged parts are found by names and sizes, and
no object is read as a whole. This costs one listing of the log, one of each prefix of the segment, one request for the
lease, one for the record of each prefix, and a range of a few bytes for each of the first fragments whose size the
manifest does not have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.core.figures import built_in_backlog, cached_for_poll, poll_cache
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.lease import LEASE, LeaseRecord, read_lease
from memwal_ops.formats.zeppelin.namespace import Namespace, read_revision
from memwal_ops.formats.zeppelin.segments import LEAST_ROW, SegmentObject, SegmentReader
from memwal_ops.formats.zeppelin.wire import MANIFEST, ulid_time
from memwal_ops.formats.zeppelin.wire.fragment import WIKI, Fragment, UnstorableError, decode_fragment
from memwal_ops.storage.api import ObjectMeta, Store, concurrently
from memwal_ops.text import counted, grid, paragraph, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.specs import ZeppelinInspectOptions
    from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, Manifest, SegmentRef


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
        has_rows: whether rows are lost with it: a merge cannot write it again.
    """

    kind: str
    id: str
    error: errors.MemwalOpsError
    path: str = ""
    missing: bool = False
    has_rows: bool = True

    def to_json(self) -> dict[str, Any]:
        """The ``blocked`` entry of a report."""
        error = self.error
        return {self.kind: self.id, "reason": error.reason, "detail": str(error), "remedy": error.remedy}


class Listings:
    """Sizes of a namespace's objects; each folder is listed once."""

    def __init__(self, store: Store) -> None:
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


def damaged_parts(table: Namespace, listed: Listings | None = None) -> tuple[BlockedPart, ...]:
    """The parts of the live manifest whose objects are missing or cut: fragments in order, segments, the lease.

    Raises ``StorageError``: the store failed.
    """
    parts = damaged_parts_of(table, table.manifest, listed or Listings(table.store))
    if parts and (newest := table.newest()).data != table.data:
        # A compaction replaced them meanwhile, and gc collected them.
        live = {*newest.manifest.fragment_ids, *newest.manifest.segment_ids}
        parts = tuple(part for part in parts if part.id in live)
    try:
        read_lease(table)
    except errors.TableCorruptError as error:
        parts = (*parts, BlockedPart("lease", LEASE, error, LEASE, has_rows=False))
    return parts


def unchecked(manifest: Manifest) -> tuple[str, ...]:
    """Fragments and segments of which no object is looked for: those of other namespaces, and trees of nodes."""
    skipped = manifest.borrowed | {segment.id for segment in manifest.segments if segment.hierarchical}
    return tuple(name for name in [*manifest.fragment_ids, *manifest.segment_ids] if name in skipped)


def damaged_parts_of(table: Namespace, manifest: Manifest, listed: Listings) -> tuple[BlockedPart, ...]:
    """As :func:`damaged_parts`, of a manifest of the namespace."""
    skipped = {*unchecked(manifest)}
    refs = [ref for ref in manifest.fragments if ref.id not in skipped]
    segments = [segment for segment in manifest.segments if segment.id not in skipped]
    parts = [*_missing(refs, listed), *_cut(table.store, manifest, refs, listed)]
    order = {ref.id: place for place, ref in enumerate(refs)}
    parts.sort(key=lambda part: order[part.id])
    faults = (_segment_fault(table, segment, listed) for segment in segments)
    return (*parts, *(part for part in faults if part is not None))


def _missing(refs: list[FragmentRef], listed: Listings) -> Iterator[BlockedPart]:
    absent = [ref for ref in refs if ref.key not in listed.folder(ref.key)]
    for number, ref in enumerate(absent):
        if number >= _CHECKED or not listed.exists(ref.key):
            yield BlockedPart("fragment", ref.id, _absent(ref), ref.key, missing=True)


def _cut(store: Store, manifest: Manifest, refs: list[FragmentRef], listed: Listings) -> Iterator[BlockedPart]:
    """Fragments whose size differs from the recorded one, or whose text has no end."""
    sizes = {ref.key: meta.size for ref in refs if (meta := listed.folder(ref.key).get(ref.key)) is not None}
    existing = [ref for ref in refs if ref.key in sizes]
    unsized = [ref for ref in existing if ref.bytes is None][:_CHECKED] if manifest.dialect == WIKI else []

    def whole(ref: FragmentRef) -> bool:
        start = max(0, sizes[ref.key] - _TAIL)
        try:
            return _ENDS.search(store.get_range(ref.key, start, sizes[ref.key] - start)) is not None
        except errors.ObjectNotFoundError:
            return True  # listed, and collected since

    for ref in existing:
        if ref.bytes is not None and ref.bytes != sizes[ref.key]:
            yield _corrupt(ref, f"has {sizes[ref.key]} bytes; the manifest has {ref.bytes}")
    for ref, is_whole in concurrently(whole, unsized, threads=_CONCURRENT_READS):
        if not is_whole:
            yield _corrupt(ref, f"is cut: its {sizes[ref.key]} bytes do not end as a JSON document does")


def _corrupt(ref: FragmentRef, wrong: str) -> BlockedPart:
    return BlockedPart("fragment", ref.id, errors.FragmentCorruptError(f"The fragment {ref.key} {wrong}."), ref.key)


def _segment_fault(table: Namespace, segment: SegmentRef, listed: Listings) -> BlockedPart | None:
    """The first object of a segment that is missing or cut, with the number of others."""
    dimensions = table.meta.dimensions
    needed = SegmentReader(table.store, segment).needed(dimensions)
    absent = [item for item in needed if item.path not in listed.folder(item.path)]
    gone = next((item for item in absent[:_CHECKED] if not listed.exists(item.path)), None)
    if gone is not None:
        also = f", and so are {len(absent) - 1:,} more of its objects" if len(absent) > 1 else ""
        return _segment_part(segment, gone, f", which the manifest needs, is missing{also}", missing=True)
    sizes = {item.path: meta.size for item in needed if (meta := listed.folder(item.path).get(item.path)) is not None}
    for item in needed:
        size = sizes.get(item.path, item.size or item.least)
        if size < item.least or item.size not in {None, size}:
            wanted = f"at least {item.least}" if item.size is None else item.size
            return _segment_part(segment, item, f" has {size} bytes; it must have {wanted}")
    clusters = [item for item in needed if item.path.rpartition("/")[2].startswith("cluster_")]
    least = 8 * segment.clusters + segment.vectors * (LEAST_ROW + 4 * (dimensions or 1))
    total = sum(sizes.get(item.path, least) for item in clusters)
    if total < least and not segment.objects:
        return _segment_part(
            segment, clusters[0], f", or another cluster, is cut: they have {total} bytes, and need at least {least}"
        )
    return None


def _segment_part(segment: SegmentRef, needed: SegmentObject, wrong: str, *, missing: bool = False) -> BlockedPart:
    error = errors.SegmentCorruptError(f"{needed.path}{wrong}.", remedy=None if needed.has_rows else REWRITE)
    return BlockedPart("segment", segment.id, error, needed.path, missing, needed.has_rows)


def summarize(table: Namespace) -> TableSummary:
    """Backlog metrics of all jobs, and the parts with an object that is missing or cut.

    Raises ``StorageError``: the store failed.
    """
    backlog = built_in_backlog(table)
    parts = cached_for_poll(table, "damaged", lambda: damaged_parts(table)) if backlog.get("blocked_parts") else ()
    blocked = tuple(Blocked("", part.error.reason, str(part.error), part.to_json()) for part in parts)
    return TableSummary(table.revision, backlog, len(table.manifest.fragments), blocked)


def missing_of(table: Namespace, revision: int, listed: Listings | None = None) -> str | None:
    """An object with rows that a revision lists and that is missing or cut; ``listed``: shared by several revisions."""
    if revision != table.revision and not table.has_revision(revision):
        return None
    manifest = table.manifest if revision == table.revision else read_revision(table, revision)
    parts = damaged_parts_of(table, manifest, listed or Listings(table.store))
    return next((part.path for part in parts if part.has_rows), None)


_NAMED = 3
_SHOWN = ("id", "vectors", "clusters", "quantization", "bitmap_fields", "fts_fields", "hierarchical")


def figures(table: Namespace) -> Mapping[str, float]:
    """Backlog metrics; for the requests, see :mod:`memwal_ops.formats.zeppelin.backlog`.

    A log of contested rows alone is no backlog: no compaction changes it, and each poll would start another one.
    """
    listed = Listings(table.store)
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

    ``alone``: a compaction has nothing else to do.
    """

    ids: tuple[str, ...] = ()
    alone: bool = False

    def __str__(self) -> str:
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
        if isinstance(fragment, errors.MemwalOpsError):
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


def _fetched(table: Namespace, ref: FragmentRef) -> bytes | None:
    try:
        return table.store.get(ref.key)
    except errors.ObjectNotFoundError:
        return None


def _absent(ref: FragmentRef) -> errors.FragmentMissingError:
    return errors.FragmentMissingError(f"The fragment {ref.key} is listed, but does not exist.")


def _decoded(table: Namespace, ref: FragmentRef, dimensions: int | None, data: bytes | None) -> Fragment:
    if data is None:
        raise _absent(ref)
    try:
        fragment = decode_fragment(data, table.manifest.dialect)
    except UnstorableError as error:
        raise errors.FragmentCorruptError(
            f"The fragment {ref.key} cannot be used: {error}", remedy=remedies.CORRECT
        ) from error
    except errors.InvalidFormatError as error:
        raise errors.FragmentCorruptError(f"The fragment {ref.key} cannot be read: {error}") from error
    if dimensions is not None and fragment.dimensions not in {None, dimensions}:
        raise errors.FragmentCorruptError(
            f"The fragment {ref.key} cannot be used: its vectors have {fragment.dimensions} dimensions; those before "
            f"have {dimensions}.",
            remedy=remedies.CORRECT,
        )
    wrong = None
    if fragment.id != ref.id:
        wrong = f"its id is {fragment.id}"
    elif fragment.namespace not in {None, table.manifest.namespace}:
        wrong = f"it belongs to the namespace {fragment.namespace}"
    elif ref.bytes is not None and len(data) != ref.bytes:
        wrong = f"it has {len(data)} bytes; the manifest has {ref.bytes}"
    elif (len(fragment.ids), len(fragment.deletes)) != (ref.vectors, ref.deletes):
        listed = f"{ref.vectors} and {ref.deletes}"
        wrong = f"it has {len(fragment.ids)} vectors and {len(fragment.deletes)} deletes; the manifest has {listed}"
    if wrong is not None:
        raise errors.FragmentCorruptError(f"The fragment {ref.key} cannot be used: {wrong}.")
    return fragment


def read_fragments(
    table: Namespace, refs: Sequence[FragmentRef], dimensions: int | None
) -> Iterator[tuple[FragmentRef, Fragment | errors.MemwalOpsError]]:
    """Read listed fragments in order; an error in place of one that cannot be used.

    The bytes of a few are fetched at once. They are decoded one at a time, as that needs many times their size. Without
    ``dimensions``, those of the first vector hold for all.
    """
    for ref, data in concurrently(partial(_fetched, table), refs, threads=_CONCURRENT_READS):
        try:
            fragment = _decoded(table, ref, dimensions, data)
            dimensions = dimensions or fragment.dimensions
            yield ref, fragment
            del fragment  # before the next one is decoded
        except (errors.FragmentMissingError, errors.FragmentCorruptError) as error:
            yield ref, error


@dataclass(frozen=True)
class Inspection:
    """The data that ``inspect`` prints for one manifest."""

    table: Namespace
    backlog: Mapping[str, float]
    damaged: tuple[BlockedPart, ...]
    contested: Contested
    lease: LeaseRecord | None
    limit: int

    decision = "inspected"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        table, manifest = self.table, self.table.manifest
        missing = {part.id for part in self.damaged if part.missing}
        return {
            "decision": self.decision,
            "uri": table.location.uri,
            "format": table.format.name,
            "dialect": manifest.dialect,
            "encoding": manifest.encoding,
            "namespace": manifest.namespace,
            "version": table.revision,
            "dimensions": table.meta.dimensions,
            "metric": table.meta.metric,
            "state": table.meta.state,
            "unwritable": manifest.unwritable,
            "fencing_token": manifest.token,
            "lease": self._lease(),
            "pending_deletes": len(manifest.pending),
            "segments": [{name: getattr(segment, name) for name in _SHOWN} for segment in manifest.segments],
            "fragments": [
                {"id": ref.id, "vectors": ref.vectors, "deletes": ref.deletes, "missing": ref.id in missing}
                for ref in manifest.fragments[: self.limit]
            ],
            "truncated": len(manifest.fragments) > self.limit,
            "blocked": [part.to_json() for part in self.damaged],
            "contested": len(self.contested.ids),
            "backlog": dict(self.backlog),
        }

    def describe(self) -> str:
        """The inspection as text for people."""
        table, manifest = self.table, self.table.manifest
        lease = self._lease()
        held = "unreadable" if any(part.kind == "lease" for part in self.damaged) else "never acquired"
        if lease is not None:
            held = f"{lease['state']} ({lease['holder']}, token {lease['token']})"
        what = f"{counted(int(self.backlog['fragments']), 'fragment')}, {counted(int(self.backlog['rows']), 'vector')}"
        waiting = f"{what}, {size_text(self.backlog['bytes'])}, the oldest for {time_text(self.backlog['oldest_age'])}"
        rows = [
            ("namespace", f"{manifest.namespace}, {manifest.dialect} dialect, manifest as {manifest.encoding}"),
            ("revision", f"{table.revision}, fencing token {manifest.token}"),
            ("vectors", f"{table.meta.dimensions or 'unknown'} dimensions, metric {table.meta.metric or 'unknown'}"),
            ("waiting", waiting),
            ("pending", counted(len(manifest.pending), "pending delete")),
            ("lease", held),
        ]
        lines = [f"{name:<10} {text}" for name, text in rows]
        if manifest.unwritable is not None:
            lines.append(f"{'read-only':<10} {manifest.unwritable}")
        cells = [
            (of.id, f"{of.vectors:,}", str(of.clusters), of.quantization or "none", ", ".join(of.bitmap_fields))
            for of in manifest.segments
        ]
        if cells:
            headings = ("segment", "vectors", "clusters", "codes", "bitmaps")
            lines += ["", grid(headings, cells, words=("segment", "codes", "bitmaps"))]
        lines += ["", *self._objects()]
        return "\n".join(lines)

    def _objects(self) -> Iterator[str]:
        for part in self.damaged:
            yield f"{'missing' if part.missing else 'damaged'}: {part.path}"
            yield paragraph(f"{part.error} {part.error.remedy}", indent="  ", hanging="  ")
        if self.contested.ids:
            yield paragraph(f"{self.contested}; no query returns them, and merge keeps both.", hanging="  ")
        skipped = unchecked(self.table.manifest)
        if skipped:
            yield f"Not looked for, as only a server can: the objects of {', '.join(skipped)}."
        elif not self.damaged:
            yield "All listed objects exist, with the sizes that are known; contents were not read: memwal-ops verify."

    def _lease(self) -> dict[str, Any] | None:
        if self.lease is None:
            return None
        state = "held" if self.lease.expires > datetime.now(UTC) else "expired"
        expires = self.lease.expires.isoformat(timespec="seconds")
        return {"holder": self.lease.holder, "token": self.lease.token, "expires": expires, "state": state}


def plan(table: Namespace, options: ZeppelinInspectOptions, context: RunContext | None = None) -> Inspection:
    """Inspect the namespace: its manifest, listings of its log and segment, and its lease."""
    del context
    try:
        stored = read_lease(table)
    except errors.TableCorruptError:
        stored = None  # among what is damaged
    with poll_cache():
        metrics = figures(table)
        damaged = cached_for_poll(table, "damaged", lambda: damaged_parts(table))
        left = cached_for_poll(table, "contested", lambda: contested(table))
    return Inspection(table, metrics, damaged, left, stored and stored[0], options.limit)


apply = plan
