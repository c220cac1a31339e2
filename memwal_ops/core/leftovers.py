"""What a commit that was killed leaves behind: a detached manifest, and its transaction file.

No reader looks at either; they cost space, and a clean-up by pylance takes what they name for
needed. Ours are told by their transaction properties (design, "One way to commit"); those of others
are not touched.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, read_version_manifest
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.format.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.core.table import Table

# A commit lives for seconds between its detached manifest and its version; an hour is a process that is gone.
_ABANDONED_AFTER = timedelta(hours=1)
_JOB_PROPERTY = "memwal-ops.job"


def sweep_leftovers(table: Table, *, abandoned_after: timedelta = _ABANDONED_AFTER) -> int:
    """Delete detached manifests of ours that nobody will publish any more. One listing where there are none.

    A transaction file goes with its manifest, unless the version after the one that it was built on
    names it: then the commit was killed after it had landed.

    Returns:
        How many objects were deleted.
    """
    young = datetime.now(UTC) - abandoned_after
    doomed: list[str] = []
    for meta in table.store.list(VERSIONS_FOLDER, after=f"{VERSIONS_FOLDER}/d"):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or not name.detached or meta.last_modified >= young:
            continue
        try:
            left = decode_version_manifest(table.store.get(meta.path))
        except (ObjectNotFoundError, InvalidFormatError):
            continue
        if left.transaction is None or _JOB_PROPERTY not in left.transaction.transaction_properties:
            continue
        doomed.append(meta.path)
        file = left.manifest.transaction_file
        built_on = left.transaction.read_version
        if file and built_on < table.version and _transaction_file(table, built_on + 1) != file:
            doomed.append(f"{TRANSACTIONS_FOLDER}/{file}")
    return table.store.delete_many(doomed).deleted if doomed else 0


def _transaction_file(table: Table, version: int) -> str | None:
    try:
        return read_version_manifest(table.store, version, table.naming).manifest.transaction_file
    except ObjectNotFoundError:
        return None
