"""Detect versions that lost all rows by a commit of MemWAL states, and restore the rows.

Releases of Lance with the legacy index drop the fragments when they commit only a change of states
(lance#8438): the version that records the change has no rows. Older versions still have them, until they are cleaned
up. A merge or a migration on top of such a version would make the loss permanent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, read_version_manifest
from memwal_ops.formats.lance.legacy.publish import Draft, draft_of, live_rows, publish
from memwal_ops.formats.lance.legacy.states import Change
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME, find_memwal_entry

if TYPE_CHECKING:
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store


@dataclass(frozen=True, slots=True)
class Emptied:
    """A newest version that state commits emptied.

    Attributes:
        version: the newest one.
        source: the newest earlier version that has rows; None: earlier versions no longer exist, so it is not known
            whether there were any.
        rows: of the source.
    """

    version: int
    source: int | None
    rows: int

    def error(self, job: str) -> TableCorruptError:
        """The refusal of a job, which names the restore."""
        if self.source is None:
            return TableCorruptError(
                f"Version {self.version} has no rows: a commit of MemWAL states may have dropped them, and the "
                "versions before it no longer exist.",
                remedy="Restore the table from a backup; or, if it never had rows, append one and run the command "
                "again.",
            )
        return TableCorruptError(
            f"Version {self.version} has no rows, because a commit of MemWAL states dropped them (lance#8438); version "
            f"{self.source} has {self.rows:,}.",
            remedy=f"Run memwal-ops {job} URI --restore: a new version then has the rows of version {self.source} and "
            f"the MemWALs of version {self.version}. Let no clean-up of old versions run before that.",
        )


def find_emptied(table: Table) -> Emptied | None:
    """Whether the table's version was emptied; one or two requests for each state commit since, none if it has rows."""
    newest, version = table.manifest, table.version
    if newest.manifest.fragments:
        return None
    while version > 1:
        try:
            before = read_version_manifest(table.store, version - 1, table.naming)
        except (ObjectNotFoundError, InvalidFormatError):
            return Emptied(table.version, None, 0) if commits_states(table.store, newest, None) else None
        if not commits_states(table.store, newest, before):
            return None
        if before.manifest.fragments:
            return Emptied(table.version, version - 1, live_rows(before.manifest.fragments))
        newest, version = before, version - 1
    return None


def restore_emptied(table: Table, emptied: Emptied, note: CommitNote) -> int:
    """Publish a version with the rows and indexes of ``emptied.source``, and the MemWALs as they are now.

    Raises:
        TableCorruptError: the source is gone, or has other columns.
        MemwalOpsError: as :func:`memwal_ops.formats.lance.legacy.publish.publish`.
    """
    if emptied.source is None:
        raise emptied.error(note.job)
    source = read_version_manifest(table.store, emptied.source, table.naming)
    if list(source.manifest.fields) != list(table.manifest.manifest.fields):
        raise TableCorruptError(
            f"Version {emptied.source}, which has the rows that a commit of MemWAL states dropped, has other columns.",
            remedy=f"Restore it by dataset.checkout_version({emptied.source}) and restore(), which also reverts the "
            "MemWALs' states: stop their writers before, and let them replay their logs after.",
        )
    rows = draft_of(source)
    highest = draft_of(table.manifest).max_fragment_id
    known = [one for one in (rows.max_fragment_id, highest) if one is not None]
    return publish(table, Change(), note, Draft(rows.fragments, max(known, default=None), rows.indexes))


def commits_states(store: Store, version: VersionManifest, before: VersionManifest | None) -> bool:
    """Whether a version was made by a change of MemWAL states; by what changed, where its transaction is gone."""
    transaction = transaction_of(store, version)
    if transaction is not None:
        return transaction.HasField("update_mem_wal_state")
    return before is None or _index_id(version) not in {None, _index_id(before)}


def transaction_of(store: Store, version: VersionManifest) -> table_pb2.Transaction | None:
    """The transaction that made a version, from inside its manifest or from its file; None where it is gone."""
    if version.transaction is not None:
        return version.transaction
    file = version.manifest.transaction_file
    transaction = table_pb2.Transaction()
    try:
        if not file:
            return None
        transaction.ParseFromString(store.get(f"{TRANSACTIONS_FOLDER}/{file}"))
    except (ObjectNotFoundError, DecodeError):
        return None
    return transaction


def _index_id(version: VersionManifest) -> bytes | None:
    entry = find_memwal_entry(version.indexes)
    return None if entry is None or entry.name != MEMWAL_INDEX_NAME else entry.uuid.uuid
