"""The report of a merge, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.core.merge_report import MergeDecision, MergeOutcome
from memwal_ops.core.report import Need
from memwal_ops.formats.lance.engines.merge.api import PassResult
from memwal_ops.text import counted, grid, paragraph, short_ids, size_text, span_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.engines.merge.api import MergePass
    from memwal_ops.formats.lance.generations.backlog import Backlog, Blocked

_PLANNED = ("rows waiting", "size")
_DONE = ("rows read", "size", "rows written", "rows deleted", "seconds", "version")


@dataclass(frozen=True, slots=True)
class PassReport:
    """One pass in a report. ``result`` is None in a dry run."""

    merge_pass: MergePass
    result: PassResult | None

    def to_json(self) -> dict[str, Any]:
        """The ``passes`` entry of a report."""
        regions = {str(region_id): list(span) for region_id, span in self.merge_pass.regions.items()}
        figures = (
            dict.fromkeys(one.name for one in fields(PassResult)) if self.result is None else document(self.result)
        )
        return {"regions": regions, **figures}


@dataclass(frozen=True, slots=True)
class MergeReport(MergeOutcome):
    """Report of a merge.

    ``engine_reason``: why that engine was selected; ``fell_back``: whether it is local because Spark cannot run here.
    """

    decision: MergeDecision
    run_id: str
    passes: tuple[PassReport, ...]
    blocked: tuple[Blocked, ...]
    backlog_after: Backlog
    engine: str
    version: int
    commit_conflicts: int
    seconds: float
    engine_reason: str = ""
    fell_back: bool = False

    def to_json(self) -> dict[str, Any]:
        """The document of ``merge --json``."""
        return document(self, "fell_back")

    def needs(self) -> Iterator[Need]:
        """What a run would merge."""
        waiting = self.backlog_after.to_json()
        if waiting["generations"]:
            yield Need("merge", f"merge {counted(waiting['generations'], 'generation')}", rows=waiting["rows"])

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        if self.engine == "spark" or self.fell_back:
            parts.append(paragraph(f"Engine: {self.engine} ({self.engine_reason.removesuffix('.')})."))
        if self.passes:
            parts.append(_passes(self))
        parts += [fault.describe("BLOCKED") for fault in self.blocked]
        parts.append(_backlog(self))
        return "\n\n".join(parts) if len(parts) > 2 else "\n".join(parts)  # noqa: PLR2004 - nothing to set apart


def _backlog(report: MergeReport) -> str:
    after = report.backlog_after.to_json()
    if after["generations"]:
        return paragraph(
            f"Waiting: {counted(after['generations'], 'generation')} in {counted(after['regions'], 'region')}, "
            f"{counted(after['rows'], 'row')}, {size_text(after['bytes'])}."
        )
    if report.blocked:
        return "No other generation is known to be unmerged; a blocked region may have more."
    return "All generations are merged."


def _passes(report: MergeReport) -> str:
    """One line for each region of each pass; the figures of a pass are on its first line."""
    names = short_ids({region_id for entry in report.passes for region_id in entry.merge_pass.regions})
    rows = []
    for number, entry in enumerate(report.passes, 1):
        figures = _planned(entry) if entry.result is None else _done(entry.result)
        for line, (region_id, (first, last)) in enumerate(entry.merge_pass.regions.items()):
            shown = (str(number), figures) if line == 0 else ("", [""] * len(figures))
            rows.append((shown[0], names[region_id], span_text(first, last), *shown[1]))
    done = any(entry.result is not None for entry in report.passes)
    return grid(("pass", "region", "generations", *(_DONE if done else _PLANNED)), rows, words=("region",))


def _done(result: PassResult) -> list[str]:
    return [
        f"{result.rows_read:,}",
        size_text(result.bytes_read),
        f"{result.rows_upserted:,}",
        f"{result.rows_deleted:,}",
        f"{result.seconds:.2f}",
        str(result.version),
    ]


def _planned(entry: PassReport) -> list[str]:
    """Sizes as recorded in the manifests; lower bounds if some are not recorded."""
    refs = entry.merge_pass.generations
    known = "" if all(ref.rows is not None and ref.bytes is not None for ref in refs) else "at least "
    rows, size = sum(ref.rows or 0 for ref in refs), sum(ref.bytes or 0 for ref in refs)
    return [f"{known}{rows:,}", f"{known}{size_text(size)}"]


def _headline(report: MergeReport) -> str:
    passes = counted(len(report.passes), "pass", "passes")
    generations = sum(len(entry.merge_pass.generations) for entry in report.passes)
    match report.decision:
        case "merged":
            return f"merged: {counted(generations, 'generation')} in {passes}, {report.seconds:.2f} s."
        case "nothing_to_merge":
            return "nothing_to_merge: every flushed generation is in the base table already."
        case "superseded":
            return "superseded: another merger merged all generations that waited when this one began."
        case "dry_run":
            return f"dry_run: would merge {counted(generations, 'generation')} in {passes}; nothing was changed."
        case _ if not generations:
            return "blocked: nothing was merged, see below."
        case _:
            return f"blocked: {counted(generations, 'generation')} merged in {passes}, but see below."
