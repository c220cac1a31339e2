"""Mark columns of a plain Lance table as its primary key, after checking their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.published import record
from memwal_ops.errors import DuplicateKeysError, InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lance.answers.asked_index import Reader
from memwal_ops.formats.lance.checks.rows import check_keys
from memwal_ops.formats.lance.commit.publication import commit_lost
from memwal_ops.formats.lance.files.datasets import is_commit_conflict, lance_errors, open_dataset
from memwal_ops.formats.lance.wire.version_manifest import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memwal_ops.formats.lance.table import Table

_FLAG = "lance-schema:unenforced-primary-key"
_POSITION = "lance-schema:unenforced-primary-key:position"


def check_primary_key(table: Table, columns: Sequence[str]) -> bool:
    """Check that ``columns`` may be marked; return whether they are not marked yet. Memory: these columns.

    Raises:
        InvalidUsageError: a column is missing, or the table has another primary key, which Lance never changes.
        DuplicateKeysError: a value is NULL or duplicate: all but one of these rows would be lost in a merge.
    """
    uri = table.location.uri
    if table.primary_key:
        if table.primary_key != (*columns,):
            raise InvalidUsageError(
                f"{uri} has the primary key {', '.join(table.primary_key)}, which Lance never changes.",
                remedy="Leave --primary-key out; or copy the rows to a new table.",
            )
        return False
    missing = sorted({*columns} - {*table.schema.names})
    if missing or len({*columns}) < len(columns):
        raise InvalidUsageError(f"{uri} has no column {', '.join(missing)}." if missing else "A column is named twice.")
    for fault in check_keys(table, columns, Reader()):
        raise DuplicateKeysError(
            f"{', '.join(columns)} cannot be the primary key of {uri}: {fault.evidence}",
            remedy="Remove these rows, or choose other columns.",
        )
    return True


def mark_primary_key(table: Table, columns: Sequence[str]) -> None:
    """Mark columns as the primary key, in this order, and as never NULL: two commits of pylance.

    Raises:
        CommitLostError: a concurrent commit conflicted, perhaps with rows that were not checked: check again.
        StorageError: the store failed: run it again.
        UnsupportedFeatureError: writers need a feature that this release does not support; pylance may drop its flag.
    """
    check_writable(table.manifest.manifest)
    table.guard.check()
    try:
        _mark(table, columns)
    except MemwalOpsError as error:
        if is_commit_conflict(error):
            raise commit_lost(table, table.version + 1) from error
        raise


def _mark(table: Table, columns: Sequence[str]) -> None:
    with lance_errors("mark the primary key of", table.location.uri):
        dataset = open_dataset(table.location, version=table.version)
        nullable = [name for name in columns if dataset.schema.field(name).nullable]
        if nullable:
            changes: list[Any] = [{"path": name, "nullable": False} for name in nullable]
            dataset.alter_columns(*changes)
            record(int(dataset.version))
        marks: dict[str, dict[str, str | None]] = {
            name: {_FLAG: "true"} if len(columns) == 1 else {_FLAG: "true", _POSITION: str(position)}
            for position, name in enumerate(columns, 1)
        }
        dataset.update_field_metadata(marks)
        record(int(dataset.version))
