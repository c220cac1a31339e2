"""The gc job: delete what nothing needs any more, and say of everything else what keeps it.

A deletion is the one thing that no later run can mend. So nothing is deleted by a plan: a plan is for
people. ``apply`` proves each batch (at most 1,000 objects) from what is read at that moment, deletes
it, and goes on; whatever became needed since the plan was printed is not in any batch.

Per region, in this order:

1. *drain*: the region manifest drops the generations that nobody needs (put-if-not-exists, so that a
   writer's flush is never overwritten). From now on no new reader finds them.
2. *wait*: ``reader_grace``, by the age of the manifest version that dropped them. Nobody sleeps: a
   later run finds them drained for long enough.
3. *delete* generations and orphans, then WAL entries that no standing generation points into, then
   old manifest versions, the oldest first, so that a run that dies leaves no gap.

Killed anywhere: what was drained is still there and unlisted, what was deleted is gone; the next run
comes to the same end.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.core.catchup_claims import covered_generations
from memwal_ops.core.layout import region_folder
from memwal_ops.core.region_contents import objects_in
from memwal_ops.core.regions import NoRegionManifestError
from memwal_ops.core.retention import Retention
from memwal_ops.errors import (
    DeletesFailedError,
    RegionManifestCorruptError,
    RegionManifestGapError,
    RegionsBlockedError,
)
from memwal_ops.format.names import parse_region_manifest_name
from memwal_ops.jobs.collectables import Gate, Item, Kind, Verdict, unknown
from memwal_ops.jobs.gc_region import RegionView, look_at_region
from memwal_ops.jobs.gc_rules import GcOptions, Rules
from memwal_ops.jobs.gc_table import table_items
from memwal_ops.log import get_logger
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from memwal_ops.core.table import Table

__all__ = ["GcOptions", "GcReport", "apply", "plan", "read_rules", "views"]

_log = get_logger(__name__)
DEFAULT_LIMIT = 100
_CONCURRENT_REGIONS = 16
_BATCH_OBJECTS = 1000
_FRUITLESS = 5
_NOT_DONE = "not deleted, or not as a whole: see failed, or --max-deletes; the next run goes on"
_DRAIN_ATTEMPTS = 8
_DIRECTORIES = {Kind.GENERATION, Kind.ORPHAN}


@dataclass
class GcReport:
    """What a run found and did.

    Attributes:
        decision: planned, nothing_to_delete, drained, deleted, or incomplete (some deletions failed).
        applied: whether it was to delete.
        counts: per kind and verdict how many things.
        bytes_reclaimable: size of what may go, by the proofs of this run.
        deleted_objects: objects that were deleted.
        deleted_bytes: size of the things that were deleted as a whole.
        items: per verdict the first ones, at most ``limit``.
        truncated: whether there were more.
        failed: per path why the store refused.
        drained: generations that region manifests dropped in this run.
        limited: whether ``max_deletes`` ended it.
        faults: per region that cannot be read, why; all of it was kept.
    """

    applied: bool
    limit: int
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    counts: dict[Kind, Counter[Verdict]] = field(default_factory=lambda: defaultdict(Counter))
    bytes_reclaimable: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    items: dict[Verdict, list[Item]] = field(default_factory=lambda: {verdict: [] for verdict in Verdict})
    truncated: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    drained: int = 0
    drainable: int = 0
    limited: bool = False
    regions: int = 0
    sealed: int = 0
    faults: dict[UUID, str] = field(default_factory=dict)
    versions: int = 0
    warnings: tuple[str, ...] = ()
    reader_grace: timedelta = timedelta(0)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        if self.failed:
            return DeletesFailedError.exit_code
        return RegionsBlockedError.exit_code if self.faults else 0

    @property
    def decision(self) -> str:
        """One word for how it ended."""
        if self.failed:
            return "incomplete"
        if self.applied and self.deleted_objects:
            return "deleted"
        if self.applied and self.drained:
            return "drained"
        some = any(counter[Verdict.DELETE] for counter in self.counts.values())
        return "planned" if not self.applied and (some or self.drainable) else "nothing_to_delete"

    def take(self, item: Item, verdict: Verdict | None = None) -> None:
        """Count an item, and keep it where there is room."""
        verdict = verdict or item.verdict
        self.counts[item.kind][verdict] += 1
        if verdict is Verdict.DELETE:
            self.bytes_reclaimable += item.bytes
        self.drainable += item.drain
        if len(self.items[verdict]) < self.limit:
            self.items[verdict].append(item)
        else:
            self.truncated = True

    def to_json(self) -> dict[str, object]:
        """The document of ``gc --json``."""
        return {
            "decision": self.decision,
            "apply": self.applied,
            "counts": {
                kind.value: {verdict.value: self.counts.get(kind, Counter())[verdict] for verdict in Verdict}
                for kind in Kind
                if kind is not Kind.BASE
            },
            "bytes_reclaimable": self.bytes_reclaimable,
            "deleted": {"objects": self.deleted_objects, "bytes": self.deleted_bytes},
            "delete": [item.to_json() for item in self.items[Verdict.DELETE]],
            "held": [item.to_json() for item in self.items[Verdict.HELD]],
            "unknown": [item.to_json() for item in self.items[Verdict.UNKNOWN]],
            "truncated": self.truncated,
            "failed": [{"path": path, "error": why} for path, why in sorted(self.failed.items())],
            "drained": self.drained,
            "limited": self.limited,
            "regions": {
                "total": self.regions,
                "sealed": self.sealed,
                "unreadable": [{"region_id": str(one), "error": why} for one, why in sorted(self.faults.items())],
            },
            "retained_versions": self.versions,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }


def plan(
    table: Table,
    options: GcOptions,
    *,
    limit: int = DEFAULT_LIMIT,
    on_item: Callable[[Item], None] = lambda _: None,
    regions: Iterable[UUID] | None = None,
) -> GcReport:
    """What may go, what is held and by what, what nobody knows. Reads only; memory does not grow with objects.

    Args:
        table: the newest version of it.
        options: see :class:`GcOptions`.
        limit: most items of each verdict in the report.
        on_item: is given every item, as it is found.
        regions: only these, and nothing that belongs to no region.

    Raises:
        StorageError: the store failed.
    """
    started = time.monotonic()
    report = GcReport(applied=False, limit=limit, warnings=options.dangers())
    rules = read_rules(table, options, datetime.now(UTC))
    report.versions = len(rules.retention.versions)
    for item in _items(rules, report, regions):
        report.take(item)
        on_item(item)
    report.seconds = time.monotonic() - started
    return report


def apply(
    table: Table,
    options: GcOptions,
    *,
    limit: int = DEFAULT_LIMIT,
    on_item: Callable[[Item], None] = lambda _: None,
) -> GcReport:
    """Drain and delete. Safe to kill, to run twice and at once, beside writers, readers and all other jobs.

    Args:
        table: any version of it; the newest is read before each batch.
        options: see :class:`GcOptions`.
        limit: most items of each verdict in the report.
        on_item: is given every item, as it is settled.

    Raises:
        StorageError: the store failed before anything could be proven.
    """
    started = time.monotonic()
    probe_conditional_writes(table.store)
    report = GcReport(applied=True, limit=limit, warnings=options.dangers(), reader_grace=options.reader_grace)
    run = _Run(read_rules(table, options, store_time(table.store)), report, on_item)
    report.versions = len(run.rules.retention.versions)
    for view in views(run.rules, report, run.fault):
        run.collect_region(view)
    run.collect_table()
    report.seconds = time.monotonic() - started
    return report


def read_rules(table: Table, options: GcOptions, now: datetime) -> Rules:
    """Everything that proofs rest on, as of now, except the regions."""
    retention = Retention()
    retention.refresh(table, now)
    return Rules(table, retention, covered_generations(table), now, options)


def _items(rules: Rules, report: GcReport, regions: Iterable[UUID] | None) -> Iterator[Item]:
    faults: list[Item] = []
    for view in views(rules, report, faults.append, regions):
        yield from view.items()
    yield from faults
    if regions is None:
        yield from table_items(rules)


def views(
    rules: Rules, report: GcReport, on_fault: Callable[[Item], None], regions: Iterable[UUID] | None = None
) -> Iterator[RegionView]:
    """All regions, read some at a time and not further ahead; those that cannot be read go to ``on_fault``."""
    ids = iter(rules.table.regions.region_ids if regions is None else regions)
    _ = rules.table.layout  # before threads ask for it

    def look(region_id: UUID) -> RegionView | Item | None:
        try:
            return look_at_region(rules, region_id).prepare()
        except NoRegionManifestError as error:
            if not rules.table.region(region_id).is_claimed():
                return None
            return _fault(report, region_id, error)
        except (RegionManifestCorruptError, RegionManifestGapError) as error:
            return _fault(report, region_id, error)

    with ThreadPoolExecutor(_CONCURRENT_REGIONS) as pool:
        while chunk := list(islice(ids, _CONCURRENT_REGIONS)):
            for found in pool.map(look, chunk):
                if found is None:
                    continue
                report.regions += 1
                if isinstance(found, Item):
                    on_fault(found)
                else:
                    report.sealed += found.newest.sealed
                    yield found


def _fault(report: GcReport, region_id: UUID, error: RegionManifestCorruptError | RegionManifestGapError) -> Item:
    report.faults[region_id] = str(error)
    why = f"the region cannot be read, so that all of it is kept: {error}"
    return unknown(region_folder(region_id), 0, why, region_id=region_id)


@dataclass(slots=True)
class _Deleted:
    """What became of some paths: those that are gone, whether any failed, whether ``all`` are gone."""

    paths: set[str] = field(default_factory=set)
    failed: bool = False
    all: bool = False


@dataclass
class _Run:
    """One run of ``apply``: what it knows of the table, and what it did."""

    rules: Rules
    report: GcReport
    on_item: Callable[[Item], None]
    # The store is away, or we may not delete: the rest is for the next run. One object alone may be locked.
    stopped: bool = False
    fruitless: int = 0

    def collect_region(self, view: RegionView) -> None:
        """Drain one region, then delete what may go: directories, then log entries, then manifest versions."""
        try:
            view = self._drain(view)
            self._settle(view.directories(), lambda batch: self._delete(view, batch, view.standing))
            self._settle(view.wal_entries(), lambda batch: self._delete(view, batch, set()))
            self._settle(view.manifests(), lambda batch: self._delete_manifests(view, batch))
            self._settle(view.strays(), lambda batch: self._delete(view, batch, set()))
        except (RegionManifestCorruptError, RegionManifestGapError) as error:
            self._tell(_fault(self.report, view.region_id, error))

    def collect_table(self) -> None:
        """What belongs to no region."""
        self._settle(table_items(self.rules), self._delete_of_table)

    def fault(self, item: Item) -> None:
        """A region that could not be read."""
        self._tell(item)

    # -- drain

    def _drain(self, view: RegionView) -> RegionView:
        """Take what nobody needs off the region manifest's list (S0-060, S0-183); the region as it is then."""
        for _ in range(_DRAIN_ATTEMPTS):
            if self.stopped or not view.drainable():
                return view
            self.rules = self.rules.again()
            view = look_at_region(self.rules, view.region_id)
            generations = view.drainable()
            drained = view.newest.next().without_generations(generations)
            if generations and self.rules.table.region(view.region_id).commit(drained):
                self.report.drained += len(generations)
                _log.info("drained", region=str(view.region_id), generations=list(generations))
                return look_at_region(self.rules, view.region_id)
        # A writer publishes all the time; the next run tries again, and until then the generations are held.
        return view

    # -- delete

    def _settle(self, items: Iterable[Item], delete: Callable[[list[Item]], None]) -> None:
        """Tell what is held; delete what may go in batches."""
        batch: list[Item] = []
        objects = 0
        for item in items:
            if item.verdict is not Verdict.DELETE:
                self._tell(item)
            elif self.stopped or self.report.limited:
                self._keep(item, _NOT_DONE)
            else:
                batch.append(item)
                objects += item.objects
            if objects >= _BATCH_OBJECTS:
                delete(batch)
                batch, objects = [], 0
        if batch:
            delete(batch)

    def _delete(self, view: RegionView, batch: list[Item], standing: set[str]) -> None:
        """Prove each of the batch again from what is read now, and delete those that pass.

        ``standing`` gets the names of directories that are still there afterwards, in whole or in part.
        """
        self.rules = self.rules.again()
        now = view.with_rules(self.rules)
        self._remove([again for item in batch if (again := now.again(item)) is not None], standing)

    def _delete_of_table(self, batch: list[Item]) -> None:
        self.rules = self.rules.again()
        wanted = {item.path for item in batch}
        self._remove([item for item in table_items(self.rules) if item.path in wanted], set())

    def _delete_manifests(self, view: RegionView, batch: list[Item]) -> None:
        """The oldest first, one by one: a version missing between two others would stop every reader that walks."""
        manifests = self.rules.table.region(view.region_id)
        newest = manifests.latest_from(view.newest.version).version
        last = parse_region_manifest_name(batch[-1].path.rsplit("/", 1)[-1]) or 0
        hint = manifests.hint()
        if hint is None or not last < hint <= newest:
            manifests.write_hint(newest)
        for at, item in enumerate(batch):
            before = len(self.report.failed)
            self._remove([item], set())
            if len(self.report.failed) > before:
                for rest in batch[at + 1 :]:
                    self._keep(rest, "an older version could not be deleted, and no gap may come to be")
                return

    def _remove(self, items: Iterable[Item], standing: set[str]) -> None:
        """Delete those that may go; small directories share a request, since many hold a few files."""
        small: list[tuple[Item, list[str]]] = []
        for item in items:
            if item.verdict is not Verdict.DELETE:
                self._tell(item)
            elif item.kind not in _DIRECTORIES:
                small.append((item, [item.path]))
            elif item.objects < _BATCH_OBJECTS:
                small.append((item, list(objects_in(self.rules.table.store, item.path))))
            else:
                self._settled(
                    item, standing, gone=self._delete_paths(objects_in(self.rules.table.store, item.path)).all
                )
        gone = self._delete_paths(path for _, paths in small for path in paths).paths
        for item, paths in small:
            self._settled(item, standing, gone=gone.issuperset(paths))

    def _settled(self, item: Item, standing: set[str], *, gone: bool) -> None:
        if gone:
            self._gone(item)
            return
        if item.kind in _DIRECTORIES:
            standing.add(item.path.rsplit("/", 1)[-1])
        self._keep(item, _NOT_DONE)

    def _delete_paths(self, paths: Iterable[str]) -> _Deleted:
        """Delete as many as the store and ``max_deletes`` allow."""
        deleted = _Deleted()
        rest = iter(paths)
        while not self.stopped:
            chunk = list(islice(rest, self._left()))
            if not chunk:
                deleted.all = not deleted.failed and next(rest, None) is None
                self.report.limited = self.report.limited or (not deleted.all and not deleted.failed)
                break
            outcome = self.rules.table.store.delete_many(chunk)
            self.report.deleted_objects += outcome.deleted
            self.report.failed |= outcome.failed
            deleted.failed = deleted.failed or bool(outcome.failed)
            deleted.paths.update(path for path in chunk if path not in outcome.failed)
            self.fruitless = self.fruitless + 1 if outcome.failed and not outcome.deleted else 0
            self.stopped = self.fruitless >= _FRUITLESS
        return deleted

    def _gone(self, item: Item) -> None:
        self.report.deleted_bytes += item.bytes
        self._tell(item)

    def _left(self) -> int:
        """How many objects may be deleted in one go."""
        most = self.rules.options.max_deletes
        return _BATCH_OBJECTS if most is None else min(_BATCH_OBJECTS, most - self.report.deleted_objects)

    def _keep(self, item: Item, why: str) -> None:
        self._tell(replace(item, gates=(*item.gates, Gate(met=False, text=why))))

    def _tell(self, item: Item) -> None:
        self.report.take(item)
        self.on_item(item)
