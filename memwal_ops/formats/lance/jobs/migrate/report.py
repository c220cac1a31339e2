"""The reports of migrations from the legacy index, and between the current layouts, as JSON and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.errors import RegionsBlockedError
from memwal_ops.formats.lance.jobs.legacy.merge import blocked_text
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.text import counted, grid, paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.backlog import BlockedRegion
    from memwal_ops.formats.lance.legacy.index import BlockedMemWal
    from memwal_ops.formats.lance.options import MigrateOptions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.legacy_index import MemWal
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration


class MigrateDecision(enum.StrEnum):
    """How a migration ended."""

    PLANNED = "planned"
    MIGRATED = "migrated"
    ROLLED_BACK = "rolled_back"
    NOTHING_TO_MIGRATE = "nothing_to_migrate"
    BLOCKED = "blocked"
    """At least one region cannot be migrated; nothing was changed but, perhaps, the owners of its MemWALs."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A MemWAL that becomes a generation.

    ``mem_wal``: FLUSHED, or not: then its log is replayed. ``number``: of the generation. ``rows``: as they are found,
    superseded ones included. ``path``: its directory; None in a plan.
    """

    mem_wal: MemWal
    number: int
    rows: int
    path: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The ``adopted`` entry of a region."""
        return {
            "legacy_generation": self.mem_wal.id.generation,
            "generation": self.number,
            "state": self.mem_wal.state.name,
            "owner_id": self.mem_wal.owner_id,
            "rows": self.rows,
            "path": self.path,
        }


@dataclass(frozen=True, slots=True)
class RegionMigration:
    """One region, by its legacy name, and its state afterwards.

    ``region_id``: None: it gets one when it is migrated. ``current``: the generation that its next writer fills.
    """

    region: str
    region_id: UUID | None
    merged: int
    current: int
    adopted: tuple[Adopted, ...]
    blocked: BlockedMemWal | None

    def with_paths(self, region_id: UUID, flushed: Sequence[FlushedGeneration]) -> RegionMigration:
        """The same after the migration, with the paths of its generations."""
        adopted = tuple(
            replace(adopted, path=found.path, rows=found.physical_rows or 0)
            for adopted, found in zip(self.adopted, flushed, strict=True)
        )
        return replace(self, region_id=region_id, adopted=adopted)

    def to_json(self) -> dict[str, Any]:
        """The ``regions`` entry of a report."""
        numbers = {"merged_generation": self.merged, "current_generation": self.current}
        return document(self, "merged", "current", "blocked", **numbers)


@dataclass(frozen=True, slots=True)
class MigrateReport:
    """Report of a migration or of a rollback.

    ``to``: the layout. ``rollback``: whether the legacy index was to be restored. ``restored``: the version whose rows
    were, or would be, restored first. ``kept``: the path of the old details. ``v1_names``: whether manifests have V1
    names.
    """

    decision: MigrateDecision
    run_id: str
    uri: str
    to: str
    rollback: bool
    primary_key: tuple[str, ...]
    regions: tuple[RegionMigration, ...]
    restored: int | None
    kept: str | None
    version: int
    seconds: float
    v1_names: bool

    @classmethod
    def of(
        cls,
        decision: MigrateDecision,
        table: Table,
        options: MigrateOptions,
        note: CommitNote,
        regions: Sequence[RegionMigration] = (),
        *,
        restored: int | None = None,
        kept: str | None = None,
    ) -> MigrateReport:
        """The report of a run on a table's version."""
        return cls(
            decision, note.run_id, table.location.uri, options.layout, options.rollback, table.primary_key,
            tuple(regions), restored, kept, table.version, note.seconds, table.naming is NamingScheme.V1,
        )  # fmt: skip

    @property
    def blocked(self) -> tuple[BlockedMemWal, ...]:
        """The faults of the blocked regions."""
        return tuple(region.blocked for region in self.regions if region.blocked is not None)

    @property
    def exit_code(self) -> int:
        """10 where a region is blocked."""
        return RegionsBlockedError.exit_code if self.decision is MigrateDecision.BLOCKED else 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        return document(self, "uri", "restored", "v1_names", blocked=self.blocked, restored_version=self.restored)

    def describe(self) -> str:
        """The report as text for people."""
        parts = [paragraph(self._headline())]
        if self.restored is not None:
            word = "would be" if self.decision is MigrateDecision.PLANNED else "were"
            parts.append(paragraph(f"The rows of version {self.restored} {word} restored first."))
        shown = [region for region in self.regions if region.blocked is None]
        if shown:
            parts.append(_grid(shown))
        adopted = [one.mem_wal for region in shown for one in region.adopted if one.path is None]
        unflushed = [mem_wal for mem_wal in adopted if mem_wal.state < 2]  # noqa: PLR2004 - FLUSHED
        if unflushed and self.decision is MigrateDecision.PLANNED:
            owners = ", ".join(sorted({repr(mem_wal.owner_id) for mem_wal in unflushed}))
            what = f"{counted(len(unflushed), 'MemWAL is', 'MemWALs are')} not flushed"
            text = f"{what}: --apply takes them from {owners} and replays their logs. Stop their writers before."
            parts.append(paragraph(text))
        parts += [blocked_text(fault) for fault in self.blocked]
        if self.v1_names and not self.rollback and self.decision in {MigrateDecision.PLANNED, MigrateDecision.MIGRATED}:
            text = (
                "The table names its manifests by the V1 scheme, with which no job merges generations of the current "
                "layouts: run memwal-ops merge before the migration; or, with no writer and no job running, "
                "lance.dataset(uri).migrate_manifest_paths_v2() after it."
            )
            parts.append(paragraph(text))
        if self.decision is MigrateDecision.PLANNED:
            parts.append("Nothing was changed; add --apply to do it.")
        return "\n\n".join(parts)

    def _headline(self) -> str:
        adopted = sum(len(region.adopted) for region in self.regions)
        what = f"{counted(len(self.regions), 'region')}, {counted(adopted, 'generation')} adopted"
        key = ", ".join(self.primary_key)
        texts = {
            "planned": f"would migrate {self.uri} to the {self.to} layout: {what}; primary key {key}",
            "migrated": f"{self.uri} has the {self.to} layout since version {self.version}: {what}; primary key {key}",
            "rolled_back": f"{self.uri} has its legacy index again since version {self.version}",
            "nothing_to_migrate": "the table has no legacy index",
            "blocked": "nothing was migrated, see below",
        }
        if self.rollback:
            texts["planned"] = f"would restore the legacy index of {self.kept}"
            texts["nothing_to_migrate"] = "the table has its legacy index"
        return f"{self.decision}: {texts[self.decision]}."


def _grid(regions: Sequence[RegionMigration]) -> str:
    rows = [
        (
            region.region,
            "new" if region.region_id is None else str(region.region_id),
            "none" if not region.merged else f"to {region.merged}",
            ", ".join(f"{each.mem_wal.id.generation} as {each.number}" for each in region.adopted) or "none",
            f"{sum(each.rows for each in region.adopted):,}",
        )
        for region in regions
    ]
    return grid(("region", "id", "merged", "adopted", "rows"), rows, words=("region", "id", "adopted"))


@dataclass(frozen=True, slots=True)
class LayoutRegion:
    """A region of the other layout, as the run found it.

    ``current``: the generation that its writer would fill next. ``rows``: in those that are not merged, as their
    writers recorded; None if one of them did not. ``unflushed``: entries of its log that no generation has, those of
    claims among them.
    """

    region_id: UUID
    merged: int
    current: int
    unmerged: tuple[int, ...]
    rows: int | None
    unflushed: int
    sealed: bool

    def to_json(self) -> dict[str, Any]:
        """The ``regions`` entry of a report."""
        numbers = {"merged_generation": self.merged, "current_generation": self.current}
        waiting = {"unmerged_generations": self.unmerged, "unflushed_wal_entries": self.unflushed}
        hidden = ("merged", "current", "unmerged", "unflushed")
        return document(self, *hidden, region=self.region_id, adopted=[], **numbers, **waiting)


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """Report of a migration between the current layouts (``rollback``: to the one before the last migration).

    ``regions``: those of the other layout that had to be sealed or merged. ``blocked``: nothing was published.
    """

    decision: MigrateDecision
    run_id: str
    uri: str
    before: str
    to: str
    rollback: bool
    primary_key: tuple[str, ...]
    regions: tuple[LayoutRegion, ...]
    blocked: tuple[BlockedRegion, ...]
    version: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """10 where a region is blocked."""
        return RegionsBlockedError.exit_code if self.decision is MigrateDecision.BLOCKED else 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        return document(self, "uri", "before", restored_version=None, kept=None, **{"from": self.before})

    def describe(self) -> str:
        """The report as text for people."""
        planned = self.decision is MigrateDecision.PLANNED
        parts = [paragraph(self._headline())]
        if self.regions:
            parts.append(_layout_grid(self.regions))
        if planned and any(not region.sealed for region in self.regions):
            text = (
                "Stop the writers of these regions before: --apply fences them, flushes their logs, merges their "
                "generations and seals them. Rows that a writer acknowledged as durable are kept; rows that it has "
                "only in memory are lost. A sealed region accepts no more writes: start writers again when the "
                "table is migrated, in regions with new ids."
            )
            parts.append(paragraph(text))
        for fault in self.blocked:
            where = "" if fault.generation is None else f", generation {fault.generation}"
            why = f"{fault.error.reason}. {fault.error} {fault.error.remedy}"
            parts.append(paragraph(f"blocked: region {fault.region_id}{where}: {why}"))
        if planned:
            parts.append("Nothing was changed; add --apply to do it.")
        return "\n\n".join(parts)

    def _headline(self) -> str:
        what = f"{counted(len(self.regions), 'region')} to be sealed and merged"
        texts = {
            "planned": f"would migrate {self.uri} from the {self.before} layout to the {self.to} layout: {what}",
            "migrated": f"{self.uri} has the {self.to} layout in version {self.version}",
            "rolled_back": f"{self.uri} has the {self.to} layout again in version {self.version}",
            "nothing_to_migrate": f"the table has the {self.to} layout already",
            "blocked": "the layout was not changed, see below",
        }
        return f"{self.decision}: {texts[self.decision]}."


def _layout_grid(regions: tuple[LayoutRegion, ...]) -> str:
    rows = [
        (
            str(region.region_id),
            "none" if not region.merged else f"to {region.merged}",
            str(len(region.unmerged)),
            "unknown" if region.rows is None else f"{region.rows:,}",
            str(region.unflushed),
            "sealed" if region.sealed else "open",
        )
        for region in regions
    ]
    return grid(("region", "merged", "unmerged", "rows", "log", "state"), rows, words=("region", "state"))
