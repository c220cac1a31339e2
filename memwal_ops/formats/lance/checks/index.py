"""Check the MemWAL index: progress, catch-up entries, maintained indexes and the region snapshot against the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.verification import Finding, Severity, finding_of
from memwal_ops.errors import InvalidFormatError, runbook
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.catchup_entries import stale_entries
from memwal_ops.formats.lance.indexes.index_faults import checked_fault
from memwal_ops.formats.lance.indexes.index_refusals import dot_product_error
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.table import Table

_INDEX = "the MemWAL index"
_SNAPSHOT_AGAIN = "memwal-ops snapshot URI makes a new one."


def check_progress(table: Table, regions: Mapping[UUID, RegionBacklog]) -> Iterator[Finding]:
    """Progress is that of regions that exist, and below the generation that each writes."""
    for region_id, merged in sorted(table.index.merged_generations.items()):
        if region_id not in table.regions.region_ids:
            yield Finding(
                Severity.INFO, "progress_of_unknown_region", _INDEX,
                f"It has merged generation {merged} of region {region_id}, which has no folder.",
                "None: the region was removed, or the table is a branch or a clone.", "None.",
            )  # fmt: skip
        elif region_id in regions and merged >= regions[region_id].manifest.current_generation:
            now = regions[region_id].manifest.current_generation
            yield Finding(
                Severity.ERROR, "progress", _INDEX,
                f"It has merged generation {merged} of region {region_id}, whose writer is at generation {now}.",
                "The region's next generation would count as merged, and its rows be lost.",
                "Stop the writer; find out which of the two was restored, and see the page.", runbook(29) or "",
            )  # fmt: skip


def check_catchup(table: Table) -> Iterator[Finding]:
    """No entry of ``index_catchup`` exceeds what its index covers, nor names an index that does not exist."""
    indexes = base_indexes(table)
    recorded = table.index.index_catchup
    for name in sorted(recorded.keys() - indexes.keys()):
        yield Finding(
            Severity.INFO, "catchup_of_unknown_index", _INDEX, f"It has catch-up entries of an index {name!r}.",
            "None: the index was dropped.", "None: memwal-ops catchup URI leaves them out at its next commit.",
        )  # fmt: skip
    for name, correct in sorted(stale_entries(table, sorted(indexes)).items()):
        claimed = recorded.get(name)
        wrong = claimed is not None and any(number > correct.get(region, 0) for region, number in claimed.items())
        if claimed is None:
            yield Finding(
                Severity.INFO, "index_behind", f"the index {name!r}",
                "It does not cover what was merged since, and has no catch-up entry, which the specification reads as "
                "caught up.",
                "A query by this index alone misses rows that were merged.", "memwal-ops catchup URI",
                runbook(18) or "", about=name,
            )  # fmt: skip
        elif wrong:
            yield Finding(
                Severity.ERROR, "index_catchup", f"the index {name!r}",
                "It is recorded as caught up further than the fragments that it covers.",
                "A query by this index skips generations, and misses their rows.",
                "memwal-ops catchup URI corrects the entry.", runbook(18) or "", about=name,
            )  # fmt: skip
    for name in table.index.maintained_indexes:
        if name not in indexes:
            yield Finding(
                Severity.WARNING, "maintained_index", _INDEX,
                f"Writers are to maintain an index {name!r}, which does not exist.",
                "Writers fail, or skip it.", "Create the index, or initialise MemWAL without it.",
            )  # fmt: skip


def check_rows_of_indexes(table: Table, found: Collection[str] = ()) -> Iterator[Finding]:
    """Every scalar index has the fragments that it claims, and finds a sample of their rows; those ``found`` do not."""
    for name, index in sorted(base_indexes(table).items()):
        fault = None if name in found else checked_fault(table, index)
        if fault is None:
            continue
        if fault.proven:
            yield Finding(
                Severity.ERROR, "index_rows", f"the index {name!r}", f"It {fault.why}.",
                "Queries by it do not find rows that exist, and pylance's merge_insert would insert their keys again.",
                "memwal-ops catchup URI builds it anew.", runbook(18) or "", about=name,
            )  # fmt: skip
        else:
            yield Finding(
                Severity.WARNING, "index_rows", f"the index {name!r}", f"It {fault.why}.",
                "Queries by it may not find all rows. Merges and reads of memwal-ops do not ask it.",
                f"See the page; once no release before 14.0 writes the table, memwal-ops catchup URI --index {name} "
                "--rebuild builds it anew.", runbook(18) or "", about=name,
            )  # fmt: skip


def check_distances(table: Table, found: Collection[str] = ()) -> Iterator[Finding]:
    """No vector index got rows that hide all others, but those ``found``.

    pylance's update into one segment leaves no trace of that: ``--answers`` measures it.
    """
    for name, index in sorted(base_indexes(table).items()):
        error = dot_product_error(table, index) if len(index.segments) > 1 and name not in found else None
        if error is not None:
            yield Finding(
                Severity.ERROR, "index_distances", f"the index {name!r}",
                f"It has {len(index.segments)} segments. {error}", "Searches by it do not find the nearest rows.",
                error.remedy, runbook(18) or "", about=name,
            )  # fmt: skip


def check_snapshot(table: Table, regions: Mapping[UUID, RegionBacklog]) -> Iterator[Finding]:
    """The region snapshot decodes, and is not newer than the manifests."""
    try:
        found = read_snapshot(table)
        rows = () if found is None else found.regions
    except InvalidFormatError as error:
        yield finding_of(
            error, "snapshot", "the region snapshot", f"Readers that use it fail. {_SNAPSHOT_AGAIN}", Severity.WARNING
        )
        return
    for row in rows:
        state = regions.get(row.region_id)
        if state is not None and row.state is not None and row.state.version > state.manifest.version:
            yield Finding(
                Severity.ERROR, "snapshot", "the region snapshot",
                f"It has manifest version {row.state.version} of region {row.region_id}; "
                f"the newest is {state.manifest.version}.",
                "The region's folder was restored or replaced beneath the table.",
                f"Find out which; then {_SNAPSHOT_AGAIN}",
                runbook(29) or "",
            )  # fmt: skip
