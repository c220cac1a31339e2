"""The report of a migration between the current layouts, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.errors import RegionsBlockedError
from memwal_ops.formats.lance.jobs.migrate.report import MigrateDecision
from memwal_ops.text import counted, grid, paragraph

if TYPE_CHECKING:
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import Blocked


@dataclass(frozen=True, slots=True)
class LayoutRegion:
    """A region of the other layout, as the run found it.

    Attributes:
        region_id: the region.
        merged: its progress.
        current: the generation that its writer would fill next.
        unmerged: its generations that are not merged.
        rows: in them, as their writers recorded.
        unflushed: entries of its log that no generation has, those of claims among them.
        sealed: whether it takes no writes any more.
    """

    region_id: UUID
    merged: int
    current: int
    unmerged: tuple[int, ...]
    rows: int
    unflushed: int
    sealed: bool

    def to_json(self) -> dict[str, Any]:
        """The ``regions`` entry of a report."""
        return {
            "region": str(self.region_id),
            "region_id": str(self.region_id),
            "merged_generation": self.merged,
            "current_generation": self.current,
            "adopted": [],
            "unmerged_generations": [*self.unmerged],
            "rows": self.rows,
            "unflushed_wal_entries": self.unflushed,
            "sealed": self.sealed,
        }


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """Report of a migration between the current layouts, or of its rollback.

    Attributes:
        before: the table's layout at the start.
        to: the requested layout.
        rollback: whether the layout before the last migration was requested.
        regions: those of the other layout that had to be sealed or merged, as the run found them.
        blocked: regions that cannot be merged; nothing was published.
        version: the table's newest version.
    """

    decision: MigrateDecision
    run_id: str
    uri: str
    before: str
    to: str
    rollback: bool
    primary_key: tuple[str, ...]
    regions: tuple[LayoutRegion, ...]
    blocked: tuple[Blocked, ...]
    version: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """10 where a region is blocked."""
        return RegionsBlockedError.exit_code if self.decision is MigrateDecision.BLOCKED else 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        return document(self, "uri", "before", restored_version=None, kept=None) | {"from": self.before}

    def describe(self) -> str:
        """The report as text for people."""
        planned = self.decision is MigrateDecision.PLANNED
        parts = [paragraph(self._headline())]
        if self.regions:
            parts.append(_grid(self.regions))
        if planned and any(not one.sealed for one in self.regions):
            parts.append(
                paragraph(
                    "Stop the writers of these regions before: --apply fences them, flushes their logs, merges their "
                    "generations and seals them. Rows that a writer acknowledged as durable are kept; rows that it has "
                    "only in memory are lost. A sealed region accepts no more writes: start writers again when the "
                    "table is migrated, in regions with new ids."
                )
            )
        parts += [paragraph(_blocked_text(fault)) for fault in self.blocked]
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


def _blocked_text(fault: Blocked) -> str:
    where = "" if fault.generation is None else f", generation {fault.generation}"
    return f"blocked: region {fault.region_id}{where}: {fault.error.reason}. {fault.error} {fault.error.remedy}"


def _grid(regions: tuple[LayoutRegion, ...]) -> str:
    rows = [
        (
            str(one.region_id),
            "none" if not one.merged else f"to {one.merged}",
            str(len(one.unmerged)),
            f"{one.rows:,}",
            str(one.unflushed),
            "sealed" if one.sealed else "open",
        )
        for one in regions
    ]
    return grid(("region", "merged", "unmerged", "rows", "log", "state"), rows, words=("region", "state"))
