"""Read, replace and restore the parts of a Lance table that ``repair`` fixes.

Versions and region manifests are never rewritten: a part of one is replaced by publishing the next version or manifest
with the new content. So the contents that are compared here do not include the number.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.quarantine import ObjectPlace, Place
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, VersionGoneError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, IndexChange, commit_built
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.indexes.snapshots import snapshot_path
from memwal_ops.formats.lance.jobs.catchup.publishing import publish_change
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.memwal_index import with_snapshot

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OBJECTS = re.compile(
    rf"object:(_mem_wal/{_UUID}/(?:manifest/(?:version_hint\.json|[01]{{64}}\.binpb)|wal/[01]{{64}}\.(?:lance|arrow))"
    r"|_transactions/[^/]+\.txn)"
)
_REGION = re.compile(rf"region:({_UUID})")
_CATCHUP = re.compile(r"catchup:(.+)", re.DOTALL)
_DELETION_FILES = 1  # a feature flag
# The number of versions that are searched for the one that had the rows.
_MAX_SEARCHED_VERSIONS = 100


def place_of(table: Table, name: str) -> Place:
    """The place of that name.

    Raises:
        InvalidFormatError: no repair replaces such a place.
    """
    if (match := _OBJECTS.fullmatch(name)) is not None:
        return ObjectPlace(table.store, match[1])
    if (match := _REGION.fullmatch(name)) is not None:
        return RegionPlace(table, UUID(match[1]))
    if (match := _CATCHUP.fullmatch(name)) is not None:
        return CatchupPlace(table, match[1])
    if name == SnapshotPlace.name:
        return SnapshotPlace(table)
    if name == RowsPlace.name:
        return RowsPlace(table)
    raise InvalidFormatError(f"{name!r:.80} is not a place that repair replaces in a Lance table.")


@dataclass(frozen=True)
class RegionPlace:
    """The content of a region's newest manifest."""

    table: Table
    region_id: UUID

    @property
    def name(self) -> str:
        """See the interface."""
        return f"region:{self.region_id}"

    def read(self) -> bytes:
        """See the interface. Raises ``RegionManifestCorruptError``, ``RegionManifestGapError``."""
        return without_number(self.table.region(self.region_id).latest(checked=True).source)

    def swap(self, seen: bytes | None, data: bytes | None) -> bool:
        """Publish the next manifest, by put-if-absent, if the newest one still has the content ``seen``."""
        region = self.table.region(self.region_id)
        newest = region.latest(checked=True)
        if data is None or without_number(newest.source) != seen:
            return False
        message = memwal_pb2.RegionManifest.FromString(data)
        message.version = newest.version + 1
        return region.publish(message.version, message.SerializeToString(deterministic=True), newest.source)


def without_number(manifest: bytes) -> bytes:
    """The bytes of a region manifest, as if it had no version number; lists keep their order."""
    message = memwal_pb2.RegionManifest.FromString(manifest)
    message.ClearField("version")
    return message.SerializeToString(deterministic=True)


@dataclass(frozen=True)
class CatchupPlace:
    """The entry of one index in ``index_catchup``, as stored."""

    table: Table
    index: str

    @property
    def name(self) -> str:
        """See the interface."""
        return f"catchup:{self.index}"

    def read(self) -> bytes | None:
        """See the interface."""
        return catchup_entry(self.table.newest().index.details, self.index)

    def swap(self, seen: bytes | None, data: bytes | None) -> bool:
        """Publish the next version with that entry, if the newest one still has ``seen``."""

        def change(table: Table) -> IndexChange | None:
            details = table.index.details
            return None if catchup_entry(details, self.index) != seen else IndexChange(self._with(details, data))

        newest = self.table.newest()
        return publish_change(newest, change, CommitNote.new("repair"), CommitRetry()) is not newest

    def _with(self, details: memwal_pb2.MemWalIndexDetails, data: bytes | None) -> memwal_pb2.MemWalIndexDetails:
        changed = memwal_pb2.MemWalIndexDetails()
        changed.CopyFrom(details)
        del changed.index_catchup[:]
        changed.index_catchup.extend(one for one in details.index_catchup if one.index_name != self.index)
        if data is not None:
            changed.index_catchup.append(memwal_pb2.IndexCatchupProgress.FromString(data))
        return changed


def catchup_entry(details: memwal_pb2.MemWalIndexDetails, index: str) -> bytes | None:
    """The entry of an index as stored; None: it has none."""
    found = next((one for one in details.index_catchup if one.index_name == index), None)
    return None if found is None else found.SerializeToString(deterministic=True)


@dataclass(frozen=True)
class SnapshotPlace:
    """The region snapshot: its time, and its rows inside the index or in a file."""

    table: Table
    name = "snapshot:"

    def read(self) -> bytes:
        """See the interface."""
        index = self.table.newest().index
        try:
            rows = self.table.store.get(snapshot_path(index.uuid)) if index.inline_snapshots is None else None
        except ObjectNotFoundError:
            rows = None
        return snapshot_content(index.details, index.uuid, rows)

    def swap(self, seen: bytes | None, data: bytes | None) -> bool:
        """Publish the next version with that snapshot, if the newest one still has ``seen``."""
        if data is None:
            return False
        document = json.loads(data)
        inline, rows = (
            None if document[key] is None else base64.b64decode(document[key]) for key in ("inline", "file")
        )
        file_id = None if document["uuid"] is None else UUID(document["uuid"])
        done = False

        def change(table: Table) -> IndexChange | None:
            nonlocal done
            done = self.read() == seen
            if not done:
                return None
            if rows is not None and file_id is not None:
                self.table.store.put_if_absent(snapshot_path(file_id), rows)
            details = with_snapshot(
                table.index.details,
                timestamp_millis=document["timestamp_millis"],
                num_regions=document["num_regions"],
                inline=inline,
            )
            return IndexChange(details, uuid=file_id)

        publish_change(self.table.newest(), change, CommitNote.new("repair"), CommitRetry())
        return done


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


@dataclass(frozen=True)
class RowsPlace:
    """The fragments of the newest version: the files of its rows and deletions."""

    table: Table
    name = "rows:"

    def read(self) -> bytes:
        """See the interface."""
        return fragments_of(self.table.newest().manifest.manifest)

    def swap(self, seen: bytes | None, data: bytes | None) -> bool:
        """Publish the next version with these fragments, if the newest one still has ``seen``.

        Raises:
            VersionGoneError: no version with these fragments is left: their files may be gone.
        """
        newest = self.table.newest()
        if data is None or fragments_of(newest.manifest.manifest) != seen:
            return False
        manifest = table_pb2.Manifest()
        manifest.CopyFrom(newest.manifest.manifest)
        del manifest.fragments[:]
        manifest.fragments.extend(table_pb2.Manifest.FromString(data).fragments)
        if manifest.fragments:
            highest = max(one.id for one in manifest.fragments)
            manifest.max_fragment_id = max(highest, manifest.max_fragment_id)
        if any(one.HasField("deletion_file") for one in manifest.fragments):
            manifest.reader_feature_flags |= _DELETION_FILES
            manifest.writer_feature_flags |= _DELETION_FILES
        transaction = table_pb2.Transaction(read_version=newest.version, uuid=str(uuid.uuid4()))
        transaction.transaction_properties.update(CommitNote.new("repair").properties())
        # From this, the schema history determines the version that these fragments come from.
        transaction.restore.version = _version_with(newest, data)
        try:
            commit_built(newest, replace(newest.manifest, manifest=manifest), transaction)
        except CommitLostError:
            return False
        return True


def _version_with(table: Table, fragments: bytes) -> int:
    for version in range(table.version - 1, max(0, table.version - _MAX_SEARCHED_VERSIONS), -1):
        try:
            manifest = read_version_manifest(table.store, version, table.naming).manifest
        except (ObjectNotFoundError, InvalidFormatError):
            continue
        if fragments_of(manifest) == fragments:
            return version
    raise VersionGoneError("No version that had these rows exists any more.")


def fragments_of(manifest: table_pb2.Manifest) -> bytes:
    """The fragments of a version, encoded."""
    return table_pb2.Manifest(fragments=manifest.fragments).SerializeToString(deterministic=True)
