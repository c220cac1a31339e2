"""Read the Lance table that an index follows: its rows, those that match a filter, and the changes since a version.

Uses only pylance. The table's history determines whether the index can follow it: a restore creates a version with a
higher number and older rows, and may assign the same row ids to other rows, which version numbers do not show.
"""

from __future__ import annotations

import enum
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops import errors
from memwal_ops.core.erasure import record_follower
from memwal_ops.core.registry import open_table
from memwal_ops.formats.lm_diskann.errors import COPY_FOLLOW, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import io_error, replace_file
from memwal_ops.formats.transactions import read_transaction
from memwal_ops.log import get_logger
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from numpy.typing import NDArray


FOLLOW = "follow.json"
_ROWS = 16_384
_ROW_ID = "_rowid"


class IndexUnusableError(errors.TableReplacedError):
    """The index cannot follow its table any more, and is not searched until it was rebuilt."""

    remedy = "Run memwal-ops catchup --rebuild on the index folder."


class Unusable(enum.IntEnum):
    """Why an index cannot follow its table any more; stored in the state of the index."""

    RESTORED = 1
    OVERWRITTEN = 2
    GAP = 3
    REPLACED = 4

    @property
    def text(self) -> str:
        """The reason, as the rest of a sentence."""
        return {
            Unusable.RESTORED: "the table was restored to an earlier version",
            Unusable.OVERWRITTEN: "the table was overwritten",
            Unusable.GAP: "versions that the index has not seen were expired",
            Unusable.REPLACED: "the table was replaced by another one",
        }[self]


@dataclass(frozen=True)
class Source:
    """The Lance table that an index follows, and its vectors; fixed at its creation, in ``follow.json``.

    ``key`` is the int64 column that is the row id; None: the table's stable row ids are.
    """

    uri: str
    column: str
    key: str | None

    def write(self, folder: str) -> None:
        """Write it into a folder that is being created."""
        replace_file(folder, FOLLOW, [json.dumps(asdict(self)).encode()])

    def table(self) -> Any:
        """The newest version of the table, of which nothing but its manifest is read. Raises as ``open_table``."""
        try:
            table = open_table(self.uri)
        except (errors.TableNotFoundError, errors.NotALanceTableError) as error:
            raise errors.TableNotFoundError(
                f"The table that the index follows was not found: {self.uri}.",
                remedy="Check its URI for a typo, and the store's credentials. "
                "If the table was moved, build a new index.",
            ) from error
        if not hasattr(table, "dataset_at"):
            raise errors.NotALanceTableError(f"The index follows {self.uri}, which is not a Lance table any more.")
        return table

    def open(self, version: int | None = None) -> Any:
        """Pylance's handle on a version, by default the newest: no deletion file of it is damaged.

        Raises:
            TableCorruptError: one is, on which pylance may end the process.
            StorageError: the version cannot be read.
            MemwalOpsError: see :meth:`table`.
        """
        table = self.table()
        try:
            return table.dataset_at(table.revision if version is None else version)
        except errors.ObjectNotFoundError as error:
            raise errors.StorageError(
                f"Version {version} of the table that the index follows cannot be read: {error}",
                remedy="If it was expired, run memwal-ops catchup: then the index has a newer one.",
            ) from error

    def announce(self, uuid: UUID, folder: str, erased: int | None = None) -> None:
        """Record at the table that the index follows it; with ``erased``, that it has no deleted row of that version.

        Without it, the table's erase does not know the index: so it is only logged if the table cannot be written.
        """
        try:
            record_follower(open_store(resolve(self.uri)), str(uuid), folder, erased)
        except errors.MemwalOpsError as error:
            get_logger(__name__).warning("follower_not_recorded", table=self.uri, folder=folder, error=str(error))

    def dimension(self, table: Any) -> int:
        """Check that the table can be followed, and return the length of its vectors.

        Raises ``InvalidUsageError``: a column does not exist, or is of another type; or it has no stable row ids.
        """
        fields = {field.name: field.type for field in table.schema}
        kind = fields.get(self.column)
        if kind is None or not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
            raise errors.InvalidUsageError(
                f"{self.uri} has no column {self.column} of vectors: it is {kind or 'missing'}.",
                remedy="Name a column of the type fixed_size_list of floats.",
            )
        if self.key is None and not table.has_stable_row_ids:
            raise errors.InvalidUsageError(
                f"{self.uri} has no stable row ids: a compaction would give its rows other ids.",
                remedy="Name an int64 column that identifies rows, by --key.",
            )
        if self.key is not None and fields.get(self.key) != pa.int64():
            raise errors.InvalidUsageError(
                f"{self.uri} has no int64 column {self.key}: it is {fields.get(self.key, 'missing')}.",
                remedy="Name an int64 column that identifies rows, by --key.",
            )
        return int(kind.list_size)


def usable(folder: str, unusable: int) -> None:
    """Check that an index may be searched at its newest epoch. Raises ``IndexUnusableError``."""
    if unusable:
        raise unusable_error(folder, unusable)


def unusable_error(folder: str, unusable: int) -> IndexUnusableError:
    """The error of an index that cannot follow its table any more."""
    return IndexUnusableError(
        f"The index {folder} cannot be searched: {Unusable(unusable).text}. Earlier epochs can be searched (as_of)."
    )


def read_source(folder: str, followed: int = 0) -> Source | None:
    """The table that the index in a folder follows, which has its version ``followed``; None: it follows none.

    Raises ``StorageError``, or ``TableCorruptError``: ``follow.json`` is damaged, or missing though there is a version.
    """
    try:
        with open(os.path.join(folder, FOLLOW), "rb") as file:
            return Source(**json.loads(file.read()))
    except FileNotFoundError as error:
        if not followed:
            return None
        raise _damaged(folder, f"the index has version {followed} of a table, and the file is missing") from error
    except (ValueError, TypeError, RecursionError, IsADirectoryError) as error:
        raise _damaged(folder, str(error)) from error
    except OSError as error:
        raise io_error(error) from error


def _damaged(folder: str, why: str) -> IndexCorruptError:
    return IndexCorruptError(f"{FOLLOW} in {folder} is damaged: {why}.", remedy=COPY_FOLLOW)


def transaction_of(table: Any, version: int) -> Any:
    """The transaction that created a version; None: the version or its transaction was expired.

    Raises ``StorageError``: the store failed.
    """
    try:
        return read_transaction(table, version)
    except (OSError, ValueError) as error:
        if "not found" in str(error).lower():
            return None
        raise errors.StorageError(
            f"A transaction of the table that the index follows cannot be read: {error}"
        ) from error


def check_history(table: Any, version: int, transaction: str) -> Unusable | None:
    """Why the open version does not follow from an index's version by changes of rows alone; None: it does."""
    if table.version < version:
        return Unusable.REPLACED
    first = transaction_of(table, version)
    if first is None:
        return Unusable.GAP
    if first.uuid != transaction:
        return Unusable.REPLACED
    for later in range(version + 1, table.version + 1):
        change = transaction_of(table, later)
        if change is None:
            return Unusable.GAP
        name = type(change.operation).__name__
        if name in {"Restore", "Overwrite"}:
            return Unusable.RESTORED if name == "Restore" else Unusable.OVERWRITTEN
    return None


def renamed(before: Any, table: Any, source: Source) -> bool:
    """Whether other columns had the followed names in another version: data files have field ids, not names."""
    return _fields(before, source) != _fields(table, source)


def changed_fragments(before: Any, table: Any) -> list[Any]:
    """The fragments whose rows another version of the table may not have."""
    known = {_content(fragment) for fragment in before.get_fragments()}
    return [fragment for fragment in table.get_fragments() if _content(fragment) not in known]


def _fields(table: Any, source: Source) -> list[int | None]:
    """The ids of the fields that are followed; None: there is none of that name."""
    fields = [table.lance_schema.field(name) for name in (source.column, source.key) if name is not None]
    return [None if part is None else part.id() for part in fields]


def _content(fragment: Any) -> str:
    """The identity of a fragment's values, without its deletions, which only remove rows."""
    content = fragment.metadata.to_json()
    return json.dumps([content.get(name) for name in ("id", "files", "overlays", "physical_rows")], sort_keys=True)


def row_ids(table: Any, source: Source) -> NDArray[np.int64]:
    """The ids of all rows, ascending. Raises ``InvalidUsageError`` if two rows have the same key."""
    parts = [_ids(batch, source) for batch in _batches(table, source, None, vectors=False)]
    ids = np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise errors.InvalidUsageError(
            f"Two rows of {source.uri} have {source.key} {twice[0]}: it does not identify rows.",
            remedy="Remove the duplicates, or follow the table by another column.",
        )
    return ids


def matching(table: Any, source: Source, where: str) -> NDArray[np.int64]:
    """Ids of rows that match, by scalar indexes where they cover it. Raises ``InvalidUsageError``, ``StorageError``."""
    scanner = table.scanner(columns=[source.key] if source.key else [], with_row_id=source.key is None, filter=where)
    try:
        parts = [_ids(batch, source) for batch in scanner.to_batches()]
    except (OSError, ValueError) as error:
        _check_filter(table, source, where)
        raise errors.StorageError(f"The table that the index follows cannot be read: {error}") from error
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _check_filter(table: Any, source: Source, where: str) -> None:
    """Refuse a filter that does not apply to a table in memory with the same columns, and neither rows nor indexes."""
    import lance  # noqa: PLC0415 - only for indexes that follow a table

    empty = lance.write_dataset(
        table.schema.empty_table(), "memory://", data_storage_version=table.data_storage_version
    )
    try:
        empty.scanner(columns=[], with_row_id=True, filter=where).to_table()
    except (OSError, ValueError) as error:
        raise errors.InvalidUsageError(
            f"The filter {where!r} is not valid for {source.uri}: {str(error).splitlines()[0]}",
            remedy="Give an SQL expression of the table's columns, such as: price < 10 AND in_stock.",
        ) from error


def rows(table: Any, source: Source, fragments: list[Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Ids and vectors of the rows of some fragments; a row without a vector has NaN."""
    if not fragments:
        return
    for batch in _batches(table, source, fragments, vectors=True):
        column = batch.column(source.column)
        vectors = np.full((len(column), column.type.list_size), np.nan, np.float32)
        there = column.is_valid().to_numpy(zero_copy_only=False)
        vectors[there] = np.asarray(
            column.filter(pa.array(there)).flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
        ).reshape(-1, column.type.list_size)
        yield _ids(batch, source), vectors


def _batches(table: Any, source: Source, fragments: list[Any] | None, *, vectors: bool) -> Iterator[pa.RecordBatch]:
    columns = [*([source.column] if vectors else []), *([source.key] if source.key else [])]
    try:
        yield from table.scanner(
            columns=columns, with_row_id=source.key is None, fragments=fragments, batch_size=_ROWS, scan_in_order=False
        ).to_batches()
    except OSError as error:
        raise errors.StorageError(f"The table that the index follows cannot be read: {error}") from error


def _ids(batch: pa.RecordBatch, source: Source) -> NDArray[np.int64]:
    column = batch.column(source.key or _ROW_ID)
    if column.null_count:
        raise errors.InvalidUsageError(
            f"A row of {source.uri} has no {source.key}: it does not identify rows.",
            remedy="Remove these rows, or follow the table by another column.",
        )
    ids: NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.int64)
    if len(ids) and int(ids.min()) < 0:
        raise errors.InvalidUsageError(
            f"A row of {source.uri} has {source.key} {ids.min()}: row ids must not be negative, -1 means none.",
            remedy="Remove these rows, or follow the table by another column.",
        )
    return ids


class Filter:
    """The rows that match filters, of an index that follows a table. Keeps the result for the last one."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: tuple[tuple[str, int, str], NDArray[np.int64]] | None = None

    def rows(self, where: str, followed: int, transaction: str) -> NDArray[np.int64]:
        """The row ids that match, ascending, in the version of the table that the index has.

        ``transaction`` is the uuid of the one that made it; empty: not known, by a view of an earlier release.

        Raises:
            IndexUnusableError: another transaction made that version: the table was replaced.
            InvalidUsageError: the index follows no table, or has no version of it yet; or the filter is not valid.
            StorageError: the table, or that version of it, cannot be read.
        """
        if self._last is not None and self._last[0] == (where, followed, transaction):
            return self._last[1]
        source = read_source(self._folder, followed)
        if source is None:
            raise errors.InvalidUsageError(
                f"{self._folder} follows no table on which a filter could be evaluated.",
                remedy="Give the row ids that are allowed, as allow.",
            )
        if not followed:
            raise errors.InvalidUsageError(
                f"{self._folder} has no complete version of the table {source.uri} yet.",
                remedy="Run memwal-ops catchup on it.",
            )
        table = source.open(followed)
        made = transaction_of(table, followed) if transaction else None
        if transaction and (made is None or made.uuid != transaction):
            raise unusable_error(self._folder, Unusable.GAP if made is None else Unusable.REPLACED)
        rows = np.sort(matching(table, source, where))
        self._last = ((where, followed, transaction), rows)
        return rows
