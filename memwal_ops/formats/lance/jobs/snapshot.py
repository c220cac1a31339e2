"""The snapshot job: store the state of all regions in the MemWAL index, for fast reading.

Six steps (specification, "MemWAL Index Builder"): load the index, list the regions, read each one's manifest and find
the end of its log, choose where the rows are stored, keep all else in the index, publish. The rows are best effort and
may be stale; the invariant is that publishing them never changes merge progress, configuration or catch-up, even with
concurrent commits.
"""

from __future__ import annotations

import enum
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.errors import InvalidFormatError, MemwalOpsError, RegionManifestCorruptError, RegionsBlockedError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.generations.backlog import with_listed_log
from memwal_ops.formats.lance.generations.region_identity import check_identity
from memwal_ops.formats.lance.generations.wal import last_wal_entry
from memwal_ops.formats.lance.indexes.snapshots import Known, encode_file, known_regions, read_snapshot, snapshot_path
from memwal_ops.formats.lance.options import SnapshotOptions
from memwal_ops.formats.lance.regions.manifests import REGION_FAULTS, NoRegionManifestError, list_region_strays
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.retention.garbage import sweep_leftovers
from memwal_ops.formats.lance.wire.memwal_index import Row, check_fields, with_snapshot
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.log import get_logger
from memwal_ops.storage.api import results_of
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.layouts import Layout
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


class SnapshotDecision(enum.StrEnum):
    """How a snapshot run ended."""

    BUILT = "built"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of ``_mem_wal/`` that the snapshot lacks. ``path`` is below the table's root."""

    path: str
    reason: str
    detail: str
    is_fault: bool

    def to_json(self) -> dict[str, object]:
        """The ``skipped`` entry of a report; ``fault`` is false if the snapshot is complete without it."""
        return document(self, "is_fault", fault=self.is_fault)


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """Report of a snapshot run.

    ``stored`` is inline or external: where the rows are (dry_run: would be) stored. ``is_current`` is
    false only if a dry run found a snapshot that is missing or behind.
    """

    decision: SnapshotDecision
    run_id: str
    num_regions: int
    stored: str
    skipped: tuple[Skipped, ...]
    version: int
    seconds: float
    wal_hints_updated: int = 0
    commit_conflicts: int = 0
    is_current: bool = True

    @property
    def exit_code(self) -> int:
        """10 if a region could not be read."""
        return RegionsBlockedError.exit_code if any(entry.is_fault for entry in self.skipped) else 0

    def to_json(self) -> dict[str, object]:
        """The document of ``snapshot --json``."""
        return document(self, "is_current", current=self.is_current)

    def needs(self) -> Iterator[Need]:
        """What a run would store."""
        if not self.is_current and self.num_regions:
            yield Need("snapshot", f"store {counted(self.num_regions, 'region')}")

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        if self.wal_hints_updated:
            parts.append(f"Updated the hint to the end of the log of {counted(self.wal_hints_updated, 'region')}.")
        for entry in self.skipped:
            mark = "NOT READ" if entry.is_fault else "skipped"
            parts.append(paragraph(f"{mark}: {entry.path} ({entry.reason}). {entry.detail}", hanging="  "))
        return "\n".join(parts)


def _headline(report: SnapshotReport) -> str:
    regions = counted(report.num_regions, "region")
    where = "inside the index" if report.stored == "inline" else "in a file next to the index"
    match report.decision:
        case "built":
            return f"built: {regions}, {where}, as version {report.version}, {report.seconds:.2f} s."
        case "unchanged":
            return f"unchanged: the stored snapshot of {regions} is current; nothing was committed."
        case _:
            if report.is_current:
                return f"dry_run: the stored snapshot of {regions} is current; there is nothing to do."
            return f"dry_run: would store {regions} {where}; nothing was changed."


CONCURRENT_REGIONS = 16
_STRAY = "This is not a part of a region; it was not changed."
_UNCLAIMED = "No writer has claimed this region yet: it has no manifest and no other objects."

__all__ = ["SnapshotOptions", "SnapshotReport", "apply", "backlog", "plan"]


@dataclass(frozen=True, slots=True)
class _Observation:
    """All regions at one time, ascending by id. ``specs`` and ``layout`` are those that they were read with."""

    taken_millis: int
    regions: tuple[_Region, ...]
    skipped: tuple[Skipped, ...]
    specs: tuple[memwal_pb2.RegionSpec, ...]
    layout: Layout

    @property
    def hints_updated(self) -> int:
        """Number of regions with an updated hint in the manifest."""
        return sum(region.hint_updated for region in self.regions)


@dataclass(frozen=True, slots=True)
class _Region:
    """A region's newest manifest, or its row in the last snapshot if that is current."""

    region_id: UUID
    state: tuple[int, int | None, int | None]
    source: RegionManifest | Row
    last_wal_id: int
    strays: tuple[str, ...]
    hint_updated: bool = False

    @property
    def lags(self) -> bool:
        """Whether its manifest's hint is behind the end of its log."""
        return self.last_wal_id > (self.state[2] or 0)


@names_damage
def plan(table: Table, options: SnapshotOptions, context: RunContext | None = None) -> SnapshotReport:
    """Report what a snapshot would store, without writing, hints included: decision ``dry_run``."""
    del context
    note = commit.CommitNote("snapshot")
    commit.check_rewritable(table)
    observed = _observe(table, update_hints=False)
    return SnapshotReport(
        decision=SnapshotDecision.DRY_RUN,
        run_id=note.run_id,
        num_regions=len(observed.regions),
        stored=_storage(observed, options),
        skipped=observed.skipped,
        version=table.version,
        seconds=note.seconds,
        is_current=_is_stored(table, _rows(observed), _storage(observed, options))
        and not any(region.lags for region in observed.regions),
    )


@names_damage
def apply(
    table: Table,
    options: SnapshotOptions,
    context: RunContext | None = None,
    *,
    update_hints: bool = True,
    before_commit: Callable[[Table, commit.IndexChange, bytes], None] = lambda *_: None,
) -> SnapshotReport:
    """Take a snapshot of all regions and publish it (S0-169 to S0-177); ``context`` reports progress per region.

    ``update_hints``: also write the actual end of each region's log into its manifest; after a conflict with another
    builder in any case. ``before_commit``: called right before each attempt to publish, with the version that the
    change is relative to, the change, and the rows as a Lance file.

    Raises ``CommitConflictError``: too many commit conflicts in a row; ``CommitStateUnknownError``: the outcome of the
    commit is unknown; run it again; ``UnsupportedFeatureError``: a table whose manifest must not be rewritten here.
    """
    context = context or RunContext()
    note = commit.CommitNote("snapshot")
    commit.check_rewritable(table)
    observed = _observe(table, context, update_hints=update_hints)
    hints_updated = observed.hints_updated
    retry = CommitRetry()
    decision = SnapshotDecision.UNCHANGED
    while not _is_stored(table, rows := _rows(observed), _storage(observed, options)):
        if retry.conflicts == 0:
            probe_conditional_writes(table.store)
            if table.listed.has_detached:
                sweep_leftovers(table)
        try:
            _publish(table, observed, rows, _storage(observed, options), note, before_commit)
        except commit.CommitLostError as error:
            table = retry.conflict(table, error)
            if (
                (table.index.snapshot_ts_millis or 0) >= observed.taken_millis
                or table.index.region_specs != observed.specs
                or table.layout is not observed.layout
            ):
                # Another builder read the regions later: never replace newer rows with older ones. And if no region
                # had an entry, their layout was not known: the rows of the two layouts differ.
                observed = _observe(table, update_hints=True)
                hints_updated += observed.hints_updated
        else:
            decision = SnapshotDecision.BUILT
            table = retry.landed(table)
            break
    context.figures["conflicts"] += retry.conflicts
    return SnapshotReport(
        decision=decision,
        run_id=note.run_id,
        num_regions=len(observed.regions),
        stored=_storage(observed, options),
        wal_hints_updated=hints_updated,
        skipped=observed.skipped,
        version=table.version,
        commit_conflicts=retry.conflicts,
        seconds=note.seconds,
    )


def _storage(observed: _Observation, options: SnapshotOptions) -> str:
    return "inline" if len(observed.regions) <= options.inline_threshold else "external"


def _rows(observed: _Observation) -> pa.Table:
    sources = {region.region_id: region.source for region in observed.regions}
    states = {region.region_id: region.state for region in observed.regions}
    return observed.layout.snapshot_rows(sources, states, observed.specs)


def _is_stored(table: Table, rows: pa.Table, stored: str) -> bool:
    try:
        snapshot = read_snapshot(table)
    except InvalidFormatError:
        return False
    return snapshot is not None and snapshot.stored == stored and bool(snapshot.rows.equals(rows))


def _publish(
    table: Table,
    observed: _Observation,
    rows: pa.Table,
    stored: str,
    note: commit.CommitNote,
    before_commit: Callable[[Table, commit.IndexChange, bytes], None],
) -> None:
    data = encode_file(rows)
    new_id = uuid.uuid4()
    details = with_snapshot(
        table.index.details,
        timestamp_millis=observed.taken_millis,
        num_regions=rows.num_rows,
        inline=data if stored == "inline" else None,
    )
    change = commit.IndexChange(details, uuid=new_id)
    before_commit(table, change, data)
    written = [snapshot_path(new_id)] if stored == "external" else []
    for path in written:
        table.store.put(path, data)
    with deleted_unless_named(lambda: table.discard(written)):
        commit.commit_indexes(table, change, note)


def _observe(table: Table, context: RunContext | None = None, *, update_hints: bool) -> _Observation:
    """Read every region, at most :data:`CONCURRENT_REGIONS` at a time.

    Requests: one listing for all regions; for a region that is unchanged since the last snapshot one HEAD after the
    known end of its log, and a listing if the log has 1,000 objects or more; for any other its manifest as well.
    """
    taken = time.time_ns() // 1_000_000
    # All are read before any thread starts: the first thread to read one would block the others.
    listed = with_listed_log(table)
    listing, layout, known = listed.regions, listed.layout, _known(table, listed.layout)

    def read(region_id: UUID) -> _Region | Skipped:
        try:
            return _read(listed, region_id, known.get(region_id))
        except NoRegionManifestError as error:
            if listed.region(region_id).is_claimed():
                return _fault(region_id, error)
            return Skipped(region_folder(region_id), "unclaimed", _UNCLAIMED, is_fault=False)
        except REGION_FAULTS as error:
            return _fault(region_id, error)
        finally:
            if context is not None:
                context.advance("reading", "regions", total=len(listing.region_ids))

    skipped = [
        *(Skipped(path, "stray", _STRAY, is_fault=False) for path in listing.strays),
        *(Skipped(path, "unclaimed", _UNCLAIMED, is_fault=False) for path in listing.empty),
    ]
    regions: list[_Region] = []
    for outcome in results_of(read, listing.region_ids, threads=CONCURRENT_REGIONS):
        if isinstance(outcome, Skipped):
            skipped.append(outcome)
        else:
            regions.append(outcome)
            skipped += [Skipped(path, "stray", _STRAY, is_fault=False) for path in outcome.strays]
    if update_hints and any(region.lags for region in regions) and _can_write(table):
        regions = results_of(lambda region: _write_hint(table, region), regions, threads=CONCURRENT_REGIONS)
    return _Observation(taken, tuple(regions), tuple(skipped), table.index.region_specs, layout)


def _known(table: Table, layout: Layout) -> Mapping[UUID, Known]:
    """The regions of the stored snapshot, if its rows have the columns of a new one."""
    try:
        snapshot = read_snapshot(table)
        if snapshot is None:
            return {}
        if not layout.snapshot_rows({}, {}, table.index.region_specs).schema.equals(snapshot.rows.schema):
            return {}
        return known_regions(snapshot)
    except (InvalidFormatError, ValueError):
        return {}


def _read(table: Table, region_id: UUID, known: Known | None) -> _Region:
    region, layout = table.region(region_id), table.layout_of(region_id)
    folder = region.list_page()
    newest = folder.newest
    # A region that was created again since, with as many manifests, has other generations: a reader would follow the
    # row to those that were removed, until the next flush.
    taken = (table.index.snapshot_ts_millis or 0) / 1000
    changed = known is None or known.version != newest or folder.created is None or folder.created.timestamp() > taken
    strays = folder.strays
    if changed or table.store.root.startswith("/"):
        # On local files this is no request; on stores it is one, which an unchanged region does not need.
        strays += list_region_strays(table.store, region_id)
    if known is not None and not changed:
        last = last_wal_entry(table.store, region_id, known.replay_after_wal_id, known.wal_id_last_seen, layout)
        if last <= (known.wal_id_last_seen or 0):
            state = (known.version, known.replay_after_wal_id, known.wal_id_last_seen)
            return _Region(region_id, state, known.row, last, strays)
    manifest = region.latest(checked=True) if newest is None else region.read(newest)
    check_identity(table, manifest)
    try:
        check_fields(manifest, table.index.region_specs)
    except InvalidFormatError as error:
        raise RegionManifestCorruptError(
            f"Region {region_id}: manifest version {manifest.version} has a region field that cannot be read: {error}"
        ) from error
    last = last_wal_entry(table.store, region_id, manifest.replay_after_wal_id, manifest.wal_id_last_seen, layout)
    return _as_read(manifest, last, strays)


def _as_read(manifest: RegionManifest, last: int, strays: tuple[str, ...], *, hint_updated: bool = False) -> _Region:
    state = (manifest.version, manifest.replay_after_wal_id, manifest.wal_id_last_seen)
    return _Region(manifest.region_id, state, manifest, last, strays, hint_updated)


def _can_write(table: Table) -> bool:
    """Whether hints can be written; a failure of the probe is logged and does not fail the run."""
    try:
        probe_conditional_writes(table.store)
    except MemwalOpsError as error:
        get_logger(__name__).info("wal_hints_not_updated", table=table.location.uri, error=str(error))
        return False
    return True


def _write_hint(table: Table, region: _Region) -> _Region:
    """Write the end of the region's log into its manifest, if the hint there is behind (S0-172).

    Best effort: the hint saves readers some requests, and correctness does not depend on it.
    """
    manifest = region.source
    if isinstance(manifest, dict) or not region.lags:
        return region
    updated = manifest.next().with_wal_id_last_seen(region.last_wal_id)
    try:
        if table.region(region.region_id).commit(updated):
            return _as_read(updated, region.last_wal_id, region.strays, hint_updated=True)
    except MemwalOpsError as error:
        get_logger(__name__).info("wal_hint_not_updated", region=str(region.region_id), error=str(error))
    return region


def _fault(region_id: UUID, error: MemwalOpsError) -> Skipped:
    return Skipped(region_folder(region_id), error.reason, f"{error} {error.remedy}", is_fault=True)


def backlog(table: Table) -> Mapping[str, float]:
    """Age of the snapshot in seconds; without a snapshot, seconds since 1970."""
    taken = (table.index.snapshot_ts_millis or 0) / 1000
    return {"snapshot_age": max(0.0, datetime.now(UTC).timestamp() - taken)}
