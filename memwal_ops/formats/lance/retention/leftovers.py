"""Find and delete the leftovers of killed commits: detached manifests with their transaction files, staged manifests.

No reader opens either; they use space, and a clean-up by pylance keeps the files to which they refer. Leftovers of
memwal-ops are recognized by their transaction properties (docs/jobs.md); those of other writers are never deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.anchors import delete_proven
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableReplacedError
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, VERSIONS_FOLDER, read_version_manifest
from memwal_ops.formats.lance.retention.identity import table_anchor
from memwal_ops.formats.lance.retention.live_versions import named_versions
from memwal_ops.formats.lance.wire.names import JOB_PROPERTY, parse_staged_manifest_name, parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.clock import store_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

# A commit takes seconds between its detached manifest and its version; after an hour its process is dead.
_ABANDONED_AFTER = timedelta(hours=1)
# A manifest that is staged may be any writer's, whose catalog may still publish it; as old as other unfinished files.
_STAGED_AGE = timedelta(days=7)
_RUN_PROPERTY = "memwal-ops.run_id"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A detached manifest, and its number. ``job`` and ``run_id`` are None if memwal-ops did not write it.

    ``transaction`` is its transaction file, unless a version refers to that file: then the
    commit was killed after it had been published.
    """

    manifest: ObjectMeta
    version: int
    job: str | None
    run_id: str | None
    transaction: str | None


def find_leftovers(table: Table) -> Iterator[Leftover]:
    """All detached manifests, of any writer and any age. One listing if there are none."""
    for meta in table.store.list(VERSIONS_FOLDER, after=f"{VERSIONS_FOLDER}/d"):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is None or not name.detached:
            continue
        try:
            left = decode_version_manifest(table.store.get(meta.path))
        except ObjectNotFoundError:
            continue
        except InvalidFormatError:
            yield Leftover(meta, name.version, None, None, None)
            continue
        properties = {} if left.transaction is None else left.transaction.transaction_properties
        if left.transaction is None or JOB_PROPERTY not in properties:
            yield Leftover(meta, name.version, None, None, None)
            continue
        file = left.manifest.transaction_file
        built_on = left.transaction.read_version
        if not file or built_on >= table.version or _transaction_file(table, built_on + 1) == file:
            file = ""
        path = f"{TRANSACTIONS_FOLDER}/{file}" if file else None
        yield Leftover(meta, name.version, properties[JOB_PROPERTY], properties.get(_RUN_PROPERTY), path)


def sweep_leftovers(table: Table, *, abandoned_after: timedelta = _ABANDONED_AFTER) -> int:
    """Delete abandoned detached manifests of memwal-ops. One listing if there are none.

    Ages are measured by the slower of the local clock and the store's; manifests to which a tag or a branch refers
    are kept at any age.

    Returns:
        How many objects were deleted; 0 if the table may have been replaced since ``table`` was read.
    """
    own = [left for left in find_leftovers(table) if left.job is not None]
    if not own:
        return 0
    old, named = store_time(table.store) - abandoned_after, named_versions(table)
    paths = [
        path
        for left in own
        if left.manifest.last_modified <= old and left.version not in named
        for path in (left.manifest.path, left.transaction)
        if path is not None
    ]
    return _deleted(table, paths)


def sweep_staged(table: Table) -> int:
    """Delete staged manifests that are a week old, of versions that were published since; no request if there are none.

    Returns:
        How many were deleted.
    """
    names = {meta: parse_staged_manifest_name(meta.path.rsplit("/", 1)[-1]) for meta in table.listed.files}
    past = [meta for meta, name in names.items() if name is not None and name.version <= table.version]
    old = store_time(table.store) - _STAGED_AGE if past else None
    paths = [meta.path for meta in past if old is not None and meta.last_modified <= old]
    return _deleted(table, paths)


def _deleted(table: Table, paths: list[str]) -> int:
    """Delete these files, unless the table may have been replaced since it was read."""
    try:
        return delete_proven(table.store, paths, [table_anchor(table)]).deleted if paths else 0
    except TableReplacedError:
        return 0


def _transaction_file(table: Table, version: int) -> str | None:
    try:
        return read_version_manifest(table.store, version, table.naming).manifest.transaction_file
    except ObjectNotFoundError:
        return None
