"""Claim a region: raise the writer epoch in its manifest, which fences the previous writer (S0-120, S0-121)."""

from __future__ import annotations

import random
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memwal_ops.errors import CommitConflictError, InvalidUsageError
from memwal_ops.formats.lance.generations.region_values import RegionValues, region_values_of
from memwal_ops.formats.lance.layouts import layout_of_region
from memwal_ops.formats.lance.log.region_files import WAL_SUFFIX
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.wire.names import parse_wal_entry_name, region_folder
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

ATTEMPTS = 50


def claim(table: Table, region_id: UUID, values: RegionValues | None) -> tuple[RegionManifest, Claim]:
    """Claim a region, creating it if it does not exist, and return the manifest with the new epoch, and its claim.

    Args:
        table: the table at any version.
        values: region values of a new region that belongs to a spec (S0-084); None claims an existing region, or
            creates a manual one.

    Raises:
        InvalidUsageError: the region is sealed or has other values; it is new and manual, and the table has specs; or
            the table was migrated to the shard layout since.
        CommitConflictError: every attempt conflicted with another writer's claim.
    """
    manifests = table.region(region_id)
    for attempt in range(ATTEMPTS):
        try:
            newest = manifests.latest(checked=True)
        except NoRegionManifestError:
            if manifests.is_claimed():
                if manifests.versions():
                    continue  # another writer created the region after the listing
                raise
            if values is None and table.index.region_specs:
                raise InvalidUsageError(
                    f"{table.location.uri} has region specs: a new manual region could get keys of their regions.",
                    remedy="Write through RegionRouter, which finds the region of each row.",
                ) from None
            next_manifest = _first(region_id, values)
        else:
            if values is not None and region_values_of(table, newest) != values:
                raise InvalidUsageError(f"Region {region_id} has other region values than {values.values}.")
            if newest.sealed:
                raise InvalidUsageError(
                    f"Region {region_id} is sealed and accepts no more writes.",
                    remedy="Write to another region: RegionWriter without a region id creates one.",
                )
            next_manifest = replace(newest.next(), writer_epoch=newest.writer_epoch + 1)
        # Equal bytes are not our own claim: two claims of one epoch are identical. Timeline otherwise: A and B both
        # read epoch 6 and claim 7 at once; both write entries, each treats the other's entries as those of its
        # predecessor, and neither is ever fenced.
        if manifests.commit(next_manifest, ours_if_equal=False):
            refuse_migrated(table, region_id)
            return next_manifest, Claim.of(table, next_manifest)
        wait(attempt)
    raise CommitConflictError(f"Region {region_id} was claimed by other writers in {ATTEMPTS} consecutive attempts.")


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as the store has it. By it a writer detects that its region was replaced by another one.

    Epochs restart with each region. Timeline by the epoch alone: A claims epoch 1; the table is removed and created
    again, and B claims epoch 1 of its region, which has the same id since that follows from spec and values; B's row is
    acknowledged as entry 1. A flushes: its manifest records entry 1 as flushed, and no generation has B's row.
    """

    store: Store
    path: str
    version: int
    written: datetime | None

    @classmethod
    def of(cls, table: Table, claimed: RegionManifest) -> Claim:
        """The claim that was just published; one request."""
        path = table.region(claimed.region_id).path(claimed.version)
        meta = table.store.head(path)
        return cls(table.store, path, claimed.version, None if meta is None else meta.last_modified)

    def is_replaced(self, newest: RegionManifest) -> bool:
        """Whether the region's newest manifest is that of another one; one request.

        False if gc has deleted the manifest of the claim: its absence shows nothing.
        """
        if newest.version < self.version:
            return True
        meta = self.store.head(self.path)
        return meta is not None and self.written is not None and meta.last_modified > self.written


def parse_region_id(text: str | None) -> UUID:
    """Parse a region id; None gives a new random one (S0-080)."""
    try:
        return uuid.uuid4() if text is None else uuid.UUID(text)
    except ValueError as error:
        raise InvalidUsageError(f"{text!r:.80} is not a region id: it must be a UUID.") from error


def refuse_other_layout(table: Table, region_id: UUID | None) -> None:
    """Raise if pylance writes the region, or, for a new one, the table's regions.

    Its WAL entries have other names, and each kind of writer would treat those of the other as missing.
    """
    shown = None if region_id is None else layout_of_region(table.store, region_id)
    if (shown or table.layout).generations_in_log:
        return
    if table.layout_record is not None:
        raise InvalidUsageError(
            f"{table.location.uri} was migrated to the layout {table.layout.name}, which this writer cannot write.",
            remedy="Write with pylance's writer: dataset.mem_wal_writer(REGION).",
        )
    for one in table.regions.region_ids:
        folder = region_folder(one)
        for meta in table.store.list(folder):
            name = parse_wal_entry_name(meta.path.rsplit("/", 1)[-1])
            if "/data/" in meta.path or (name is not None and name.suffix != WAL_SUFFIX):
                raise InvalidUsageError(
                    f"The regions of {table.location.uri} are written by pylance, in the layout {table.layout.name}.",
                    remedy="Write with pylance's writer: dataset.mem_wal_writer(REGION).",
                )


def refuse_migrated(table: Table, region_id: UUID) -> None:
    """Refuse, after the claim, a table that was migrated to another layout since ``table`` was opened.

    A migration publishes and then lists the regions; a writer claims and then reads the table: at least one of them
    sees the other. One request if there is no newer version.
    """
    if table.has_revision(table.version + 1) or not table.has_revision(table.version):
        refuse_other_layout(table.newest(), region_id)


def wait(attempt: int, *, first: float = 0.005, longest: float = 0.5) -> None:
    """Sleep with jitter and exponential backoff after a commit conflict; times in seconds."""
    time.sleep(random.uniform(0, min(longest, first * 2**attempt)))  # noqa: S311 - jitter


def _first(region_id: UUID, values: RegionValues | None) -> RegionManifest:
    spec_id, fields = (MANUAL, ()) if values is None else (values.spec.spec_id or MANUAL, values.encoded())
    return RegionManifest(region_id, 1, spec_id, 1, None, None, 1, (), RegionStatus.ACTIVE, fields)
