"""Collect the garbage of a namespace: objects that no reader and no commit can need (S4-010, S4-034, S4-037).

| what | proof |
|---|---|
| fragment, segment | a recorded revision listed it (or a commit put it into native ``pending_deletes``), and neither the live manifest nor a retained revision does: a compaction removed it, and its rows are in the segment that was published then |
| orphan segment | no manifest lists it; an earlier run recorded that, ``reader_grace`` ago; and the manifest has a token above its writer's, so that its writer cannot publish it any more |
| orphan fragment | no manifest lists it; an earlier run recorded that, ``orphan_min_age`` ago; and the manifest was replaced since, so that a writer that stalled between its PUT and its compare-and-swap does not list it |
| revision | it is not retained, and no object exists that only it lists |
| anything else | kept, reported as unrecognized |

Segments are deleted by whole prefixes: a prefix is kept, at any age, while a retained manifest lists a cluster in it.
"""  # noqa: E501 - a table

from __future__ import annotations

import enum
import re
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

from memwal_ops.core import collector
from memwal_ops.core.anchors import Anchor, anchor_at
from memwal_ops.core.candidates import UNKNOWN, Candidate, CollectionReport, Gate, KindText, age_gate, unrecognized
from memwal_ops.core.explanation import Explanation, explain
from memwal_ops.core.holds import announced_expiry
from memwal_ops.errors import BusyError, TableReplacedError
from memwal_ops.formats.zeppelin.backlog import damaged_parts
from memwal_ops.formats.zeppelin.lease import DEFAULT_TTL, claim, held_lease
from memwal_ops.formats.zeppelin.namespace import FencedError, Namespace, Revision, probe, recorded, retried
from memwal_ops.formats.zeppelin.roots import (
    Cache,
    OrphanLedger,
    Roots,
    prefix_of,
    read_ledger,
    read_roots,
    write_ledger,
)
from memwal_ops.formats.zeppelin.wire import ulid_time
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI
from memwal_ops.storage.clock import CLOCK_FOLDER, store_time
from memwal_ops.storage.probe import PROBE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions, ZeppelinWhyOptions
    from memwal_ops.formats.zeppelin.wire.manifest import Manifest
    from memwal_ops.storage.api import ObjectMeta


_FRAGMENT = {
    NATIVE: re.compile(r"wal/[0-9A-Za-z_-]{1,64}\.wal"),
    WIKI: re.compile(r"wal/[0-9A-Za-z_-]{1,64}\.fragment\.json"),
}
_SEGMENT = re.compile(r"segments/[0-9A-Za-z_-]{1,64}/[^/]+")
_TRAINING = re.compile(r"_mem_wal_ops/training/([0-9A-Za-z_-]{1,64})\.json")
_STAGING = re.compile(r"_staging/([0-9]{1,20})\.json")
# Objects that are neither fragments nor segments, and are never collected.
_KEPT = re.compile(
    r"(manifest|meta|lease)\.json|(manifests|snapshots|_gc|_lifecycle|input-wal|sources|late)/.*"
    r"|_mem_wal_ops/((holds|expiries|leases|history|gc|quarantine)/.*|swap\.lock)"
)
_PROBE = re.compile(rf"({PROBE_FOLDER}|{CLOCK_FOLDER})/[^/]+")
# Where jobs put what a commit retires: one listing, instead of a request for each key.
_LISTED = ("wal/", "segments/")
# A probe takes seconds. If its objects were deleted meanwhile, it would report a store that loses writes.
_PROBE_AGE = timedelta(hours=1)
_RETIRED = Gate(met=True, text="a manifest listed it, and a compaction removed it")


class NamespaceKind(enum.StrEnum):
    """The kinds of candidates."""

    FRAGMENT = "fragment"
    SEGMENT = "segment"
    ORPHAN_FRAGMENT = "orphan_fragment"
    ORPHAN_SEGMENT = "orphan_segment"
    NOTE = "note"
    LEFTOVER = "leftover"
    REVISION = "revision"


_SEGMENTS = {NamespaceKind.SEGMENT, NamespaceKind.ORPHAN_SEGMENT}


class ZeppelinGcReport(CollectionReport[Candidate]):
    """The report of gc, as in every format."""

    kinds = {  # noqa: RUF012 - as in the base class
        NamespaceKind.FRAGMENT: KindText("fragments", ("fragment", "fragments")),
        NamespaceKind.SEGMENT: KindText("segments"),
        NamespaceKind.ORPHAN_FRAGMENT: KindText("orphan fragments"),
        NamespaceKind.ORPHAN_SEGMENT: KindText("orphan segments"),
        NamespaceKind.NOTE: KindText("staging records of compactions", ("note", "notes")),
        NamespaceKind.LEFTOVER: KindText("probes of killed runs", ("probe object", "probe objects")),
        NamespaceKind.REVISION: KindText("revisions", ("revision", "revisions")),
        UNKNOWN: KindText("unknown"),
    }

    def notes(self) -> Iterator[str]:
        """Why a first run deletes no orphans."""
        if any(self.counts.get(kind) for kind in (NamespaceKind.ORPHAN_FRAGMENT, NamespaceKind.ORPHAN_SEGMENT)):
            yield "Orphans are deleted in two runs: the first with --apply records them, a later one deletes them."


@dataclass
class NamespaceEvidence:
    """Creates candidates with their gates, from roots, lease and ledger."""

    options: ZeppelinGcOptions
    now: datetime
    ledger: OrphanLedger
    roots: Roots
    live: Namespace
    cache: Cache = field(default_factory=Cache)
    # The token that this run put into the manifest; None: none.
    token: int | None = None
    busy: str | None = None

    @classmethod
    def of(cls, table: Namespace, options: ZeppelinGcOptions, now: datetime) -> NamespaceEvidence:
        """Read the roots, the lease and the ledger."""
        cache = Cache()
        roots = read_roots(table, options.keep_revisions, options.reader_grace, now, cache)
        return cls(options, now, read_ledger(table), roots, table, cache)

    def refresh(self, table: Namespace) -> None:
        """Read the live manifest, the history, holds and snapshots again.

        Raises ``UnsupportedFeatureError``: a server added state, such as a branch, whose objects are not known here.
        """
        self.live = table.newest()
        self.live.check_writable()
        self.roots = read_roots(self.live, self.options.keep_revisions, self.options.reader_grace, self.now, self.cache)

    def fragment(self, path: str, size: int) -> Candidate:
        """One object of the log."""
        needed, unneeded = self.roots.fragments.get(path), path in self.roots.cleared
        if needed is not None or unneeded:
            return Candidate(NamespaceKind.FRAGMENT, path, size, 1, (_needed(needed), _RETIRED))
        gates = self._orphan(path, path.rpartition("/")[2].partition(".")[0], self.options.orphan_min_age)
        return Candidate(NamespaceKind.ORPHAN_FRAGMENT, path, size, 1, gates)

    def segment(self, prefix: str, size: int, objects: int) -> Candidate:
        """All objects of a segment, as one candidate."""
        needed, path = self.roots.prefixes.get(prefix), prefix.rstrip("/")
        if needed is not None or prefix in self.roots.cleared:
            return Candidate(NamespaceKind.SEGMENT, path, size, objects, (_needed(needed), _RETIRED))
        gates = self._orphan(path, path.rpartition("/")[2].removeprefix("seg")[1:], self.options.reader_grace)
        return Candidate(NamespaceKind.ORPHAN_SEGMENT, path, size, objects, gates)

    def note(self, path: str, size: int, written: datetime) -> Candidate:
        """A staging record or training record of a compaction, or an object of a probe: no row depends on it."""
        if _PROBE.fullmatch(path):
            killed = Gate(met=True, text="written by a job that probed the store and was killed")
            gates = (killed, age_gate("A probe may be running: written", written, _PROBE_AGE, self.now))
            return Candidate(NamespaceKind.LEFTOVER, path, size, 1, gates)
        staged = _STAGING.fullmatch(path)
        if staged is not None:
            newer = Gate(int(staged[1]) < self.live.manifest.token, "a later token is in the manifest")
        else:
            match = _TRAINING.fullmatch(path)
            prefix = f"segments/{match[1] if match else ''}/"
            newer = Gate(prefix not in self.roots.prefixes, "no retained revision has its segment")
        gates = (newer, age_gate("It was written", written, self.options.reader_grace, self.now))
        return Candidate(NamespaceKind.NOTE, path, size, 1, gates)

    def _orphan(self, path: str, ulid: str, limit: timedelta) -> tuple[Gate, ...]:
        return _needed(None), self._recorded_gate(path, limit), self._created_gate(ulid, limit), self._fenced()

    def _recorded_gate(self, path: str, limit: timedelta) -> Gate:
        self.ledger.seen.add(path)
        since = self.ledger.since.get(path)
        if since is None:
            return Gate(met=False, text="no earlier run recorded that no manifest lists it")
        gate = age_gate("An earlier run recorded that no manifest lists it", since, limit, self.now)
        return replace(gate, met=self.now - since >= limit)

    def _created_gate(self, ulid: str, limit: timedelta) -> Gate:
        created = ulid_time(ulid)
        if created is None:
            return Gate(met=True, text="its name has no time")
        return age_gate("It was created, by its name", created, limit, self.now)

    def _fenced(self) -> Gate:
        if self.busy is not None:
            return Gate(met=False, text=f"a compaction may be writing it: {self.busy}")
        if self.token is None:
            return Gate(met=True, text="a new token is put into the manifest before the deletion")
        return Gate(met=True, text=f"the token {self.token} is in the manifest: its writer cannot publish it any more")

    @property
    def has_old_orphan(self) -> bool:
        """Whether an orphan was recorded so long ago that it may be deleted."""
        limits = {"segments": self.options.reader_grace, "wal": self.options.orphan_min_age}
        recorded = ((limits.get(path.partition("/")[0]), since) for path, since in self.ledger.since.items())
        return any(limit is not None and since <= self.now - limit for limit, since in recorded)


class NamespaceObjects(collector.Collector[Candidate]):
    """Fragments, segments and records of compactions, from one listing of the namespace."""

    anchors: Sequence[Anchor] = ()

    def __init__(self, table: Namespace, evidence: NamespaceEvidence, anchors: Sequence[Anchor] = ()) -> None:
        """``anchors``: the newest recorded manifest; none for a plan."""
        self.table, self.evidence, self.store, self.anchors = table, evidence, table.store, anchors
        self.existing: set[str] = set()
        self._is_fragment = _FRAGMENT[table.manifest.dialect].fullmatch

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """Fragments and records as they are listed, then segments."""
        segments: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        candidates = (self._candidate(meta, segments) for meta in self.store.list())
        yield collector.Stage(candidate for candidate in candidates if candidate is not None)
        yield collector.Stage(self.evidence.segment(prefix, *sizes) for prefix, sizes in sorted(segments.items()))

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Check the gates of the batch again, by roots that are read again."""
        self.evidence.refresh(self.table)
        for candidate in batch:
            if candidate.kind in {NamespaceKind.FRAGMENT, NamespaceKind.ORPHAN_FRAGMENT}:
                yield self.evidence.fragment(candidate.path, candidate.bytes)
            elif candidate.kind in _SEGMENTS:
                yield self.evidence.segment(f"{candidate.path}/", candidate.bytes, candidate.objects)
            elif (meta := self.store.head(candidate.path)) is not None:
                yield self.evidence.note(candidate.path, meta.size, meta.last_modified)

    def objects(self, candidate: Candidate) -> Iterable[tuple[str, int]]:
        """The objects below a segment's prefix now."""
        if candidate.kind in _SEGMENTS:
            return ((meta.path, meta.size) for meta in self.store.list(candidate.path))
        return super().objects(candidate)

    def not_deleted(self, candidate: Candidate) -> None:
        """Record a candidate that was not deleted: the revision that proves it must be kept for the next run."""
        self.existing.add(f"{candidate.path}/" if candidate.kind in _SEGMENTS else candidate.path)

    def _candidate(self, meta: ObjectMeta, segments: dict[str, list[int]]) -> Candidate | None:
        path = meta.path
        if self._is_fragment(path):
            return self.evidence.fragment(path, meta.size)
        if _SEGMENT.fullmatch(path):
            sizes = segments[prefix_of(path)]
            sizes[0] += meta.size
            sizes[1] += 1
            return None
        if _TRAINING.fullmatch(path) or _STAGING.fullmatch(path) or _PROBE.fullmatch(path):
            return self.evidence.note(path, meta.size, meta.last_modified)
        if _KEPT.fullmatch(path):
            return None
        return unrecognized(path, meta.size, f"no object of a {self.table.manifest.dialect} namespace has such a name")


class Revisions(collector.Collector[Candidate]):
    """Recorded revisions, after the objects that only they list."""

    anchors: Sequence[Anchor] = ()

    def __init__(self, objects: NamespaceObjects) -> None:
        self.table, self.evidence, self.store = objects.table, objects.evidence, objects.store
        self.anchors, self._objects = objects.anchors, objects

    def stages(self) -> Iterator[collector.Stage[Candidate]]:
        """Oldest first."""
        yield collector.Stage(map(self._candidate, self.evidence.roots.revisions))

    def revalidate(self, batch: Sequence[Candidate]) -> Iterable[Candidate]:
        """Check the gates of the batch again, by the revisions that are retained now."""
        self.evidence.refresh(self.table)
        wanted = {candidate.path for candidate in batch}
        return [self._candidate(revision) for revision in self.evidence.roots.revisions if revision.path in wanted]

    def _candidate(self, revision: Revision) -> Candidate:
        cache, number = self.evidence.cache, revision.number
        existing = sorted(self._objects.existing.intersection(chain(cache.fragments(number), cache.prefixes(number))))
        gates = (
            Gate(revision.kept is None, revision.kept or "not retained"),
            Gate(not existing, f"{existing[0]} still exists" if existing else "no object exists that only it lists"),
        )
        return Candidate(NamespaceKind.REVISION, revision.path, revision.bytes, 1, gates)


def backlog(table: Namespace) -> Mapping[str, float]:
    """Native: keys pending deletion."""
    return {"pending_keys": len(table.manifest.pending) if table.manifest.dialect == NATIVE else 0}


def plan(table: Namespace, options: ZeppelinGcOptions, context: RunContext) -> ZeppelinGcReport:
    """Report the candidates, and why others are kept. Reads only. Raises: see :func:`apply`."""
    table.check_writable()
    _require_complete(table)
    objects = NamespaceObjects(table, NamespaceEvidence.of(table, options, datetime.now(UTC)))
    report = ZeppelinGcReport(applied=False, warnings=options.dangers())
    return collector.plan([objects, Revisions(objects)], report, options, context)


def apply(table: Namespace, options: ZeppelinGcOptions, context: RunContext) -> ZeppelinGcReport:
    """Delete. Safe to kill, to run twice, and concurrently with writers, readers and compactions.

    Raises:
        UnsupportedFeatureError: only a server can determine what this namespace needs.
        TableCorruptError: a revision or a snapshot cannot be read, so the objects that it needs are unknown.
        FragmentMissingError, FragmentCorruptError, SegmentCorruptError: the live manifest lists an object that is
            missing or cut.
    """
    table.check_writable()
    _require_complete(table)
    probe(table)
    # The grace period of its predecessors counts from the time at which the live manifest is recorded.
    table = recorded(table)
    now = store_time(table.store)
    report = ZeppelinGcReport(applied=True, warnings=options.dangers())
    evidence = NamespaceEvidence.of(table, options, now)
    expiring = [revision.number for revision in evidence.roots.revisions if revision.kept is None]
    with ExitStack() as stack:
        if expiring:
            # A hold that is placed later finds the announcement; one placed earlier is read with the roots.
            stack.enter_context(announced_expiry(table.store, expiring))
        table = _fence(table, evidence)
        evidence.refresh(table)
        if not evidence.roots.revisions:
            raise TableReplacedError("No manifest is recorded any more: the namespace was recreated or restored.")
        newest = evidence.roots.revisions[-1].path
        objects = NamespaceObjects(table, evidence, (anchor_at(table.store, newest, "The newest recorded manifest"),))
        collector.collect([objects, Revisions(objects)], report, options, context)
    if report.replaced is None:
        _settle_pending(table)
        write_ledger(table, evidence.ledger, now)
    return report


def _require_complete(table: Namespace) -> None:
    """Refuse to delete anything while the live manifest lists an object that is missing or cut.

    Timeline of the loss without it: an object of the active segment is deleted by hand; older segments and the
    fragments that were compacted into it still have its rows; they are collected.
    """
    for part in damaged_parts(table):
        if part.has_rows:
            kind: Any = type(part.error)
            raise kind(f"{part.error} Nothing is deleted before that is repaired.", remedy=part.error.remedy)


def _fence(table: Namespace, evidence: NamespaceEvidence) -> Namespace:
    """Put a new token into the manifest if an orphan is old enough to be deleted.

    Timeline without it: A (token 5) uploads S2 and stalls for days; no other process compacts; S2's objects are deleted
    as orphans; A resumes, the manifest still has its token, and it publishes a segment whose objects are gone. The same
    with a writer and its fragment: its compare-and-swap fails once, and then it writes an old fragment again.
    """
    if not evidence.has_old_orphan:
        return table
    try:
        with held_lease(table, DEFAULT_TTL) as lease:
            table = claim(table.newest(), lease)
            evidence.token = lease.token
            return recorded(table)
    except (BusyError, FencedError) as error:
        evidence.busy = str(error)
        return table


def _settle_pending(table: Namespace) -> None:
    """Native: remove keys from ``pending_deletes`` whose objects are gone, by compare-and-swap."""
    table = table.newest()
    if table.manifest.dialect != NATIVE or not table.manifest.pending:
        return
    existing = {meta.path for folder in _LISTED for meta in table.store.list(folder.rstrip("/"))}
    gone = {
        key
        for key in table.manifest.pending
        if key not in existing and (key.startswith(_LISTED) or table.store.head(key) is None)
    }

    def change(table: Namespace) -> Manifest | None:
        rest = [key for key in table.manifest.pending if key not in gone]
        return None if len(rest) == len(table.manifest.pending) else table.manifest.changed(pending=rest)

    retried(table, change)


def _needed(by: str | None) -> Gate:
    return Gate(by is None, by or "neither the live manifest nor a retained revision needs it")


class Why:
    """The job why: every gate of a candidate. Reads only."""

    @staticmethod
    def plan(table: Namespace, options: ZeppelinWhyOptions, context: RunContext | None = None) -> Explanation:
        """Explain ``options.target``: a fragment's key, an object of a segment, a revision's record.

        Raises ``ObjectNotFoundError``: it does not exist, or is not an object that gc collects.
        """
        del context
        objects = NamespaceObjects(table, NamespaceEvidence.of(table, options, datetime.now(UTC)))
        return explain(table, options.target, (objects, Revisions(objects)))

    apply = plan
