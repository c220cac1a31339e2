"""What a commit that was killed leaves behind: a detached manifest, and its transaction file.

No reader looks at either; they cost space, and a clean-up by pylance takes what they name for
needed. Ours are told by their transaction properties (design, "One way to commit"); those of others
are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, read_version_manifest
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.format.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.table import Table
    from memwal_ops.storage.api import ObjectMeta

# A commit lives for seconds between its detached manifest and its version; an hour is a process that is gone.
_ABANDONED_AFTER = timedelta(hours=1)
_JOB_PROPERTY = "memwal-ops.job"
_RUN_PROPERTY = "memwal-ops.run_id"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A detached manifest; ``job`` and ``run_id`` are None where it is not ours.

    ``transaction`` is the transaction file that goes with it, unless a version names that file: then the
    commit was killed after it had landed.
    """

    manifest: ObjectMeta
    job: str | None
    run_id: str | None
    transaction: str | None


def find_leftovers(table: Table) -> Iterator[Leftover]:
    """All detached manifests, whoever made them and however young. One listing where there are none."""
    for meta in table.store.list(VERSIONS_FOLDER, after=f"{VERSIONS_FOLDER}/d"):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or not name.detached:
            continue
        try:
            left = decode_version_manifest(table.store.get(meta.path))
        except ObjectNotFoundError:
            continue
        except InvalidFormatError:
            yield Leftover(meta, None, None, None)
            continue
        properties = {} if left.transaction is None else left.transaction.transaction_properties
        if left.transaction is None or _JOB_PROPERTY not in properties:
            yield Leftover(meta, None, None, None)
            continue
        file = left.manifest.transaction_file
        built_on = left.transaction.read_version
        if not file or built_on >= table.version or _transaction_file(table, built_on + 1) == file:
            file = ""
        path = f"{TRANSACTIONS_FOLDER}/{file}" if file else None
        yield Leftover(meta, properties[_JOB_PROPERTY], properties.get(_RUN_PROPERTY), path)


def sweep_leftovers(table: Table, *, abandoned_after: timedelta = _ABANDONED_AFTER) -> int:
    """Delete detached manifests of ours that nobody will publish any more. One listing where there are none.

    Returns:
        How many objects were deleted.
    """
    young = datetime.now(UTC) - abandoned_after
    doomed = [
        path
        for left in find_leftovers(table)
        if left.job is not None and left.manifest.last_modified < young
        for path in (left.manifest.path, left.transaction)
        if path is not None
    ]
    return table.store.delete_many(doomed).deleted if doomed else 0


def _transaction_file(table: Table, version: int) -> str | None:
    try:
        return read_version_manifest(table.store, version, table.naming).manifest.transaction_file
    except ObjectNotFoundError:
        return None
