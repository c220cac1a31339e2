"""Claim a region, and write WAL entries, and flushed generations that refer to them without copying a row.

A claim raises the writer epoch in the region's manifest, which fences the previous writer (S0-120, S0-121). Fencing is
not checked here: :mod:`memwal_ops.formats.lance.log.region_writer` decides who may write.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import time
import uuid
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.files.blobs import lance_bytes, lance_rows
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.generations.region_identity import RegionValues, region_values_of
from memwal_ops.formats.lance.layouts import layout_of_region
from memwal_ops.formats.lance.regions.key_files import GenerationKeys
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.retention.schema_history import OPENED, WriterVersion
from memwal_ops.formats.lance.wire import names
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb
from memwal_ops.formats.lance.wire.lance_file import check_lance_file, is_cut_short
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus
from memwal_ops.formats.lance.wire.version_manifest import BASE_PATHS, DELETION_FILES, encode_version_manifest
from memwal_ops.storage.api import Store, results_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from memwal_ops.formats.lance.log.region_columns import RegionColumns
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.locations import Location


WAL_SUFFIX = "lance"
# The deletion file type "roaring bitmap" (S3-041).
_BITMAP = 1
_PUTS = 16
_NUMBER = re.compile(r"[0-9]{1,20}")
# Field ids in the entry's metadata: its columns may be renamed or dropped before it is flushed.
_FIELD_IDS = "memwal-ops.field_ids"
_IDS = re.compile(r"\[[0-9]{1,9}(, [0-9]{1,9})*\]")


class WalEntryCutError(errors.WalCorruptError):
    """A WAL entry is truncated. Its put did not finish, or the file was damaged later."""


@dataclass(frozen=True, slots=True)
class WalEntry:
    """One entry of a region's log.

    Attributes:
        entry_id: consecutive, starting at 1 (S0-030).
        writer_epoch: epoch of the writer that put it (S0-032).
        rows: the stored rows, tombstones included.
        field_ids: :attr:`RegionColumns.ids` at the time of the put, as ``opened``; None if the writer did not store
            them.
        size: of the file, in bytes.
        cut: whether the entry is truncated: it has no rows and was never acknowledged.
    """

    entry_id: int
    writer_epoch: int
    rows: pa.Table
    field_ids: tuple[int, ...] | None
    size: int
    opened: WriterVersion | None = None
    cut: bool = False


def cut_entry(entry_id: int) -> WalEntry:
    """A truncated entry at the end of the log, which was never acknowledged."""
    return WalEntry(entry_id, 0, pa.table({}), None, 0, cut=True)


def entry_path(region_id: UUID, entry_id: int) -> str:
    """Path of a WAL entry, relative to the table's root (S0-034)."""
    return f"{names.region_folder(region_id)}/wal/{names.wal_entry_name(entry_id, WAL_SUFFIX)}"


def put_entry(
    store: Store, region_id: UUID, entry_id: int, rows: pa.Table, writer_epoch: int, columns: RegionColumns
) -> WalEntry | None:
    """Put rows as a WAL entry if its id is free; None if another writer took the id (S0-028, S0-031, S0-131).

    One PUT request. The entry is durable when this returns; after a ``StorageError`` it may or may not exist.
    """
    path = entry_path(region_id, entry_id)
    metadata = {names.WRITER_EPOCH: str(writer_epoch), _FIELD_IDS: json.dumps(columns.ids)}
    if columns.opened is not None:
        metadata[OPENED] = str(columns.opened)
    data = lance_bytes(rows.replace_schema_metadata(metadata), columns.file_version, f"WAL entry {path}")
    # After a lost response the store's client repeats the put, which then fails because the object exists. The bytes
    # contain the epoch, and an epoch has one writer: equal bytes are our own entry. (Encoding again may give others.)
    if not store.put_if_absent(path, data) and store.get(path) != data:
        return None
    return WalEntry(entry_id, writer_epoch, rows, columns.ids, len(data), columns.opened)


def read_entry(store: Store, region_id: UUID, entry_id: int) -> WalEntry | None:
    """Read a WAL entry; None if it does not exist. One request.

    Raises:
        WalEntryCutError: the entry is truncated.
        WalCorruptError: it is not a Lance file, or has no writer epoch.
    """
    path = entry_path(region_id, entry_id)
    try:
        data = store.get(path)
    except errors.ObjectNotFoundError:
        return None
    if is_cut_short(data):
        raise WalEntryCutError(f"WAL entry {path} is truncated after {len(data)} bytes.")
    try:
        rows = lance_rows(data, f"WAL entry {path}")
        lance_file = check_lance_file(data, len(data))
    except errors.InvalidFormatError as error:
        raise errors.WalCorruptError(str(error)) from error
    stored = {} if lance_file is None else lance_file.metadata
    metadata = {key: value.decode(errors="replace") for key, value in stored.items()}
    if _NUMBER.fullmatch(metadata.get(names.WRITER_EPOCH, "")) is None:
        raise errors.WalCorruptError(f"WAL entry {path} has no writer epoch.")
    ids = metadata.get(_FIELD_IDS)
    if ids is not None and _IDS.fullmatch(ids) is None:
        raise errors.WalCorruptError(f"WAL entry {path} has invalid field ids in its metadata: {ids!r:.80}.")
    field_ids = None if ids is None else tuple(json.loads(ids))
    epoch, opened = int(metadata[names.WRITER_EPOCH]), WriterVersion.parsed(metadata.get(OPENED))
    return WalEntry(entry_id, epoch, rows.replace_schema_metadata(None), field_ids, len(data), opened)


def put_generation(
    store: Store,
    location: Location,
    region_id: UUID,
    path: str,
    entries: Sequence[WalEntry],
    columns: RegionColumns,
    *,
    copied: bool = False,
) -> bool:
    """Write a generation whose fragments are WAL entries: manifest, deletion vectors, bloom filter and key index.

    No row is copied (S0-147, S0-149). The generation is invisible until the region manifest lists it.

    Args:
        path: directory of the generation, relative to the region's folder.
        entries: WAL entries in ascending order, which becomes the order of row addresses: the newest row of a key is
            the last one.
        copied: write the rows to files of its own instead, as pylance's readers expect them in the shard layout.

    Returns False if the directory already has a manifest, which is left as it is.
    """
    made = deepcopy(columns.template)
    if columns.opened is not None:
        made.manifest.table_metadata[OPENED] = str(columns.opened)
    (like,) = made.manifest.fragments
    del made.manifest.fragments[:]
    made.manifest.ClearField("max_fragment_id")
    target = f"{names.region_folder(region_id)}/{path}"
    stored = [entry for entry in entries if entry.rows.num_rows]
    keys = GenerationKeys.of([entry.rows for entry in stored], columns.key)
    files: dict[str, bytes] = {}
    for at, (entry, superseded) in enumerate(zip(stored, keys.superseded(), strict=True)):
        fragment = made.manifest.fragments.add()
        fragment.CopyFrom(like)
        fragment.id = made.manifest.max_fragment_id = at
        fragment.physical_rows = entry.rows.num_rows
        fragment.files[0].path = names.wal_entry_name(entry.entry_id, WAL_SUFFIX)
        fragment.files[0].file_size_bytes = entry.size
        if copied:
            data = lance_bytes(entry.rows, columns.file_version, f"the rows of WAL entry {entry.entry_id}")
            fragment.files[0].file_size_bytes = len(data)
            fragment.files[0].ClearField("base_id")
            files[f"data/{fragment.files[0].path}"] = data
        if superseded:
            number, count = secrets.randbits(63), len(superseded)
            deletion = pb.DeletionFile(
                file_type=_BITMAP, read_version=made.manifest.version, id=number, num_deleted_rows=count
            )
            fragment.deletion_file.CopyFrom(deletion)
            files[f"_deletions/{at}-{deletion.read_version}-{deletion.id}.bin"] = superseded.serialize()
    if files:
        made.manifest.reader_feature_flags |= DELETION_FILES
        made.manifest.writer_feature_flags |= DELETION_FILES
    if copied:
        del made.manifest.base_paths[:]
        made.manifest.reader_feature_flags &= ~BASE_PATHS
        made.manifest.writer_feature_flags &= ~BASE_PATHS
    else:
        made.manifest.base_paths[0].path = f"{location.uri}/{names.region_folder(region_id)}/wal"
    made.manifest.timestamp.FromNanoseconds(time.time_ns())
    manifest = version_path(made.manifest.version, names.NamingScheme.V2, folder=target)
    # The manifest comes first: it reserves the directory.
    if not store.put_if_absent(manifest, encode_version_manifest(made)):
        return False
    files.update(keys.files(columns.file_version))
    # False is our own put, repeated by the client after a lost response.
    results_of(lambda name: store.put_if_absent(f"{target}/{name}", files[name]), files, threads=_PUTS)
    return True


ATTEMPTS = 50


def claim(table: Table, region_id: UUID, values: RegionValues | None) -> tuple[RegionManifest, StoredClaim]:
    """Claim a region, creating it if it does not exist, and return the manifest with the new epoch, and its claim.

    ``values`` are those of a new region that belongs to a spec (S0-084); None claims an existing region, or creates a
    manual one.

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
                raise errors.InvalidUsageError(
                    f"{table.location.uri} has region specs: a new manual region could get keys of their regions.",
                    remedy="Write through RegionRouter, which finds the region of each row.",
                ) from None
            next_manifest = _first(region_id, values)
        else:
            if values is not None and region_values_of(table, newest) != values:
                raise errors.InvalidUsageError(f"Region {region_id} has other region values than {values.values}.")
            if newest.sealed:
                raise errors.InvalidUsageError(
                    f"Region {region_id} is sealed and accepts no more writes.",
                    remedy="Write to another region: RegionWriter without a region id creates one.",
                )
            next_manifest = replace(newest.next(), writer_epoch=newest.writer_epoch + 1)
        # Equal bytes are not our own claim: two claims of one epoch are identical. Timeline otherwise: A and B both
        # read epoch 6 and claim 7 at once; both write entries, each treats the other's entries as those of its
        # predecessor, and neither is ever fenced.
        if manifests.commit(next_manifest, ours_if_equal=False):
            refuse_migrated(table, region_id)
            return next_manifest, StoredClaim.of(table, next_manifest)
        wait(attempt)
    raise errors.CommitConflictError(
        f"Region {region_id} was claimed by other writers in {ATTEMPTS} consecutive attempts."
    )


@dataclass(frozen=True, slots=True)
class StoredClaim:
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
    def of(cls, table: Table, claimed: RegionManifest) -> StoredClaim:
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
        raise errors.InvalidUsageError(f"{text!r:.80} is not a region id: it must be a UUID.") from error


def refuse_other_layout(table: Table, region_id: UUID | None) -> None:
    """Raise if pylance writes the region, or, for a new one, the table's regions.

    Its WAL entries have other names, and each kind of writer would treat those of the other as missing.
    """
    table.require_memwal("A writer")
    shown = None if region_id is None else layout_of_region(table.store, region_id)
    if (shown or table.layout).generations_in_log:
        return
    if table.layout_record is not None:
        raise errors.InvalidUsageError(
            f"{table.location.uri} was migrated to the layout {table.layout.name}, which this writer cannot write.",
            remedy="Write with pylance's writer: dataset.mem_wal_writer(REGION).",
        )
    for existing in table.regions.region_ids:
        folder = names.region_folder(existing)
        for meta in table.store.list(folder):
            name = names.parse_wal_entry_name(meta.path.rsplit("/", 1)[-1])
            if "/data/" in meta.path or (name is not None and name.suffix != WAL_SUFFIX):
                raise errors.InvalidUsageError(
                    f"The regions of {table.location.uri} are written by pylance, in the layout {table.layout.name}.",
                    remedy="Write with pylance's writer: dataset.mem_wal_writer(REGION).",
                )


def refuse_migrated(table: Table, region_id: UUID | None) -> bool:
    """Refuse, after the claim, a table that was migrated to another layout since ``table`` was opened.

    Returns whether there is a newer version.

    A migration publishes and then lists the regions; a writer claims and then reads the table: at least one of them
    sees the other. One listing; that the next version does not exist shows nothing, as an expiry keeps tagged ones.
    """
    newest = table.newest()
    if changed := newest.version != table.version:
        refuse_other_layout(newest, region_id)
    return changed


def wait(attempt: int, *, first: float = 0.005, longest: float = 0.5) -> None:
    """Sleep with jitter and exponential backoff after a commit conflict; times in seconds."""
    time.sleep(random.uniform(0, min(longest, first * 2**attempt)))  # noqa: S311 - jitter


def _first(region_id: UUID, values: RegionValues | None) -> RegionManifest:
    spec_id, fields = (MANUAL, ()) if values is None else (values.spec.spec_id or MANUAL, values.encoded())
    return RegionManifest(region_id, 1, spec_id, 1, None, None, 1, (), RegionStatus.ACTIVE, fields)
