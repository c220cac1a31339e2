"""The report of an inspection, as a document and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.documents import document
from memwal_ops.core.outlook import NextRun, describe_next_run
from memwal_ops.core.registry import MAIN
from memwal_ops.errors import MemwalOpsError, NoMemWalIndexError
from memwal_ops.formats.lance.generations.wal import MOST_READ
from memwal_ops.formats.lance.indexes.snapshots import is_external
from memwal_ops.formats.lance.layouts import MixedLayoutsError
from memwal_ops.text import counted, grid, known_sum, paragraph, printable, size_text, span_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.core.protocols import TableBranch
    from memwal_ops.formats.lance.generations.backlog import Backlog, BlockedRegion, RegionBacklog
    from memwal_ops.formats.lance.indexes.index_faults import IndexFault
    from memwal_ops.formats.lance.retention.damage import VersionsCheck
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration


@dataclass(frozen=True, slots=True)
class BranchState:
    """A branch.

    Attributes:
        record: as the root has it.
        version: its newest version, published when it was ``written``; None: none is listed.
        stale: whether that is longer ago than asked.
        bytes: of a stale one, the size of all objects below its folder.
        kept_bytes: of a stale one, the size of data files of other branches that its newest version needs, and the
            newest version of main does not.
    """

    record: TableBranch
    version: int | None
    versions: int
    written: datetime | None
    stale: bool
    bytes: int | None = None
    kept_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        """The entry of ``branches``; times as of ISO 8601."""
        root = document(self.record, "parent_revision", parent=self.record.parent or MAIN)
        return root | {"parent_version": self.record.parent_revision} | document(self, "record")


def describe_branches(branches: Sequence[BranchState], version: int) -> Iterator[str]:
    """The tree, and a paragraph for each stale branch."""
    if branches:
        yield f"\nbranches:\n  {MAIN}, version {version}"
    yield from _tree(branches, None, 2)
    for one in branches:
        if not one.stale:
            continue
        when = one.written or one.record.created
        holds = f"version {one.record.parent_revision} of {one.record.parent or MAIN}"
        if one.bytes is not None:
            holds += f", {size_text(one.bytes)} of its own"
        if one.kept_bytes:
            holds += f", and {size_text(one.kept_bytes)} of files that {MAIN} does not need"
        text = f"STALE: branch {one.record.name}: nobody wrote to it since {when:%Y-%m-%d %H:%M} UTC; it holds {holds}."
        yield paragraph(text, hanging="  ")


def _tree(branches: Sequence[BranchState], parent: str | None, depth: int) -> Iterator[str]:
    names = {one.record.name for one in branches}
    for one in branches:
        record = one.record
        lost = parent is None and record.parent is not None and record.parent not in names
        if record.parent != parent and not lost:
            continue
        left = f"left version {record.parent_revision} of {record.parent or MAIN}"
        versions = f"at version {one.version}, with {counted(one.versions, 'version')}"
        yield f"{'  ' * depth}{record.name}, {left}: {'no version is listed' if one.version is None else versions}"
        yield from _tree(branches, record.name, depth + 1)


_SHOWN = 5
_RISK = (
    "If a merge of theirs begins before one of ours and ends after it, it puts older rows over newer ones: "
    "docs/compatibility.md."
)
_FOREIGN = "memwal-ops adopt --moved; runbooks/errors/65-foreign_root.md"
# If not all generations fit the limit, the first ones in this order are reported.
STATES = ("missing", "damaged", "pending", "merged")


@dataclass(frozen=True, slots=True)
class GenerationState:
    """One listed generation.

    ``state``: pending; merged; missing (not merged, and without a directory); damaged (not merged, with a manifest that
    does not decode, or a file that is missing or has another size).
    """

    flushed: FlushedGeneration
    state: str

    def to_json(self) -> dict[str, object]:
        """The ``generations`` entry; ``rows`` and ``bytes`` are null if the writer did not record them."""
        ref = self.flushed
        named = {"generation": ref.generation, "path": ref.path}
        return named | {"rows": ref.physical_rows, "bytes": ref.accounted_bytes, "state": self.state}


@dataclass(frozen=True, slots=True)
class InspectedRegion:
    """One region, and the first fault that blocks it.

    ``unflushed_wal_entries``: entries of its log after the last flushed one, including those with which a writer
    claims the region; None if its manifest cannot be read, or it is left over. ``counts``: per state how many
    generations the region lists, of which ``generations`` are the first. ``foreign_root``: another path that an
    unmerged generation names as its table.
    """

    region_id: UUID
    backlog: RegionBacklog | None
    counts: Mapping[str, int]
    generations: tuple[GenerationState, ...]
    unflushed_wal_entries: int | None
    fault: BlockedRegion | None
    foreign_root: str | None = None

    @property
    def is_left_over(self) -> bool:
        """Whether it belongs to a table that was at this place before: what of it is merged is not known."""
        return self.fault is not None and isinstance(self.fault.error, NoMemWalIndexError)

    @property
    def truncated(self) -> bool:
        """Whether the region lists more than ``generations``."""
        return sum(self.counts.values()) > len(self.generations)

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry."""
        manifest = None if self.backlog is None else self.backlog.manifest
        names = ("writer_epoch", "current_generation", "replay_after_wal_id", "wal_id_last_seen")
        return document(
            self,
            *("backlog", "counts", "fault"),
            spec_id=None if manifest is None else manifest.region_spec_id,
            status="unreadable" if manifest is None else manifest.status.name.lower(),
            manifest_version=None if manifest is None else manifest.version,
            **{name: None if manifest is None else getattr(manifest, name) for name in names},
            merged_generation=None if self.backlog is None or self.is_left_over else self.backlog.merged,
            generation_counts={state: self.counts.get(state, 0) for state in STATES},
            truncated=self.truncated,
            error=self.fault,
        )


@dataclass(frozen=True, slots=True)
class IndexState:
    """One base index and its covered fragments. ``fault``: why it may lack rows of them."""

    name: str
    type: str
    covered_fragments: int
    uncovered_fragments: int
    uncovered_rows: int
    index_catchup: Mapping[UUID, int]
    fault: IndexFault | None

    def to_json(self) -> dict[str, object]:
        """The ``indexes`` entry."""
        fault = None if self.fault is None else f"It {self.fault.why}."
        return document(self, "fault", caught_up=self.uncovered_fragments == 0, problem=fault)


@dataclass(frozen=True, slots=True)
class DroppedIndexes:
    """Indexes that an overwrite dropped. The ``version`` that it made, and their names."""

    version: int
    indexes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MergedElsewhere:
    """Another program that merges the table, too, and by region the keys of which it put older rows over newer ones."""

    program: str
    overwritten: Mapping[str, tuple[str, ...]]

    def problems(self) -> Iterator[str]:
        """What happened to which keys, and what to do."""
        for region_id, keys in self.overwritten.items():
            shown = ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
            text = (
                f"PROBLEM: the base table has older rows of {counted(len(keys), 'key')} than region {region_id} had: "
                f"{shown}. {self.program} read them before a merge, and wrote them after it (docs/compatibility.md). "
                "Let the region's writer write them again; until then, gc keeps the region's log and generations."
            )
            yield paragraph(text)


@dataclass(frozen=True, slots=True)
class TableInspection:
    """The report of ``inspect`` for one version.

    ``dropped``: by fragment the bytes of dropped columns, where it has any; None: that cannot be read.
    """

    table: Table
    rows: int
    fragments: int
    regions: tuple[InspectedRegion, ...]
    indexes: tuple[IndexState, ...]
    backlog: Backlog
    versions: VersionsCheck
    limit: int
    last_writer: str | None
    branches: tuple[BranchState, ...] = ()
    next_runs: Mapping[str, NextRun] = field(default_factory=dict)
    dropped: Mapping[int, int | None] = field(default_factory=dict)
    dropped_indexes: DroppedIndexes | None = None
    merged_elsewhere: MergedElsewhere | None = None

    decision = "inspected"
    exit_code = 0

    @property
    def faults(self) -> tuple[BlockedRegion, ...]:
        """The faults of the regions that have one."""
        return tuple(region.fault for region in self.regions if region.fault is not None)

    @property
    def dropped_column_bytes(self) -> int | None:
        """About the size of dropped columns in data files; None: it is not known."""
        known = [size for size in self.dropped.values() if size is not None]
        return sum(known) if len(known) == len(self.dropped) else None

    @property
    def layout(self) -> tuple[str, str]:
        """The name of the layout, and its title."""
        try:
            return self.table.layout.name, self.table.layout.title
        except MixedLayoutsError:  # it is among the faults
            return "mixed", "two layouts in one log"

    @property
    def most_data_files(self) -> int:
        """The number of data files of the fragment that has the most."""
        return max((len(one.files) for one in self.table.manifest.manifest.fragments), default=0)

    def to_json(self) -> dict[str, object]:
        """The document of ``inspect --json``."""
        index = self.table.index
        stored = "none"
        if _has_snapshot(self.table):
            stored = "external" if is_external(self.table) else "inline"
        return {
            "uri": self.table.location.uri,
            "layout": self.layout[0],
            "branch": self.table.branch_name or MAIN,
            "branches": [branch.to_json() for branch in self.branches],
            "version": self.table.version,
            "rows": self.rows,
            "fragments": self.fragments,
            "dropped_column_bytes": self.dropped_column_bytes,
            "most_data_files": self.most_data_files,
            "indexes_dropped": None if self.dropped_indexes is None else document(self.dropped_indexes),
            "primary_key": list(self.table.primary_key),
            "last_writer": self.last_writer,
            "merged_elsewhere": None if self.merged_elsewhere is None else document(self.merged_elsewhere),
            "regions": [region.to_json() for region in self.regions],
            "indexes": [index.to_json() for index in self.indexes],
            "snapshot": {
                "timestamp_millis": index.snapshot_ts_millis,
                "num_regions": index.num_regions,
                "stored": stored,
            },
            "backlog": self.backlog.to_json(),
            "next_runs": {name: run.to_json() for name, run in self.next_runs.items()},
            "versions": self.versions.to_json(),
            "strays": list(self.table.regions.strays[: self.limit]),
            "truncated": len(self.table.regions.strays) > self.limit
            or any(region.truncated for region in self.regions),
        }

    def describe(self) -> str:
        """The inspection as text for people."""
        table = self.table
        kind = self.layout[1] if table.branch_name is None else f"branch {table.branch_name}, {self.layout[1]}"
        about = (
            f"{kind}, version {table.version}, {counted(self.rows, 'row')} in "
            f"{counted(self.fragments, 'fragment')}, primary key {', '.join(table.primary_key) or 'none'}"
        )
        lines = [table.location.uri, paragraph(about, indent="  ")]
        if self.last_writer is not None:
            lines.append(paragraph(f"Last written by {self.last_writer}.", indent="  "))
        if (other := self.merged_elsewhere) is not None:
            lines.append(paragraph(f"Another program ({other.program}) merges it, too. {_RISK}", indent="  "))
        if table.log.shows_progress:
            lines += [paragraph(_how_far_behind(self), indent="  "), paragraph(_snapshot(self), indent="  ")]
        else:
            lines.append(paragraph(_without_index(table), indent="  "))
        if unflushed := sum(region.unflushed_wal_entries or 0 for region in self.regions):
            most = max(region.unflushed_wal_entries or 0 for region in self.regions)
            read = f" Of a region, the first {MOST_READ} were looked at." if most > MOST_READ else ""
            entries = counted(unflushed, "log entry", "log entries")
            lines.append(f"  {entries} not flushed yet: only writers flush them.{read}")
        if self.regions:
            lines += ["", _regions(self)]
        if self.indexes:
            lines += ["", _indexes(self)]
        lines += [*_columns(self), *_next_runs(self)]
        for index in self.indexes:
            if index.fault is not None:
                lines += ["", paragraph(f"PROBLEM: index {index.name} {index.fault.why} (memwal-ops verify).")]
        lines += [*_problems(self), *describe_branches(self.branches, table.version)]
        if unreadable := self.versions.unreadable:
            lines += ["", paragraph(_unreadable(unreadable))]
        for stray in table.regions.strays[: self.limit]:
            lines += ["", f"Stray, not a region: {printable(stray)}"]
        if (more := len(table.regions.strays) - self.limit) > 0:
            lines += ["", f"and {more:,} more strays (--limit)."]
        return "\n".join(lines)


def _next_runs(inspection: TableInspection) -> list[str]:
    described = [(name, describe_next_run(run.to_json())) for name, run in inspection.next_runs.items()]
    lines = [paragraph(f"The next {name}: {text}.", indent="  ", hanging="  ") for name, text in described]
    return ["", *lines] if lines else []


def _columns(inspection: TableInspection) -> list[str]:
    """What data files have of columns that are gone, and in how many files the columns of a fragment are."""
    lines = []
    if inspection.dropped:
        gone = inspection.dropped_column_bytes
        size = "An unknown part" if gone is None else f"About {size_text(gone)}"
        lines.append(f"{size} of its data files is of dropped columns (memwal-ops compact leaves them out).")
    if inspection.most_data_files > 1:
        lines.append(f"A fragment has up to {inspection.most_data_files:,} data files: columns that were added later.")
    return ["", *(paragraph(line, indent="  ", hanging="  ") for line in lines)] if lines else []


def _problems(inspection: TableInspection) -> list[str]:
    table, lines = inspection.table, list[str]()
    if (lost := inspection.dropped_indexes) is not None:
        names = ", ".join(lost.indexes)
        text = f"PROBLEM: version {lost.version} overwrote the table and dropped its indexes: {names}."
        lines += ["", paragraph(f"{text} Queries read all rows since: create them again.")]
    if inspection.merged_elsewhere is not None:
        lines += [line for text in inspection.merged_elsewhere.problems() for line in ("", text)]
    for root in sorted({region.foreign_root for region in inspection.regions if region.foreign_root is not None}):
        lines += ["", paragraph(f"Generations name {root} as their table. Jobs read them here ({_FOREIGN}).")]
    if table.refusal is not None:
        lines += ["", paragraph(f"PROBLEM: {table.refusal}"), paragraph(_way_out(table, table.refusal), indent="    ")]
    for region in inspection.regions:
        if region.fault is not None and not region.is_left_over:
            lines += ["", region.fault.describe("PROBLEM in")]
    if (newest := inspection.versions.newest) is not None:
        needed = "them" if newest.of else "it"
        lines += ["", paragraph(f"PROBLEM: {newest.what}, and the newest version needs {needed}.")]
        lines.append(paragraph(f"What to do: {newest.remedy} (runbooks/errors/09-table_corrupt.md)", indent="    "))
    return lines


def _way_out(table: Table, refusal: MemwalOpsError) -> str:
    last = table.history.last_with_index()
    found = "No version that exists has" if last is None else f"Version {last} is the last one that has"
    return f"What to do: {refusal.remedy} {found} a MemWAL index. (runbooks/errors/05-no_memwal_index.md)"


def _without_index(table: Table) -> str:
    if not table.regions.region_ids:
        return "It has no log: the base table has all rows."
    if table.refusal is not None:
        return f"{counted(len(table.regions.region_ids), 'region is', 'regions are')} left over in its log, see below."
    return (
        f"Its MemWAL index was removed after version {table.index_removed_after}. The log of "
        f"{counted(len(table.regions.region_ids), 'region')} is kept, and not shown: merge continues with it once the "
        "index is made again (memwal-ops init; lancedb: set_lsm_write_spec; pylance: initialize_mem_wal)."
    )


def _unreadable(versions: Mapping[int, str]) -> str:
    version, path = min(versions.items())
    return (
        f"PROBLEM: {counted(len(versions), 'version')} of the base table cannot be read, the first is {version}: "
        f"{path} is missing. A clean-up was killed, or files were deleted by hand (runbooks/errors/26-version_gone.md)."
    )


def _how_far_behind(inspection: TableInspection) -> str:
    if gone := inspection.table.regions_gone:
        return f"PROBLEM: what {counted(gone, 'region')} had not merged is lost, without a folder (memwal-ops verify)."
    if not inspection.regions:
        return "No writer has opened a region yet: the base table has all rows."
    backlog = inspection.backlog.to_json()
    broken = sum(region.fault is not None for region in inspection.regions)
    problems = f" {counted(broken, 'region has a problem', 'regions have a problem')}, see below." if broken else ""
    if not backlog["generations"]:
        if broken:
            return (
                f"Not known to be up to date: the base table has every flushed generation that can be read.{problems}"
            )
        if inspection.versions.newest is not None:
            return "Not known to be up to date: the newest version has a problem, see below."
        return "Up to date: the base table has every flushed generation."
    return (
        f"Behind by {counted(backlog['generations'], 'generation')} in {counted(backlog['regions'], 'region')}: "
        f"{counted(backlog['rows'], 'row')}, {size_text(backlog['bytes'])} not merged.{problems}"
    )


def _has_snapshot(table: Table) -> bool:
    """Whether one was taken; pylance notes a number of regions, and no time, when it makes the index."""
    index = table.index
    return index.inline_snapshots is not None or (is_external(table) and index.snapshot_ts_millis is not None)


def _snapshot(inspection: TableInspection) -> str:
    index = inspection.table.index
    if not _has_snapshot(inspection.table):
        return "No snapshot of the regions is stored (memwal-ops snapshot takes one)."
    taken = datetime.fromtimestamp((index.snapshot_ts_millis or 0) / 1000, UTC)
    return f"Snapshot of {counted(index.num_regions, 'region')}, taken {taken:%Y-%m-%d %H:%M:%S} UTC."


def _regions(inspection: TableInspection) -> str:
    listed = "generations waiting" if inspection.table.refusal is None else "generations"
    return grid(
        ("region", "status", "epoch", "merged", listed, "rows", "bytes"),
        [_region_cells(region) for region in inspection.regions],
        words=("region", "status"),
    )


def _region_cells(region: InspectedRegion) -> list[str]:
    if region.backlog is None:
        return [str(region.region_id), "unreadable", "", "", "", "", ""]
    merged = region.backlog.merged
    waiting = [flushed for flushed in region.backlog.manifest.flushed_generations if flushed.generation > merged]
    span = "none"
    if waiting:
        span = f"{len(waiting)} ({span_text(waiting[0].generation, waiting[-1].generation)})"
    rows = known_sum(flushed.physical_rows for flushed in waiting)
    return [
        str(region.region_id),
        region.backlog.manifest.status.name.lower(),
        str(region.backlog.manifest.writer_epoch),
        "unknown" if region.is_left_over else "none" if merged == 0 else f"to {merged}",
        span,
        "unknown" if rows is None else f"{rows:,}",
        size_text(known_sum(flushed.accounted_bytes for flushed in waiting)),
    ]


def _indexes(inspection: TableInspection) -> str:
    return grid(
        ("index", "type", "state", "fragments covered", "uncovered", "rows uncovered"),
        [
            (
                index.name,
                index.type,
                "caught up" if index.uncovered_fragments == 0 else "behind",
                f"{index.covered_fragments:,}",
                f"{index.uncovered_fragments:,}",
                f"{index.uncovered_rows:,}",
            )
            for index in inspection.indexes
        ],
        words=("index", "type", "state"),
    )
