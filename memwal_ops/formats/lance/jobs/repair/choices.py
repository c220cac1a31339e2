"""The choices for findings without a safe fix, with their consequences; and the parts of a table that repair replaces.

Versions and region manifests are never rewritten: a part of one is replaced by publishing the next version or manifest
with the new content. So the contents that are compared here do not include the number.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.quarantine import Place, object_place
from memwal_ops.core.repair import Choice
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, VersionGoneError
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.indexes.snapshots import snapshot_path
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.memwal_index import with_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.table import Table


_leave = partial(Choice, "Leave it as it is.")
_WAIT = _leave("Merges of the region stop there; its log and its generations grow.")
_REGION_BACKUP = Choice(
    "Stop the region's writer, and restore the region's folder as a whole from one backup.",
    "Rows that were acknowledged after the backup was taken are lost, unless their log entries are kept and replayed.",
)
_NEW_REGION = Choice(
    "Stop the region's writer, let it write to a new region, and leave the old folder for a later decision.",
    "The unmerged rows of the old region are not merged, and older rows of their keys stay visible.",
)
# No choice moves an unreadable generation away: until it is written again, its entry in the manifest has to keep
# blocking merges; readers could not open its intact files any more; and a restore needs the folder at its path.
_GENERATION = (
    Choice(
        "Restore the generation's folder, with all its files under the same names, from a backup or the bucket's "
        "versions; then merge.",
        "None: a generation is never rewritten, so every copy is correct.",
    ),
    _leave(
        "Its position blocks the region's merges, so that no row is skipped; readers of the region fail or miss it."
    ),
)
_LOG = (
    Choice(
        "Restore the entry from a backup or the bucket's versions.", "None: an entry of the log is never rewritten."
    ),
    _leave("A replay stops at the entry: rows that were acknowledged above it are lost to it."),
)

CHOICES: Mapping[str, tuple[Choice, ...]] = {
    "base_file": (
        Choice(
            "If it is a file of an index: memwal-ops catchup URI --index NAME --rebuild.",
            "None: an index is built of the rows. Of one with a codebook of a log, the command names what else to do.",
        ),
        Choice("Restore the file from a backup or the bucket's versions.", "None: Lance never rewrites a file."),
        Choice(
            "Return to the newest version that does not need the file: lance.dataset(URI, version=N).restore().",
            "What was committed since version N is lost to readers; merge progress is reverted with it, and "
            "generations that gc has collected since cannot be merged again. Hold version N first; run no gc and no "
            "expire.",
        ),
        _leave("Scans that reach the file fail. Run no gc and no expire meanwhile."),
    ),
    "version_emptied": (
        Choice(
            "If the rows were not deleted on purpose: hold the version before, then "
            "lance.dataset(URI, version=N).restore().",
            "What was committed since is lost to readers.",
        ),
        Choice("If they were deleted on purpose: nothing.", "None."),
    ),
    "version_manifest": (
        Choice("Restore the manifest from a backup or the bucket's versions.", "None: it is never rewritten."),
        _leave("Readers of that version fail; gc and expire delete nothing."),
    ),
    "version_unreadable": (
        Choice("Restore the file from a backup or the bucket's versions.", "None: Lance never rewrites a file."),
        Choice(
            "memwal-ops expire URI --apply; before it, delete the tag or branch that keeps the version, or release the "
            "hold.",
            "The version is deleted; it could not be read.",
        ),
    ),
    "transaction_file": (
        Choice("Nothing: the next commit names its own.", "A commit that began before this version fails once."),
    ),
    "tag": (
        Choice("Delete the tag.", "Its readers fail with another message."),
        Choice("Set it to a version that exists.", "Its readers get the rows of another version."),
    ),
    "maintained_index": (
        Choice("Create the index.", "A scan of the base table."),
        Choice("Initialise MemWAL without it.", "Queries of unmerged rows do not use it."),
    ),
    **dict.fromkeys(("generation_missing", "generation_corrupt", "generation", "generation_rows"), _GENERATION),
    "merged_generation_missing": (
        Choice("Restore its folder from a backup or the bucket's versions.", "None: a generation is never rewritten."),
        Choice(
            "memwal-ops catchup URI, and expire the versions that need it; then repair removes it from the list.",
            "The older versions are deleted.",
        ),
        _leave("Readers of those versions, or by an index that lacks its rows, fail."),
    ),
    "schema_projection": (
        Choice(
            "Change the base table back to the generation's columns, merge, and change them again.",
            "Readers see the old columns meanwhile.",
        ),
        _WAIT,
    ),
    "region_manifest_corrupt": (
        Choice("Restore that manifest version from a backup or the bucket's versions.", "None: it is never rewritten."),
        _REGION_BACKUP,
        _WAIT,
    ),
    "region_manifest_gap": (
        Choice(
            "Restore the missing manifest versions from a backup or the bucket's versions.",
            "None: a manifest version is never rewritten.",
        ),
        _WAIT,
    ),
    "old_manifest": (
        Choice("Nothing: gc deletes it when newer ones are enough.", "gc keeps the region's orphans until then."),
    ),
    "snapshot": (
        _REGION_BACKUP,
        Choice(
            "If the region's manifests are right: memwal-ops snapshot URI takes another.",
            "Generations that only the old snapshot names are no longer visible to any reader.",
        ),
    ),
    "region_replaced": (
        Choice(
            "memwal-ops adopt URI --as merged", "If it is another region after all, its generations are never merged."
        ),
        Choice(
            "memwal-ops adopt URI --as unmerged",
            "If it is the old region after all, older rows of its keys may overwrite newer ones.",
        ),
        _WAIT,
    ),
    "progress": (
        Choice(
            "Restore the region's folder, or the base table, so that both are of the same time.",
            "What was written to the restored part after its backup is lost.",
        ),
        _NEW_REGION,
    ),
    **dict.fromkeys(("writer_epoch", "current_generation", "replay_after_wal_id"), (_REGION_BACKUP, _NEW_REGION)),
    **dict.fromkeys(("wal_gap", "wal_entry"), _LOG),
    "wal_epoch": (
        Choice(
            "Stop the region's writers, and find out which of them wrote the entries; then open a new region.",
            "Rows of the fenced writer were not acknowledged as durable if it followed the specification; its "
            "producers have to send them again.",
        ),
        _REGION_BACKUP,
    ),
    "null_keys": (
        Choice("Give the rows keys, or delete them.", "They count as other rows, or are deleted."),
        _leave("No merge can update or delete them; a generation with such rows is not merged."),
    ),
    "duplicate_keys": (
        Choice(
            "Find out which row is correct, and delete the others by row id.",
            "Readers of older versions still get all of them.",
        ),
        _leave("Readers get the key more than once, until a merge replaces all of its rows by one."),
    ),
    "shared_keys": (
        Choice(
            "Route each key to one region, and delete its rows in the other one through that region's writer.",
            "The row is deleted; memwal-ops cannot determine which of the two is newer.",
        ),
        _leave("Merges of both regions stop."),
    ),
}

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OBJECTS = re.compile(
    rf"object:(_mem_wal/{_UUID}/(?:manifest/(?:version_hint\.json|[01]{{64}}\.binpb)|wal/[01]{{64}}\.(?:lance|arrow))"
    r"|_transactions/[^/]+\.txn)"
)
_REGION = re.compile(rf"region:({_UUID})")
_CATCHUP = re.compile(r"catchup:(.+)", re.DOTALL)
SNAPSHOT, ROWS = "snapshot:", "rows:"
_DELETION_FILES = 1  # a feature flag
# The number of versions that are searched for the one that had the rows.
_MAX_SEARCHED_VERSIONS = 100


def place_of(table: Table, name: str) -> Place:
    """The place of that name. Raises ``InvalidFormatError``: no repair replaces such a place."""
    if (match := _OBJECTS.fullmatch(name)) is not None:
        return object_place(table.store, match[1])
    if (match := _REGION.fullmatch(name)) is not None:
        return region_place(table, UUID(match[1]))
    if (match := _CATCHUP.fullmatch(name)) is not None:
        return catchup_place(table, match[1])
    if name == SNAPSHOT:
        return snapshot_place(table)
    if name == ROWS:
        return rows_place(table)
    raise InvalidFormatError(f"{name!r:.80} is not a place that repair replaces in a Lance table.")


def region_place(table: Table, region_id: UUID) -> Place:
    """The content of a region's newest manifest; the next one is published by put-if-absent.

    Both raise ``RegionManifestCorruptError``, ``RegionManifestGapError``.
    """
    region = table.region(region_id)

    def swap(seen: bytes | None, data: bytes | None) -> bool:
        newest = region.latest(checked=True)
        if data is None or without_number(newest.source) != seen:
            return False
        message = memwal_pb2.RegionManifest.FromString(data)
        message.version = newest.version + 1
        return region.publish(message.version, message.SerializeToString(deterministic=True), newest.source)

    return Place(f"region:{region_id}", lambda: without_number(region.latest(checked=True).source), swap)


def without_number(manifest: bytes) -> bytes:
    """The bytes of a region manifest, as if it had no version number; lists keep their order."""
    message = memwal_pb2.RegionManifest.FromString(manifest)
    message.ClearField("version")
    return message.SerializeToString(deterministic=True)


def catchup_place(table: Table, index: str) -> Place:
    """The entry of one index in ``index_catchup``, as stored."""

    def swap(seen: bytes | None, data: bytes | None) -> bool:
        def change(table: Table) -> commit.IndexChange | None:
            details = table.index.details
            if catchup_entry(details, index) != seen:
                return None
            changed = memwal_pb2.MemWalIndexDetails()
            changed.CopyFrom(details)
            del changed.index_catchup[:]
            changed.index_catchup.extend(entry for entry in details.index_catchup if entry.index_name != index)
            if data is not None:
                changed.index_catchup.append(memwal_pb2.IndexCatchupProgress.FromString(data))
            return commit.IndexChange(changed)

        newest = table.newest()
        return commit.publish_change(newest, change, commit.CommitNote("repair"), CommitRetry()) is not newest

    return Place(f"catchup:{index}", lambda: catchup_entry(table.newest().index.details, index), swap)


def catchup_entry(details: memwal_pb2.MemWalIndexDetails, index: str) -> bytes | None:
    """The entry of an index as stored; None: it has none."""
    entry = next((entry for entry in details.index_catchup if entry.index_name == index), None)
    return None if entry is None else entry.SerializeToString(deterministic=True)


def snapshot_place(table: Table) -> Place:
    """The region snapshot: its time, and its rows inside the index or in a file."""

    def read() -> bytes:
        index = table.newest().index
        try:
            rows = table.store.get(snapshot_path(index.uuid)) if index.inline_snapshots is None else None
        except ObjectNotFoundError:
            rows = None
        return snapshot_content(index.details, index.uuid, rows)

    def swap(seen: bytes | None, data: bytes | None) -> bool:
        if data is None:
            return False
        document = json.loads(data)
        stored = (document["inline"], document["file"])
        inline, rows = (None if data is None else base64.b64decode(data) for data in stored)
        file_id = None if document["uuid"] is None else UUID(document["uuid"])
        done = False

        def change(table: Table) -> commit.IndexChange | None:
            nonlocal done
            done = read() == seen
            if not done:
                return None
            if rows is not None and file_id is not None:
                table.store.put_if_absent(snapshot_path(file_id), rows)
            known = {key: document[key] for key in ("timestamp_millis", "num_regions")}
            return commit.IndexChange(with_snapshot(table.index.details, **known, inline=inline), uuid=file_id)

        commit.publish_change(table.newest(), change, commit.CommitNote("repair"), CommitRetry())
        return done

    return Place(SNAPSHOT, read, swap)


def snapshot_content(details: memwal_pb2.MemWalIndexDetails, file_id: UUID | None, rows: bytes | None) -> bytes:
    """A snapshot as one document; ``rows`` are those of its file, which is named by the index's id ``file_id``."""
    inline = details.inline_snapshots if details.HasField("inline_snapshots") else None
    document = {
        "timestamp_millis": details.snapshot_ts_millis,
        "num_regions": details.num_regions,
        "inline": None if inline is None else base64.b64encode(inline).decode(),
        "uuid": None if inline is not None else str(file_id),
        "file": None if inline is not None or rows is None else base64.b64encode(rows).decode(),
    }
    return json.dumps(document).encode()


def rows_place(table: Table) -> Place:
    """The fragments of the newest version: the files of its rows and deletions.

    To replace them raises ``VersionGoneError`` if no version with such fragments is left: their files may be gone.
    """

    def swap(seen: bytes | None, data: bytes | None) -> bool:
        newest = table.newest()
        if data is None or fragments_of(newest.manifest.manifest) != seen:
            return False
        manifest = table_pb2.Manifest()
        manifest.CopyFrom(newest.manifest.manifest)
        del manifest.fragments[:]
        manifest.fragments.extend(table_pb2.Manifest.FromString(data).fragments)
        if manifest.fragments:
            highest = max(fragment.id for fragment in manifest.fragments)
            manifest.max_fragment_id = max(highest, manifest.max_fragment_id)
        if any(fragment.HasField("deletion_file") for fragment in manifest.fragments):
            manifest.reader_feature_flags |= _DELETION_FILES
            manifest.writer_feature_flags |= _DELETION_FILES
        transaction = commit.CommitNote("repair").transaction(newest.version)
        # From this, the schema history determines the version that these fragments come from.
        transaction.restore.version = _version_with(newest, data)
        try:
            commit.commit_built(newest, replace(newest.manifest, manifest=manifest), transaction)
        except commit.CommitLostError:
            return False
        return True

    return Place(ROWS, lambda: fragments_of(table.newest().manifest.manifest), swap)


def _version_with(table: Table, fragments: bytes) -> int:
    for version in range(table.version - 1, max(0, table.version - _MAX_SEARCHED_VERSIONS), -1):
        earlier = table.manifest_of(version)
        if earlier is not None and fragments_of(earlier.manifest) == fragments:
            return version
    raise VersionGoneError("No version that had these rows exists any more.")


def fragments_of(manifest: table_pb2.Manifest) -> bytes:
    """The fragments of a version, encoded."""
    return table_pb2.Manifest(fragments=manifest.fragments).SerializeToString(deterministic=True)
