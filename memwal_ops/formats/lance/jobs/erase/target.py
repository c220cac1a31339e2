"""Decide which fragments, versions and rows hold what must be gone.

Two ways to say it. By an expression: rows that match, whether a version shows them as living or as deleted. By a time:
all rows that were deleted before it; then a version of before holds them, as does a fragment with deleted rows.

A verdict on a fragment is one on its files, which never change, so each is read once in a run.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lance
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.referenced_files import deletion_path
from memwal_ops.formats.lance.files.versions import operation_of
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from datetime import datetime

    import pyarrow as pa
    from lance.fragment import LanceFragment

    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

_LITERAL = re.compile(r"'((?:[^']|'')+)'|\b(\d{4,})\b")
_VALUE = re.compile(rb"['\"0-9]")
_ADDRESS = re.compile(r"\b_row(addr|offset|id)\b|\b(random|uuid)\s*\(", re.IGNORECASE)
_DELETE, _PREDICATE = 101, 3  # fields of Lance's transaction.proto
_WITH_PREDICATE = frozenset({"delete", "update"})
_MEMORY = "memory://"


@dataclass
class Target:
    """The rows that must be gone.

    Attributes:
        where: an expression; None: ``before`` is given.
        before: the time before which they were deleted.
        unaffected: keys of fragments (by time) of which all deletions are later than ``before``.
    """

    where: str | None
    before: datetime | None
    unaffected: set[Hashable] = field(default_factory=set)
    _verdicts: dict[Hashable, str | None] = field(default_factory=dict)

    def check(self, dataset: lance.LanceDataset, uri: str) -> None:
        """Refuse an expression that the table does not understand.

        Raises:
            InvalidUsageError: with pylance's own message.
            MemwalOpsError: the table cannot be read, by kind.
        """
        if self.where is None:
            return
        moving = _ADDRESS.search(_LITERAL.sub("", self.where))
        if moving is not None and not (moving[1] == "id" and dataset.has_stable_row_ids):
            raise InvalidUsageError(
                f"The expression of --where has {moving[0]}, which is of another row after each rewrite.",
                remedy='Name the rows by their values, as their key: "user_id = 17".',
            )
        try:
            with lance_errors("read the expression for", uri):
                dataset.scanner(
                    filter=self.where, columns=[], with_row_id=True, limit=0, use_scalar_index=False
                ).to_table()
        except MemwalOpsError as error:
            if _applies(self.where, dataset):
                raise  # a file of the table cannot be read
            raise InvalidUsageError(
                f"The expression of --where does not apply to {uri}: {error}",
                remedy='Write it in SQL, with columns of the table: "user_id = 17".',
            ) from error

    def living(self, dataset: lance.LanceDataset, uri: str) -> Iterator[pa.Array]:
        """Addresses of the rows that match and are not deleted, ascending, a batch at a time."""
        if self.where is None:
            return
        with lance_errors("find the rows to delete of", uri):
            scanner = dataset.scanner(filter=self.where, columns=[], with_row_address=True, use_scalar_index=False)
            for batch in scanner.to_batches():
                yield batch.column("_rowaddr")

    def stained(
        self, fragments: list[table_pb2.DataFragment], shown: VersionManifest, opened: Callable[[], lance.LanceDataset]
    ) -> dict[int, str]:
        """The fragments of a version that hold such rows, by id, each with the reason.

        Args:
            fragments: of the version's manifest.
            shown: the version: its names of columns say what the expression means.
            opened: the version, opened if one of them has to be read.
        """
        found = {}
        columns = hash(tuple((int(one.id), one.name, one.parent_id) for one in shown.manifest.fields))
        for fragment in fragments:
            key: Hashable = fragment_key(fragment, deletions=self.where is None)
            key = (columns, key) if self.where is not None else key
            search = partial(self._read, fragment, opened) if self.where else partial(self._by_time, fragment)
            if (why := self.once(key, search)) is not None and key not in self.unaffected:
                found[int(fragment.id)] = why
        return found

    def _by_time(self, fragment: table_pb2.DataFragment) -> str | None:
        deleted = fragment.deletion_file.num_deleted_rows if fragment.HasField("deletion_file") else 0
        return f"{deleted:,} deleted rows are still in its data files" if deleted else None

    def _read(self, fragment: table_pb2.DataFragment, opened: Callable[[], lance.LanceDataset]) -> str | None:
        try:
            with lance_errors("search a fragment of", "the table"):
                dataset = opened()
                part = dataset.get_fragment(int(fragment.id))
                rows = self._count(dataset, [] if part is None else [part])
        except MemwalOpsError as error:
            return f"it cannot be searched, so that it may hold such rows: {error}"
        return f"{counted(rows, 'such row is', 'such rows are')} in its data files" if rows else None

    def _count(self, dataset: lance.LanceDataset, fragments: list[LanceFragment] | None = None) -> int:
        """How many rows match, deleted or not."""
        scanner = dataset.scanner(
            filter=self.where, columns=[], with_row_id=True, use_scalar_index=False, late_materialization=False,
            include_deleted_rows=True, fragments=fragments,
        )  # fmt: skip
        return sum(batch.num_rows for batch in scanner.to_batches())

    def once(self, key: Hashable, search: Callable[[], str | None]) -> str | None:
        """What a search found in something that does not change, searched once in a run."""
        if key not in self._verdicts:
            self._verdicts[key] = search()
        return self._verdicts[key]

    def matches(self, rows: pa.Table) -> str | None:
        """Why rows outside of the base may be those (a log entry); None: none of them is."""
        if not rows.num_rows:
            return None
        return self.search(lambda: lance.write_dataset(rows, f"{_MEMORY}{uuid.uuid4()}"))

    def search(self, opened: Callable[[], lance.LanceDataset]) -> str | None:
        """Why a dataset may have such rows, deleted or not; None: it has none."""
        try:
            with lance_errors("search a part of", "the log"):
                found = self._count(opened())
        except MemwalOpsError as error:
            return f"it cannot be searched, so that it may hold such rows: {error}"
        return f"it has {found:,} such rows" if found else None

    def mentions(self, transaction: table_pb2.Transaction | None, is_of_others: Callable[[], bool]) -> bool:
        """Whether a transaction may have values of such rows in it: in the expression of a deletion.

        Args:
            transaction: of a version; None: it has none.
            is_of_others: whether its expression is known to be of no such row. Otherwise it may be of one, by values of
                other columns than those of ``where``.
        """
        if transaction is None or operation_of(transaction) not in _WITH_PREDICATE:
            return False
        if self.where is None:
            return True
        data = transaction.SerializeToString()
        literals = ((text or number).replace("''", "'").encode() for text, number in _LITERAL.findall(self.where))
        if any(one in data for one in literals):
            return True
        return _VALUE.search(predicate_of(transaction)) is not None and not is_of_others()


def predicate_of(transaction: table_pb2.Transaction) -> bytes:
    """The expression of a deletion; empty: it has none."""
    for one in UnknownFieldSet(transaction):  # type: ignore[attr-defined]  # iterable, missing in the stub
        if one.field_number == _DELETE:
            inner = UnknownFieldSet(Empty.FromString(one.data))
            return next((bytes(part.data) for part in inner if part.field_number == _PREDICATE), b"")  # type: ignore[attr-defined]  # as above
    return b""


def fragment_key(fragment: table_pb2.DataFragment, *, deletions: bool = False) -> Hashable:
    """What a fragment's rows are, in any version: its files, with the fields in each; and which rows are deleted."""
    files = tuple(
        (file.path, tuple(file.fields), file.base_id if file.HasField("base_id") else None) for file in fragment.files
    )
    deleted = (
        deletion_path(fragment.id, fragment.deletion_file) if deletions and fragment.HasField("deletion_file") else ""
    )
    return int(fragment.id), files, deleted


def _applies(where: str, dataset: lance.LanceDataset) -> bool:
    """Whether an expression applies to a table in memory that has the same columns, and neither rows nor indexes."""
    try:
        with lance_errors("read the expression for", "a table without rows"):
            empty = lance.write_dataset(
                dataset.schema.empty_table(),
                "memory://",
                data_storage_version=cast("Any", dataset.data_storage_version),
                enable_stable_row_ids=dataset.has_stable_row_ids,
            )
            empty.scanner(filter=where, columns=[], with_row_id=True).to_table()
    except MemwalOpsError:
        return False
    return True
