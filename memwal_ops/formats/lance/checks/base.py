"""Check the base table: the files of the newest version, the versions before it, and its transaction file."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memwal_ops.core.verification import Finding, Severity, finding_of
from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError, TableCorruptError, runbook
from memwal_ops.formats.lance.files.referenced_files import list_manifests, version_of_main
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER
from memwal_ops.formats.lance.retention.damage import damages
from memwal_ops.formats.lance.retention.live_versions import LiveVersions, tags_of
from memwal_ops.formats.lance.retention.unreadable_versions import check_versions
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import LOST_VALUES, decode_version_manifest, lost_dictionary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.formats.lance.table import Table

_PAGE = runbook(TableCorruptError.exit_code) or ""
# Without --deep, the number of newest version manifests that are decoded.
_NEWEST = 100


def check_files(table: Table) -> Iterator[Finding]:
    """Every file that the newest version needs exists and is complete, and so does its transaction file."""
    for damage in damages(table):
        yield Finding(
            Severity.ERROR, "base_file", damage.path, f"It {damage.why}.", "Scans of the newest version fail.",
            damage.remedy, _PAGE,
        )  # fmt: skip
    name = table.manifest.manifest.transaction_file
    if name and not _is_transaction(table, f"{TRANSACTIONS_FOLDER}/{name}"):
        yield Finding(
            Severity.WARNING, "transaction_file", f"{TRANSACTIONS_FOLDER}/{name}",
            "The newest version names it, and it is missing or damaged.",
            "A commit that began before this version cannot be compared with it, and fails.",
            "None: the next commit names its own.",
        )  # fmt: skip


def _is_transaction(table: Table, path: str) -> bool:
    try:
        return bool(table_pb2.Transaction.FromString(table.store.get(path)).uuid)
    except (ObjectNotFoundError, DecodeError):
        return False


def check_version_manifests(table: Table, *, deep: bool) -> Iterator[Finding]:
    """Each version's manifest has its own number inside and can be read; none lost all rows by a fault."""
    manifests = {
        version: path
        for path in list_manifests(table.store, VERSIONS_FOLDER)
        if (version := version_of_main(path)) is not None
    }
    kept = _kept(table)
    for version, path in sorted(check_versions(table, kept).unreadable.items()):
        if path == manifests.get(version):
            continue  # reported below
        evidence, keeper = f"{path} is missing or damaged.", kept.get(version)
        if keeper is not None:
            yield Finding(
                Severity.ERROR, "version_unreadable", f"version {version}", evidence,
                f"Readers of that version fail, and it is to be kept: {keeper}.",
                "Restore the file from a backup. If nobody needs the version: delete the tag or branch, or release the "
                "hold; memwal-ops expire URI deletes it then.", _PAGE,
            )  # fmt: skip
            continue
        yield Finding(
            Severity.WARNING, "version_unreadable", f"version {version}", evidence,
            "Readers of that version fail; the newest does not need the file.",
            "memwal-ops expire URI deletes the version once nothing keeps it.", runbook(26) or "",
        )  # fmt: skip
    rows_before = 0
    for version, path in sorted(manifests.items())[0 if deep else -_NEWEST :]:
        try:
            found = decode_version_manifest(table.store.get(path))
        except ObjectNotFoundError:
            continue  # expired meanwhile
        except InvalidFormatError as error:
            yield finding_of(
                TableCorruptError(f"It cannot be decoded: {error}"), "version_manifest", path,
                "Readers of that version fail, and gc and expire delete nothing.",
            )  # fmt: skip
            continue
        if found.manifest.version != version:
            yield Finding(
                Severity.ERROR, "version_manifest", path, f"Its content is that of version {found.manifest.version}.",
                "Readers of that version read another one, and gc and expire delete nothing.",
                "Restore the manifest from a backup.", _PAGE,
            )  # fmt: skip
        why = lost_dictionary(found) if version != table.version else None  # of the newest, with its files
        if why is not None:
            yield Finding(
                Severity.ERROR if version in kept else Severity.WARNING, "version_unreadable", path, f"It {why}.",
                "Readers of that version read other values, or fail.", LOST_VALUES, _PAGE,
            )  # fmt: skip
        rows = sum(fragment.physical_rows for fragment in found.manifest.fragments)
        if rows_before and not found.manifest.fragments and version == table.version:
            yield Finding(
                Severity.WARNING, "version_emptied", path,
                f"It has no fragments; the version before has {rows_before:,} rows.",
                "If the rows were not deleted on purpose, the newest version hides them.",
                f"If so: lance.dataset(URI, version={version - 1}).restore()", _PAGE,
            )  # fmt: skip
        rows_before = rows


def _kept(table: Table) -> Mapping[int, str]:
    """The versions that a tag, branch or hold keeps, and which; none if these cannot be read, which is a finding."""
    names = LiveVersions()
    try:
        names.read_names(table, datetime.now(UTC))
    except MemwalOpsError:
        return {}
    return names.protected()


def check_references(table: Table) -> Iterator[Finding]:
    """Tags on the table's branch name versions that are listed."""
    own = table.branch.name
    for name, (branch, version) in sorted(tags_of(table).items()):
        if branch == own and not table.has_revision(version):
            yield Finding(
                Severity.WARNING, "tag", f"the tag {name!r}", f"It names version {version}, which does not exist.",
                "Readers by that tag fail.", "Delete the tag, or set it to an existing version.", runbook(26) or "",
            )  # fmt: skip
