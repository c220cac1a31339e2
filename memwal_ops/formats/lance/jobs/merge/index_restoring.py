"""Publish what the table lost with its MemWAL index, or progress that an operator states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import GenerationMissingError, RegionReplacedError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, commit_details
from memwal_ops.formats.lance.generations.lost_index import raised, restored_index
from memwal_ops.formats.lance.wire.region_manifest import with_region_records
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import Backlog
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionRecord

_log = get_logger(__name__)


def restore_index(table: Table, backlog: Backlog) -> Table:
    """Restore specs of regions, and the progress of blocked ones, if older versions prove it (:mod:`lost_index`).

    Returns:
        The newest version then, else ``table``.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: the outcome of the commit is unknown; run it again.
    """
    retry = CommitRetry()
    note = CommitNote.new("merge")
    while lost := restored_index(table, [one.manifest for one in backlog.regions.values()], _blocked(backlog)):
        try:
            _publish(table, lost.details, lost.records, note)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            uri = table.location.uri
            for region_id, merged in lost.progress.items():
                _log.info("progress_restored", table=uri, region=str(region_id), generation=merged)
            if lost.specs:
                _log.info("region_specs_restored", table=uri, specs=[*lost.specs])
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
    _publish(table, raised(table, table.index.details, progress), records, note)


def _publish(
    table: Table, details: memwal_pb2.MemWalIndexDetails, records: Mapping[UUID, RegionRecord], note: CommitNote
) -> None:
    probe_conditional_writes(table.store)
    manifest = with_region_records(table.manifest.manifest, records)
    commit_details(table, manifest, details.SerializeToString(deterministic=True), note)


def _blocked(backlog: Backlog) -> list[RegionManifest]:
    """The regions that a lost progress may block."""
    return [
        backlog.regions[fault.region_id].manifest
        for fault in backlog.blocked
        if isinstance(fault.error, (RegionReplacedError, GenerationMissingError)) and fault.region_id in backlog.regions
    ]
