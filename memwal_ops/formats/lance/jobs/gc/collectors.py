"""The collectors of a Lance table: one for each region, and one for the rest (snapshots, leftovers, probes, strays).

Per region, in this order:

1. *drain*: the region manifest drops the generations that are no longer needed (put-if-absent, so that a
   writer's flush is never overwritten). From now on no new reader finds them.
2. *wait*: ``reader_grace``, by the age of the manifest version that dropped them. The run does not sleep: a
   later run finds them drained for long enough.
3. *delete* generations and orphans, then WAL entries that no remaining generation refers to, then
   old manifest versions, the oldest first, so that a killed run leaves no gap.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.candidates import Gate
from memwal_ops.core.collector import BATCH_OBJECTS, Collector, PartReplacedError, Stage
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError, TableReplacedError
from memwal_ops.formats.lance.files.version_files import CHECKED_MARK, VERSIONS_FOLDER, is_of_checked_commit
from memwal_ops.formats.lance.generations.generation_files import objects_in
from memwal_ops.formats.lance.indexes.snapshots import decode_file
from memwal_ops.formats.lance.jobs.gc.evidence import (
    DIRECTORIES,
    CandidateKind,
    CurrentEvidence,
    GcEvidence,
    LanceCandidate,
    unrecognized,
)
from memwal_ops.formats.lance.jobs.gc.region import RegionView, read_region_view
from memwal_ops.formats.lance.jobs.gc.wal import WalView
from memwal_ops.formats.lance.regions.manifests import REGION_FAULTS, NoRegionManifestError
from memwal_ops.formats.lance.retention.garbage import find_leftovers
from memwal_ops.formats.lance.retention.identity import region_anchor
from memwal_ops.formats.lance.wire import names
from memwal_ops.log import get_logger
from memwal_ops.storage import api, clock, local, probe
from memwal_ops.storage.external_manifests import MOVED, is_staged, manifest_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memwal_ops.core.anchors import Anchor, CommitGuard
    from memwal_ops.storage.api import DeleteReport, ObjectMeta


_SNAPSHOT = re.compile(rf"{names.INDICES_FOLDER}/([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})/index\.lance")
_OPS_FOLDER = "_mem_wal_ops"
# A probe takes seconds. If its objects were deleted meanwhile, it would report a store that loses writes.
_PROBE_AGE = timedelta(hours=1)
_REGION_COLUMNS = {"region_id", "shard_id"}


def table_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """All candidates that do not belong to a region, lazily."""
    yield from snapshot_candidates(evidence)
    yield from leftover_candidates(evidence)
    yield from staged_candidates(evidence)
    yield from unchecked_candidates(evidence)
    yield from own_candidates(evidence)
    for path in evidence.table.regions.strays:
        yield unrecognized(path, 0, f"not a region, although it is in {names.MEM_WAL_FOLDER}/; it is kept")
    for path, why in evidence.retention.unreadable.items():
        yield unrecognized(path, 0, f"this version cannot be read, so that everything that it may need is kept: {why}")


def snapshot_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Files of region snapshots; all else in ``_indices/`` belongs to pylance and is not read."""
    for meta in evidence.table.store.list(names.INDICES_FOLDER):
        match = _SNAPSHOT.fullmatch(meta.path)
        if match is not None and (candidate := _snapshot_candidate(evidence, meta, UUID(match[1]))) is not None:
            yield candidate


def _snapshot_candidate(evidence: GcEvidence, meta: ObjectMeta, uuid: UUID) -> LanceCandidate | None:
    gates: tuple[Gate, ...]
    if evidence.retention.names_index(uuid):
        gates = (Gate(met=False, text="a version that may be opened names it"),)
    else:
        try:
            rows = decode_file(evidence.table.store.get(meta.path))
        except ObjectNotFoundError:
            return None
        except InvalidFormatError as error:
            return unrecognized(meta.path, meta.size, f"this may be a region snapshot, but it cannot be read: {error}")
        if not _REGION_COLUMNS.intersection(rows.schema.names):
            return None
        gates = (
            Gate(met=True, text="a region snapshot that no version, tag or branch names"),
            evidence.unfinished_gate(meta.last_modified),
        )
    return LanceCandidate(CandidateKind.SNAPSHOT, meta.path, meta.size, 1, gates)


def leftover_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Detached manifests: those of memwal-ops with their transaction files, and those of other programs."""
    protected = evidence.retention.protected()
    for leftover in find_leftovers(evidence.table):
        meta = leftover.manifest
        if leftover.job is None:
            why = "a detached version that memwal-ops did not create; a reader with its number may open it"
            yield unrecognized(meta.path, meta.size, why)
            continue
        keeper = protected.get(leftover.version)
        gates = (
            Gate(met=True, text=f"left by a {leftover.job} (run {leftover.run_id}) that was killed while it committed"),
            Gate(met=keeper is None, text="no tag, branch or hold names it" if keeper is None else f"kept by {keeper}"),
            evidence.unfinished_gate(meta.last_modified),
        )
        path = leftover.transaction
        if path is not None and (file := evidence.table.store.head(path)) is not None:
            yield LanceCandidate(CandidateKind.LEFTOVER, path, file.size, 1, gates)
        yield LanceCandidate(CandidateKind.LEFTOVER, meta.path, meta.size, 1, gates)


def staged_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Staged manifests of a table whose versions are, or were, recorded in DynamoDB: those of commits that lost."""
    store, listed = evidence.table.store, evidence.table.listed
    entries = manifest_entries(store)
    if entries is None and not listed.has(f"{VERSIONS_FOLDER}/{MOVED}"):
        return
    for meta in store.list(VERSIONS_FOLDER):
        if not is_staged(meta.path):
            continue
        why = None if entries is None else entries.why_staged(meta.path)
        text = "a staged manifest: another commit has its version, or the table was migrated" if why is None else why
        gates = (Gate(met=why is None, text=text), evidence.unfinished_gate(meta.last_modified, "written"))
        yield LanceCandidate(CandidateKind.LEFTOVER, meta.path, meta.size, 1, gates)


def unchecked_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Staged manifests of compactions that were killed before the version was checked; no version names them."""
    store, listed, scheme = evidence.table.store, evidence.table.listed, evidence.table.location.scheme
    by_dynamodb = manifest_entries(store) is not None or listed.has(f"{VERSIONS_FOLDER}/{MOVED}")
    if by_dynamodb or (scheme == "s3" and not listed.has(CHECKED_MARK)):
        return
    for meta in listed.files if listed.complete else store.list(VERSIONS_FOLDER):
        if is_staged(meta.path) and is_of_checked_commit(store, meta.path):
            name = names.parse_version_manifest_name(f"{meta.path.rpartition('/')[2].partition('.')[0]}.manifest")
            passed = name is not None and name.version <= evidence.table.version
            gates = (
                Gate(met=True, text="staged by a compaction that was killed before it was checked"),
                Gate(met=passed, text="the table is at its version, or a later one"),
                evidence.unfinished_gate(meta.last_modified),
            )
            yield LanceCandidate(CandidateKind.LEFTOVER, meta.path, meta.size, 1, gates)


def own_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Objects of memwal-ops: the quarantine, and those of killed jobs that read the store's clock or probed writes."""
    age = max(evidence.options.orphan_min_age, _PROBE_AGE)
    store = evidence.table.store
    folders = store.list_level(_OPS_FOLDER).directories
    if QUARANTINE_FOLDER in folders:
        yield from quarantine_candidates(evidence)
    for folder in sorted({clock.CLOCK_FOLDER, probe.PROBE_FOLDER}.intersection(folders)):
        for meta in store.list(folder):
            gates = (
                Gate(met=True, text="written by a job that probed the store and was killed"),
                evidence.age_gate("a probe may be running: written", meta.last_modified, age),
            )
            yield LanceCandidate(CandidateKind.LEFTOVER, meta.path, meta.size, 1, gates)


def quarantine_candidates(evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """Objects that repairs replaced: always kept, since an operator may undo the repair."""
    for meta in evidence.table.store.list(QUARANTINE_FOLDER):
        name = meta.path.removeprefix(f"{QUARANTINE_FOLDER}/").partition("/")[0]
        why = f"memwal-ops repair URI --undo {name} needs it; delete the folder yourself when it is not needed"
        yield LanceCandidate(CandidateKind.QUARANTINE, meta.path, meta.size, 1, (Gate(met=False, text=why),))


_log = get_logger(__name__)
_CONCURRENT_REGIONS = 16
_DRAIN_ATTEMPTS = 8
_NO_GAP = "an older version could not be deleted, and versions must not have a gap"


def views(
    evidence: GcEvidence, regions: Iterable[UUID] | None = None
) -> Iterator[tuple[UUID, WalView | MemwalOpsError]]:
    """All regions, read in chunks and not further ahead; or the error of one that cannot be read."""
    ids = evidence.table.regions.region_ids if regions is None else regions
    _ = evidence.table.layout  # read once, before the threads use it

    def read(region_id: UUID) -> tuple[UUID, WalView | MemwalOpsError | None]:
        try:
            return region_id, WalView(read_region_view(evidence, region_id)).prepare()
        except NoRegionManifestError as error:
            return region_id, error if evidence.table.region(region_id).is_claimed() else None
        except REGION_FAULTS as error:
            return region_id, error

    for _, (region_id, log) in api.concurrently(read, ids, threads=_CONCURRENT_REGIONS):
        if log is not None:
            yield region_id, log


class RegionCollector(Collector[LanceCandidate]):
    """Collects one region.

    ``current``: of the run. ``region_id``: the region. ``log``: the region with its log, or the error with which it
    cannot be read.
    """

    part: UUID

    def __init__(self, current: CurrentEvidence, region_id: UUID, log: WalView | MemwalOpsError) -> None:
        """Keep the arguments; nothing is read."""
        self.current, self.part, self.store = current, region_id, current.evidence.table.store
        self._log = log
        self._drained = self._fenced = False
        self._anchor: Anchor | None = None
        self._directories = local.FolderListings(self.store, names.region_folder(region_id))

    @property
    def anchors(self) -> Sequence[Anchor]:
        """The table's, and after the first batch the region's too."""
        return self.current.anchors if self._anchor is None else (*self.current.anchors, self._anchor)

    @property
    def log(self) -> WalView:
        """The region with its log. Raises the error with which it cannot be read."""
        if isinstance(self._log, MemwalOpsError):
            raise self._log
        return self._log

    @property
    def view(self) -> RegionView:
        """The region without its log."""
        return self.log.view

    def unreadable(self, error: MemwalOpsError) -> LanceCandidate | None:
        """The region as one unrecognized candidate: all of it is kept if it cannot be read."""
        if not isinstance(error, REGION_FAULTS):
            return None
        why = f"the region cannot be read, so that all of it is kept: {error}"
        return unrecognized(names.region_folder(self.part), 0, why, region_id=self.part)

    def drain(self) -> int:
        """Take generations that are no longer needed off the region manifest's list (S0-060, S0-183)."""
        for _ in range(_DRAIN_ATTEMPTS):
            if not self.view.drainable():
                return 0
            self.current.renew()
            self._log = WalView(read_region_view(self.current.evidence, self.part))
            generations = self.view.drainable()
            drained = self.view.newest.next().without_generations(generations)
            # Timeline without this check: all generations are read as merged; the table is created again; the new
            # table's unmerged generations are removed from the list.
            check = self.current.check
            if generations and self.current.evidence.table.region(self.part).commit(drained, check=check):
                _log.info("drained", region=str(self.part), generations=list(generations))
                self._drained = True
                return len(generations)
        # A writer keeps publishing; the next run tries again, and until then the generations are held.
        return 0

    def stages(self) -> Iterator[Stage[LanceCandidate]]:
        """The deletions in the order of the module's docstring; strays last."""
        if self._drained:
            self._log = WalView(read_region_view(self.current.evidence, self.part))
        yield Stage(self.view.directories())
        yield Stage(self.log.entries())
        yield Stage(self.view.manifests(), in_order=_NO_GAP)
        yield Stage(self.view.strays())

    def revalidate(self, batch: Sequence[LanceCandidate]) -> Iterator[LanceCandidate]:
        """Check the gates again by the current evidence and region manifest; the listing is that of the view."""
        self.current.renew()
        with self._of_one_table():
            self._fence_flushes(batch)
            view = self._renewed()
        if batch[0].kind is CandidateKind.REGION_MANIFEST:
            self._point_past(batch[-1], view.newest.version)
        log = self.log.under(view)
        judged = (
            log.revalidate(candidate) if candidate.kind is CandidateKind.WAL_ENTRY else view.revalidate(candidate)
            for candidate in batch
        )
        return (candidate for candidate in judged if candidate is not None)

    def objects(self, candidate: LanceCandidate) -> Iterable[tuple[str, int]]:
        """The objects of a candidate. Directories are listed again, so objects that were added since are deleted too.

        Small directories share a listing, of which a page may be older than the proof of their batch. It is never older
        than the region's anchor, which is checked after it and right before the deletion: so it is of the same region.
        Objects that are added to a directory after its listing are orphans for the next run.
        """
        if candidate.kind not in DIRECTORIES:
            return super().objects(candidate)
        if candidate.objects >= BATCH_OBJECTS:
            return objects_in(self.store, candidate.path)
        return self._directories.objects(candidate.path, candidate.objects).items()

    def delete(self, paths: Sequence[str], guard: CommitGuard) -> DeleteReport:
        """See the base class."""
        with self._of_one_table():
            return super().delete(paths, guard)

    def not_deleted(self, candidate: LanceCandidate) -> None:
        """Keep the WAL entries to which a generation refers that was not completely deleted."""
        if candidate.kind in DIRECTORIES:
            self.view.undeleted.add(candidate.name)

    @contextmanager
    def _of_one_table(self) -> Iterator[None]:
        """Raise ``PartReplacedError`` if only the region may have been replaced: the rest of the table is collected."""
        try:
            yield
        except TableReplacedError as error:
            self.current.check()
            raise PartReplacedError(str(error)) from error

    def _renewed(self) -> RegionView:
        table = self.current.evidence.table
        previous = self._anchor or region_anchor(table, self.view.newest)
        view = self.view.with_evidence(self.current.evidence)
        self._anchor = previous
        if table.region(self.part).path(view.newest.version) != previous.meta.path:
            self._anchor = region_anchor(table, view.newest)
            previous.check(self.store)
        return view

    def _fence_flushes(self, batch: Sequence[LanceCandidate]) -> None:
        """Publish a manifest version after the listing, once, before orphans are deleted that a flush may publish.

        A flush publishes its directory as the version after the one that it read before it wrote the directory, by
        put-if-absent. Timeline without this: a writer writes a directory, and is suspended for days; gc deletes it as
        an orphan; the writer resumes, and the manifest that it publishes lists it.
        """
        newest = self.view.newest
        if self._fenced or not any(
            candidate.kind is CandidateKind.ORPHAN and (candidate.generation or 0) >= newest.current_generation
            for candidate in batch
        ):
            return
        # False: another process published that version after the listing, which serves as well.
        self.current.evidence.table.region(self.part).commit(newest.next(), check=self.current.check)
        self._fenced = True

    def _point_past(self, last: LanceCandidate, newest: int) -> None:
        """Make the hint name a version that is kept, before versions are deleted that it may name."""
        manifests = self.current.evidence.table.region(self.part)
        hint = manifests.hint()
        if hint is None or not (names.parse_region_manifest_name(last.name) or 0) < hint <= newest:
            # Otherwise, if the region was created again, the hint would name a version that it lacks: a permanent gap.
            with self._of_one_table():
                for anchor in self.anchors:
                    anchor.check(self.store)
            manifests.write_hint(newest)


def regions_without_index(regions: Iterable[UUID] | None, evidence: GcEvidence) -> Iterator[LanceCandidate]:
    """The regions (None: all) of a table without its MemWAL index: they are kept until it is made again."""
    table = evidence.table
    why = f"the MemWAL index was removed after version {table.index_removed_after}: kept for when it is made again"
    for region_id in table.regions.region_ids if regions is None else regions:
        yield unrecognized(names.region_folder(region_id), 0, why, region_id=region_id)


class TableCollector(Collector[LanceCandidate]):
    """Collects objects of the table as a whole: what ``candidates`` finds."""

    def __init__(self, current: CurrentEvidence, candidates: Callable[[GcEvidence], Iterator[LanceCandidate]]) -> None:
        """Keep the arguments; nothing is read."""
        self.current, self.store, self._candidates = current, current.evidence.table.store, candidates

    @property
    def anchors(self) -> Sequence[Anchor]:
        """The table's."""
        return self.current.anchors

    def stages(self) -> Iterator[Stage[LanceCandidate]]:
        """One stage with all candidates."""
        yield Stage(self._candidates(self.current.evidence))

    def revalidate(self, batch: Sequence[LanceCandidate]) -> Iterator[LanceCandidate]:
        """List the candidates again, with their gates."""
        self.current.renew()
        wanted = {candidate.path for candidate in batch}
        return (candidate for candidate in self._candidates(self.current.evidence) if candidate.path in wanted)
