"""The snapshot job: one table of all regions' states, inside the MemWAL index, for fast reading.

Six steps (specification, "MemWAL Index Builder"): load the index, list the regions, read each
one's manifest and look for the end of its log, choose where the rows go, keep everything else of
the index, publish. The rows are best effort and may be stale; what must hold is that publishing
them never touches merge progress, configuration or catch-up, whoever else commits at that moment.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.commit import CommitLostError, CommitNote, IndexChange, check_rewritable, commit_indexes
from memwal_ops.core.layout import Layout, region_folder
from memwal_ops.core.leftovers import sweep_leftovers
from memwal_ops.core.regions import NoRegionManifestError, list_region_strays
from memwal_ops.core.snapshots import Known, encode_file, known_regions, read_snapshot, snapshot_path, with_states
from memwal_ops.core.wal import last_wal_entry
from memwal_ops.errors import (
    InvalidFormatError,
    InvalidUsageError,
    MemwalOpsError,
    RegionManifestCorruptError,
    RegionManifestGapError,
    RegionsBlockedError,
)
from memwal_ops.format.memwal_index import with_snapshot
from memwal_ops.format.snapshot_rows import check_fields, region_rows, shard_rows
from memwal_ops.jobs.races import Races
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.core.table import Table
    from memwal_ops.format._pb import memwal_pb2
    from memwal_ops.format.region_manifest import RegionManifest
    from memwal_ops.format.snapshot_rows import Row

DEFAULT_INLINE_THRESHOLD = 100
CONCURRENT_REGIONS = 16
_STRAY = "This belongs to no region; it was left alone."
_UNCLAIMED = "No writer has claimed this region yet: it has no manifest, and nothing else stands in it."


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """What a user may ask of a snapshot.

    Attributes:
        inline_threshold: up to this many regions the rows stand inside the index (S0-104).
    """

    inline_threshold: int = DEFAULT_INLINE_THRESHOLD

    def __post_init__(self) -> None:
        if self.inline_threshold < 0:
            raise InvalidUsageError(f"--inline-threshold must not be below 0, as {self.inline_threshold} is.")


@dataclass(frozen=True, slots=True)
class Skipped:
    """What stands among the regions and is not in the snapshot, by its path below the table's root."""

    path: str
    reason: str
    detail: str
    is_fault: bool

    def to_json(self) -> dict[str, object]:
        """The ``skipped`` entry of a report; ``fault`` is false for what loses nothing."""
        return {"path": self.path, "reason": self.reason, "detail": self.detail, "fault": self.is_fault}


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What a snapshot run did. ``decision`` is one of built, unchanged, dry_run.

    ``stored`` is inline or external: where the rows stand (dry_run: would stand). ``is_current`` is
    false only where a dry run found a snapshot that is missing or behind.
    """

    decision: str
    run_id: str
    num_regions: int
    stored: str
    wal_hints_updated: int
    skipped: tuple[Skipped, ...]
    version: int
    lost_races: int
    seconds: float
    is_current: bool = True

    @property
    def has_faults(self) -> bool:
        """Whether a region could not be read."""
        return any(one.is_fault for one in self.skipped)

    @property
    def exit_code(self) -> int:
        """What the command exits with."""
        return RegionsBlockedError.exit_code if self.has_faults else 0

    def to_json(self) -> dict[str, object]:
        """The document of ``snapshot --json``."""
        return {
            "decision": self.decision,
            "num_regions": self.num_regions,
            "stored": self.stored,
            "current": self.is_current,
            "wal_hints_updated": self.wal_hints_updated,
            "skipped": [one.to_json() for one in self.skipped],
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "lost_races": self.lost_races,
            "run_id": self.run_id,
        }


@dataclass(frozen=True, slots=True)
class _Observation:
    """All regions at one moment, ascending by id; ``specs`` are those by which they were read."""

    taken_millis: int
    regions: tuple[_Region, ...]
    skipped: tuple[Skipped, ...]
    specs: tuple[memwal_pb2.RegionSpec, ...]

    @property
    def hints_updated(self) -> int:
        """Regions whose manifest got another hint."""
        return sum(region.hint_updated for region in self.regions)


@dataclass(frozen=True, slots=True)
class _Region:
    """A region's newest manifest, or its row in the last snapshot where that still holds."""

    region_id: UUID
    state: tuple[int, int | None, int | None]
    source: RegionManifest | Row
    last_wal_id: int
    strays: tuple[str, ...]
    hint_updated: bool = False

    @property
    def lags(self) -> bool:
        """Whether its manifest does not know the end of its log."""
        return self.last_wal_id > (self.state[2] or 0)


def dry_run(table: Table, options: SnapshotOptions) -> SnapshotReport:
    """The report of a snapshot that writes nothing, no hint either: decision ``dry_run``."""
    started = time.monotonic()
    check_rewritable(table)
    seen = _observe(table, update_hints=False)
    return SnapshotReport(
        decision="dry_run",
        run_id=str(uuid.uuid4()),
        num_regions=len(seen.regions),
        stored=_storage(seen, options),
        wal_hints_updated=0,
        skipped=seen.skipped,
        version=table.version,
        lost_races=0,
        seconds=time.monotonic() - started,
        is_current=_stands(table, _rows(table, seen), _storage(seen, options))
        and not any(region.lags for region in seen.regions),
    )


def apply(table: Table, options: SnapshotOptions, *, on_region: Callable[[], None] = lambda: None) -> SnapshotReport:
    """Take a snapshot of all regions and publish it (S0-169 to S0-177).

    Args:
        table: any version of the table; the newest is read again after each lost race.
        options: see :class:`SnapshotOptions`.
        on_region: called as each region has been read, for a progress bar.

    Returns:
        The report. ``unchanged``: the stored snapshot already says all this, and nothing was committed.

    Raises:
        CommitConflictError: too many races for the next version were lost in a row.
        CommitStateUnknownError: the store lost the answer to the commit; run it again.
        UnsupportedFeatureError: a table whose manifest must not be rewritten here.
    """
    started = time.monotonic()
    check_rewritable(table)
    note = CommitNote(job="snapshot", run_id=str(uuid.uuid4()), release=__version__)
    seen = _observe(table, update_hints=True, on_region=on_region)
    hints_updated = seen.hints_updated
    races = Races()
    decision = "unchanged"
    while not _stands(table, rows := _rows(table, seen), _storage(seen, options)):
        if races.lost == 0:
            probe_conditional_writes(table.store)
            sweep_leftovers(table)
        try:
            _publish(table, seen, rows, _storage(seen, options), note)
        except CommitLostError as error:
            table = races.lose(table, error)
            if (table.index.snapshot_ts_millis or 0) >= seen.taken_millis or table.index.region_specs != seen.specs:
                # Another builder looked later than we did: never put older rows over newer ones.
                seen = _observe(table, update_hints=True)
                hints_updated += seen.hints_updated
        else:
            decision = "built"
            table = races.win(table)
            break
    return SnapshotReport(
        decision=decision,
        run_id=note.run_id,
        num_regions=len(seen.regions),
        stored=_storage(seen, options),
        wal_hints_updated=hints_updated,
        skipped=seen.skipped,
        version=table.version,
        lost_races=races.lost,
        seconds=time.monotonic() - started,
    )


def _storage(seen: _Observation, options: SnapshotOptions) -> str:
    return "inline" if len(seen.regions) <= options.inline_threshold else "external"


def _rows(table: Table, seen: _Observation) -> pa.Table:
    sources = [region.source for region in seen.regions]
    if table.layout is Layout.REGION:
        return region_rows(sources, seen.specs)
    return with_states(shard_rows(sources, seen.specs), {region.region_id: region.state for region in seen.regions})


def _stands(table: Table, rows: pa.Table, stored: str) -> bool:
    """Whether the table's snapshot is this one already."""
    try:
        snapshot = read_snapshot(table)
    except InvalidFormatError:
        return False
    return snapshot is not None and snapshot.stored == stored and bool(snapshot.rows.equals(rows))


def _publish(table: Table, seen: _Observation, rows: pa.Table, stored: str, note: CommitNote) -> None:
    data = encode_file(rows)
    new_id = uuid.uuid4()
    details = with_snapshot(
        table.index.details,
        timestamp_millis=seen.taken_millis,
        num_regions=rows.num_rows,
        inline=data if stored == "inline" else None,
    )
    if stored == "external":
        table.store.put(snapshot_path(new_id), data)
    try:
        commit_indexes(table, IndexChange(details, uuid=new_id), note)
    except CommitLostError as error:
        if stored == "external" and error.files_are_ours:
            table.store.delete_many([snapshot_path(new_id)])
        raise


def _observe(table: Table, *, update_hints: bool, on_region: Callable[[], None] = lambda: None) -> _Observation:
    """Read every region, at most :data:`CONCURRENT_REGIONS` at a time.

    Requests: one listing for all regions; for a region that did not move since the last snapshot a
    listing and one HEAD beyond the known end of its log; for any other its manifest as well.
    """
    taken = time.time_ns() // 1_000_000
    # All before any thread starts: whoever is first holds all others up while it looks.
    listing, layout, known = table.regions, table.layout, _known(table)

    def read(region_id: UUID) -> _Region | Skipped:
        try:
            return _read(table, region_id, layout, known.get(region_id))
        except NoRegionManifestError as error:
            if table.region(region_id).is_claimed():
                return _fault(region_id, error)
            return Skipped(region_folder(region_id), "unclaimed", _UNCLAIMED, is_fault=False)
        except (RegionManifestCorruptError, RegionManifestGapError) as error:
            return _fault(region_id, error)
        finally:
            on_region()

    skipped = [
        *(Skipped(path, "stray", _STRAY, is_fault=False) for path in listing.strays),
        *(Skipped(path, "unclaimed", _UNCLAIMED, is_fault=False) for path in listing.empty),
    ]
    regions: list[_Region] = []
    with ThreadPoolExecutor(CONCURRENT_REGIONS) as pool:
        for outcome in pool.map(read, listing.region_ids):
            if isinstance(outcome, Skipped):
                skipped.append(outcome)
            else:
                regions.append(outcome)
                skipped += [Skipped(path, "stray", _STRAY, is_fault=False) for path in outcome.strays]
        if update_hints and any(region.lags for region in regions) and _can_write(table):
            regions = list(pool.map(lambda region: _write_hint(table, region), regions))
    return _Observation(taken, tuple(regions), tuple(skipped), table.index.region_specs)


def _known(table: Table) -> Mapping[UUID, Known]:
    """What the stored snapshot knows of its regions, if its rows have the columns that ours would have."""
    try:
        snapshot = read_snapshot(table)
        if snapshot is None:
            return {}
        build = region_rows if table.layout is Layout.REGION else shard_rows
        if not build([], table.index.region_specs).schema.equals(snapshot.rows.schema):
            return {}
        return known_regions(snapshot)
    except (InvalidFormatError, ValueError):
        return {}


def _read(table: Table, region_id: UUID, layout: Layout, known: Known | None) -> _Region:
    """The region's newest state, and the real end of its log."""
    region = table.region(region_id)
    folder = region.look()
    newest = folder.newest
    moved = known is None or known.version != newest
    strays = folder.strays
    if moved or table.store.root.startswith("/"):
        # On local files it costs nothing; elsewhere one more request, which a region that did not move is spared.
        strays += list_region_strays(table.store, region_id)
    if known is not None and not moved:
        last = last_wal_entry(table.store, region_id, known.replay_after_wal_id, known.wal_id_last_seen, layout)
        if last <= (known.wal_id_last_seen or 0):
            state = (known.version, known.replay_after_wal_id, known.wal_id_last_seen)
            return _Region(region_id, state, known.row, last, strays)
    manifest = region.latest(checked=True) if newest is None else region.read(newest)
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
    """Whether hints may be written; one that cannot is no reason to fail."""
    try:
        probe_conditional_writes(table.store)
    except MemwalOpsError as error:
        get_logger(__name__).info("wal_hints_not_updated", table=table.location.uri, error=str(error))
        return False
    return True


def _write_hint(table: Table, region: _Region) -> _Region:
    """Write down where the region's log ends, if its manifest does not know (S0-172).

    Best effort: the hint saves a reader some requests, nothing depends on it.
    """
    manifest = region.source
    if isinstance(manifest, dict) or not region.lags:
        return region
    better = manifest.next().with_wal_id_last_seen(region.last_wal_id)
    try:
        if table.region(region.region_id).commit(better):
            return _as_read(better, region.last_wal_id, region.strays, hint_updated=True)
    except MemwalOpsError as error:
        get_logger(__name__).info("wal_hint_not_updated", region=str(region.region_id), error=str(error))
    return region


def _fault(region_id: UUID, error: MemwalOpsError) -> Skipped:
    return Skipped(region_folder(region_id), error.reason, f"{error} {error.remedy}", is_fault=True)
