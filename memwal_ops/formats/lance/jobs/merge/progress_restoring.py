"""Publish merge progress that was lost with the MemWAL index, or that an operator states.

``unset_lsm_write_spec()`` and ``set_lsm_write_spec()`` of lancedb remove the index and make it again; the regions stay.
Timeline of the loss without this: generation 3 is merged; the index is made again; a merge that begins at generation 1
writes the old values of its keys over newer rows of the base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import GenerationMissingError, RegionReplacedError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, commit_details
from memwal_ops.formats.lance.generations.region_identity import lost_progress
from memwal_ops.formats.lance.wire.memwal_index import with_progress
from memwal_ops.formats.lance.wire.region_records import with_region_records
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import Backlog
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_records import RegionRecord

_log = get_logger(__name__)


def restore_progress(table: Table, backlog: Backlog) -> Table:
    """Restore the progress of blocked regions, if older versions prove it; the newest version then, else ``table``.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: the outcome of the commit is unknown; run it again.
    """
    retry = CommitRetry()
    note = CommitNote.new("merge")
    while lost := _lost(table, backlog):
        try:
            publish_progress(
                table, {region_id: merged for region_id, (merged, _) in lost.items()}, _records(lost), note
            )
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            for region_id, (merged, _) in lost.items():
                _log.info("progress_restored", table=table.location.uri, region=str(region_id), generation=merged)
            return retry.landed(table)
    return table


def publish_progress(
    table: Table, progress: Mapping[UUID, int], records: Mapping[UUID, RegionRecord], note: CommitNote
) -> None:
    """Publish more progress as exactly the next version, without a change of rows.

    Raises:
        CommitLostError: another writer published that version.
        InvariantViolatedError: the progress is not more than the table has.
    """
    probe_conditional_writes(table.store)
    details = with_progress(table.index.details, progress).SerializeToString(deterministic=True)
    commit_details(table, with_region_records(table.manifest.manifest, records), details, note)


def _lost(table: Table, backlog: Backlog) -> Mapping[UUID, tuple[int, RegionRecord | None]]:
    blocked = [
        fault.region_id
        for fault in backlog.blocked
        if isinstance(fault.error, (RegionReplacedError, GenerationMissingError)) and fault.region_id in backlog.regions
    ]
    found = {region_id: lost_progress(table, backlog.regions[region_id].manifest) for region_id in blocked}
    return {region_id: lost for region_id, lost in found.items() if lost is not None}


def _records(lost: Mapping[UUID, tuple[int, RegionRecord | None]]) -> Mapping[UUID, RegionRecord]:
    return {region_id: record for region_id, (_, record) in lost.items() if record is not None}
