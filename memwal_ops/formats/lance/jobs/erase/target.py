"""Decide which fragments, versions, rows and index segments hold what must be gone.

Two ways to say it. By an expression: rows that match, whether a version shows them as living or as deleted. By a time:
all rows that were deleted before it; then a version of before holds them, as does a fragment with deleted rows.

A verdict on a fragment is one on its files, which never change, so each is read once in a run.

A compaction moves rows in an index, and leaves what was in it: terms of a text, keys of a bitmap, codes. So a segment
is clean only if it was built by reading fragments that are still there, with the same files, and of which none holds a
row that must be gone. The version that it was built on shows these fragments. That version expires; so what it showed
is recorded below ``_mem_wal_ops/erase/``. What is not shown by either is built anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import lance
import pyarrow as pa
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.core.leases import NumberedRecords
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, ObjectNotFoundError
from memwal_ops.formats.lance.engines.merge.rewrite import dictionaries_of, dictionary_columns
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.files.version_files import deletion_path, operation_of
from memwal_ops.formats.lance.indexes.index_faults import FIRST_FORMAT
from memwal_ops.formats.lance.jobs.erase.scan import values_of
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, by_name, decode_fragment_bitmap
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
    from datetime import datetime

    from lance.fragment import LanceFragment

    from memwal_ops.core.byte_scan import ErasedValues
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Store

ERASE_FOLDER = "_mem_wal_ops/erase"
_KEPT_RECORDS = 2
_SHOWN = 5
_KEPT_AT_ONCE, _WORD = 64, 64
_LITERAL = re.compile(r"'((?:[^']|'')+)'|\b(\d{4,})\b")
_VALUE = re.compile(rb"['\"0-9]")
_ADDRESS = re.compile(r"\b_row(?:addr|offset|id)\b|\b(random|uuid)\s*\(", re.IGNORECASE)
_DELETE, _PREDICATE = 101, 3  # fields of Lance's transaction.proto
_WITH_PREDICATE = frozenset({"delete", "update"})
_MEMORY = "memory://"
_KEY = b"primary-key"


DictionaryValues = dict[str, tuple[set[Any], set[Any]]]
"""By column: the values in dictionaries, and those that rows have."""


@dataclass
class Target:
    """The rows that must be gone.

    Attributes:
        where: an expression; None: ``before`` is given.
        before: the time before which they were deleted.
        values: those of the rows are added here; None: they are not kept.
        routing: those of some columns, however short they are.
        prefixes: what the table keeps of a column's value beside rows.
        unaffected: keys of fragments (by time) of which all deletions are later than ``before``.
    """

    where: str | None
    before: datetime | None
    values: ErasedValues | None = None
    routing: dict[str, set[Any]] = field(default_factory=dict)
    prefixes: Callable[[str, Any], Iterable[str]] = lambda column, value: ()  # noqa: ARG005 - none
    unaffected: set[Hashable] = field(default_factory=set)
    _verdicts: dict[Hashable, str | None] = field(default_factory=dict)
    _dictionaries: dict[Hashable, DictionaryValues] = field(default_factory=dict)
    _living: dict[Hashable, DictionaryValues] = field(default_factory=dict)

    def check(self, dataset: lance.LanceDataset, uri: str) -> None:
        """Refuse an expression that the table does not understand.

        Raises:
            InvalidUsageError: with pylance's own message.
            MemwalOpsError: the table cannot be read, by kind.
        """
        if self.where is None:
            return
        moving = _ADDRESS.search(_LITERAL.sub("", self.where))
        if moving is not None:
            raise InvalidUsageError(
                f"The expression of --where has {moving[0]}, which no deleted row has, or another row after a rewrite.",
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

    def expects(self, column: str, values: pa.Array, schema: pa.Schema) -> set[int]:
        """The places of values that such rows have by the expression alone: it is true of them, with NULLs beside.

        All of them, if that cannot be told.
        """
        if self.where is None:
            return set()
        fields = [
            pa.field(
                field.name, field.type, metadata={k: v for k, v in (field.metadata or {}).items() if _KEY not in k}
            )
            for field in schema
        ]
        try:
            columns = [
                values.cast(field.type) if field.name == column else pa.nulls(len(values), field.type)
                for field in fields
            ]
            with lance_errors("read the expression for", "values of regions"):
                rows = pa.table(columns, schema=pa.schema(fields))
                dataset = lance.write_dataset(rows, f"{_MEMORY}{uuid.uuid4()}")
                return {*dataset.to_table(filter=self.where, columns=[], with_row_id=True)["_rowid"].to_pylist()}
        except (MemwalOpsError, pa.ArrowException):
            return {*range(len(values))}

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

        ``shown``: the version: its names of columns say what the expression means. ``opened``: it, opened if one of the
        fragments has to be read.
        """
        reasons = {}
        columns = hash(
            tuple(
                (int(schema_field.id), schema_field.name, schema_field.parent_id)
                for schema_field in shown.manifest.fields
            )
        )
        for fragment in fragments:
            key: Hashable = fragment_key(fragment, deletions=self.where is None)
            key = (columns, key) if self.where is not None else key
            search = partial(self._read, fragment, opened) if self.where else partial(self._by_time, fragment, opened)
            if (why := self.once(key, search)) is not None and key not in self.unaffected:
                reasons[int(fragment.id)] = why
        return reasons

    def unused(
        self, fragment: table_pb2.DataFragment, opened: Callable[[], lance.LanceDataset], living: DictionaryValues
    ) -> str | None:
        """Why the dictionaries of a fragment may have values of such rows; None: they have values in use alone.

        ``living``: values that rows of the newest version have.
        """
        values = self._dictionaries.get(key := fragment_key(fragment))
        if values is None:
            with lance_errors("read the dictionaries of", "the table"):
                values = self._dictionaries[key] = dictionary_values(opened(), int(fragment.id), None)
        columns = [
            name for name, (listed, used) in values.items() if listed - used - living.get(name, (set(), set()))[1]
        ]
        return f"the dictionary of {columns[0]} has values that no row has" if columns else None

    def living_values(self, table: Table) -> DictionaryValues:
        """The values in columns with a dictionary, of the rows of a version that stay."""
        others = None if self.where is None else f"({self.where}) IS NOT TRUE"
        values: DictionaryValues = {}
        for fragment in table.manifest.manifest.fragments:
            key = fragment_key(fragment, deletions=True)
            if key not in self._living:
                with lance_errors("read the dictionaries of", "the table"):
                    self._living[key] = dictionary_values(table.dataset, int(fragment.id), others, deleted=False)
            for name, (listed, used) in self._living[key].items():
                before = values.setdefault(name, (set(), set()))
                before[0].update(listed)
                before[1].update(used)
        return values

    def _by_time(self, fragment: table_pb2.DataFragment, opened: Callable[[], lance.LanceDataset]) -> str | None:
        deleted = fragment.deletion_file.num_deleted_rows if fragment.HasField("deletion_file") else 0
        if deleted and self.values is not None:
            with lance_errors("read the deleted rows of", "the table"):
                part = opened().get_fragment(int(fragment.id))
                self._keep(opened(), [] if part is None else [part], None)
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
        rows: int = sum(batch.num_rows for batch in _matching(dataset, fragments, self.where, columns=[]))
        if rows:
            self._keep(dataset, fragments, self.where)
        return rows

    def keep(self, column: str, value: Any) -> None:
        """Keep a value of such a row, to look for it in bytes: texts in lower case, too, as indexes have them."""
        lower = [value.lower()] if isinstance(value, str) and len(value) <= _WORD else []
        for form in {value, *self.prefixes(column, value), *lower} if self.values is not None else ():
            self.values.add(column, form)  # type: ignore[union-attr]  # checked above
        if column in self.routing:
            self.routing[column].add(value)

    def _keep(self, dataset: lance.LanceDataset, fragments: list[LanceFragment] | None, where: str | None) -> None:
        """Keep the values of the rows that match, deleted or not; without an expression, of deleted ones."""
        if self.values is None or self.values.is_full():
            return
        for batch in _matching(dataset, fragments, where, blob_handling="all_binary", batch_size=_KEPT_AT_ONCE):
            for column, value in values_of(batch.drop_columns(["_rowid"])):
                self.keep(column, value)
            if self.values.is_full():
                break

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
                rows = self._count(opened())
        except MemwalOpsError as error:
            return f"it cannot be searched, so that it may hold such rows: {error}"
        return f"it has {rows:,} such rows" if rows else None

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
        if any(literal in data for literal in literals):
            return True
        return _VALUE.search(predicate_of(transaction)) is not None and not is_of_others()


def _matching(
    dataset: lance.LanceDataset, fragments: list[LanceFragment] | None, where: str | None, **options: Any
) -> Iterator[pa.RecordBatch]:
    """Rows that match, deleted or not, with their ids; without an expression, the deleted ones."""
    # In files of the first format, a filter hides deleted rows even where they are asked for: it is applied here.
    apart = where is not None and dataset.data_storage_version == FIRST_FORMAT
    if apart or where is None:
        options.pop("columns", None)
    scanner = dataset.scanner(
        filter=None if apart else where, with_row_id=True, use_scalar_index=False, late_materialization=False,
        include_deleted_rows=True, fragments=fragments, **options,
    )  # fmt: skip
    for batch in scanner.to_batches():
        if where is None:
            yield batch.filter(batch.column("_rowid").is_null())
        elif apart:
            rows = pa.Table.from_batches([batch.drop_columns(["_rowid"])])
            yield from lance.write_dataset(rows, f"{_MEMORY}{uuid.uuid4()}").to_batches(filter=where, with_row_id=True)
        else:
            yield batch


def dictionary_values(
    dataset: lance.LanceDataset, fragment: int, where: str | None, *, deleted: bool = True
) -> DictionaryValues:
    """The values in the dictionaries of a fragment, and those that its rows have, by column.

    ``where``: the rows, by an expression; None: all. ``deleted``: whether deleted ones are among them.
    """
    part, values = dataset.get_fragment(fragment), DictionaryValues()
    columns = dictionary_columns(dataset.schema)
    scanner = dataset.scanner(
        columns=columns, filter=where, with_row_id=True, fragments=[] if part is None else [part],
        include_deleted_rows=deleted, use_scalar_index=False, late_materialization=False,
    )  # fmt: skip
    known: dict[str, pa.Array] = {}
    for batch in scanner.to_batches():
        for column in columns:
            for name, array in dictionaries_of(batch.column(column), column):
                listed, used = values.setdefault(name, (set(), set()))
                if name not in known or not array.dictionary.equals(known[name]):
                    known[name] = array.dictionary
                    whole = array.dictionary.to_pylist()
                    listed.update(value for value in whole if value is not None and value == value)  # noqa: PLR0124 - no NaN
                used.update(array.dictionary.take(array.indices.unique().drop_null()).to_pylist())
    return values


def predicate_of(transaction: table_pb2.Transaction) -> bytes:
    """The expression of a deletion; empty: it has none."""
    for unknown in UnknownFieldSet(transaction):  # type: ignore[attr-defined]  # iterable, missing in the stub
        if unknown.field_number == _DELETE:
            inner = UnknownFieldSet(Empty.FromString(unknown.data))
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


@dataclass
class Segments:
    """The evidence on index segments, of one run.

    Attributes:
        store: the table's.
        inherited: of a branch: ids of segments of its table that are proven there.
        proven: by segment id the digest of the fragments that it was built of.
        of_others: ids of transactions whose expressions are of no row that must be gone, and of which rows.
    """

    store: Store
    inherited: Collection[str] = ()
    proven: dict[str, str] = field(default_factory=dict)
    of_others: set[str] = field(default_factory=set)
    _manifests: dict[int, VersionManifest | None] = field(default_factory=dict)
    _recorded: dict[str, str] = field(default_factory=dict)
    _recorded_of_others: set[str] = field(default_factory=set)

    def read(self) -> None:
        """Read what earlier runs recorded."""
        records = _records(self.store)
        for number in records.written():
            try:
                record = records.read(number)
                self._recorded |= {str(key): str(digest) for key, digest in record["segments"].items()}
                self._recorded_of_others |= {str(digest) for digest in record.get("of_others", ())}
            except (ObjectNotFoundError, ValueError, KeyError, TypeError):
                continue  # it only saves that an index is built anew

    def is_of_others(self, transaction: str, where: str, shows: Callable[[], bool]) -> bool:
        """Whether the expression in a transaction is of rows that do not match: by what was recorded, or ``shows``."""
        # Of the expression so little that no guess at a value in it can be confirmed.
        key = f"{transaction} {hashlib.sha256(where.encode()).hexdigest()[:6]}"
        if key not in self.of_others and (key in self._recorded_of_others or shows()):
            self.of_others.add(key)
        return key in self.of_others

    def dirty(self, table: Table, shown: VersionManifest, stained: Collection[int]) -> Mapping[str, str]:
        """The indexes of a version with a segment that may hold such rows, by name, each with the reason.

        ``stained``: its fragments that hold such rows.
        """
        fragments = {int(fragment.id): fragment for fragment in shown.manifest.fragments}
        reasons: dict[str, str] = {}
        for name, entries in by_name(shown).items():
            for entry in entries:
                why = self._why(table, entry, fragments, stained)
                if why is not None:
                    reasons.setdefault(name, f"segment {UUID(bytes=entry.uuid.uuid)} {why}")
        return reasons

    def _why(
        self,
        table: Table,
        entry: table_pb2.IndexMetadata,
        fragments: Mapping[int, table_pb2.DataFragment],
        stained: Collection[int],
    ) -> str | None:
        if entry.HasField("base_id"):
            if str(UUID(bytes=entry.uuid.uuid)) in self.inherited:
                return None
            return "belongs to the table of which this one is a shallow clone"
        covered = decode_fragment_bitmap(entry.fragment_bitmap)
        if gone := covered - fragments.keys():
            return f"was built of fragments that are gone ({_some(gone)})"
        if holding := covered & set(stained):
            return f"covers fragments that hold such rows ({_some(holding)})"
        key = str(UUID(bytes=entry.uuid.uuid))
        digest = _digest(covered, fragments)
        if self._recorded.get(key) == digest or self._built_of(table, entry) == digest:
            self.proven[key] = digest
            return None
        return "may have been built of rows that were rewritten since: nothing shows that it was not"

    def _built_of(self, table: Table, entry: table_pb2.IndexMetadata) -> str | None:
        """The digest of the fragments that a segment was built of, if versions that exist show it."""
        built_on = self._manifest(table, int(entry.dataset_version))
        if built_on is None:
            return None
        for version in range(int(entry.dataset_version) + 1, table.version + 1):
            if (shown := self._manifest(table, version)) is None:
                return None
            same = [
                index
                for index in (shown.indexes.indices if shown.indexes else ())
                if index.uuid.uuid == entry.uuid.uuid
            ]
            if same:
                fragments = {int(fragment.id): fragment for fragment in built_on.manifest.fragments}
                covered = decode_fragment_bitmap(same[0].fragment_bitmap)
                return _digest(covered, fragments) if covered <= fragments.keys() else None
        return None

    def _manifest(self, table: Table, version: int) -> VersionManifest | None:
        if version not in self._manifests:
            self._manifests[version] = table.manifest_of(version)
        return self._manifests[version]

    def record(self) -> None:
        """Store what is proven, before the versions that show it expire; nothing if it is stored already."""
        known = self.proven.items() <= self._recorded.items() and self.of_others <= self._recorded_of_others
        if known or not (self.proven or self.of_others):
            return
        records = _records(self.store)
        numbers = [*records.written()]
        number = max(numbers, default=0) + 1
        while not records.put_if_absent(number, {"segments": self.proven, "of_others": sorted(self.of_others)}):
            number += 1
        records.delete_records(numbers[: -_KEPT_RECORDS + 1])
        self._recorded |= self.proven
        self._recorded_of_others |= self.of_others

    def forget(self) -> None:
        """Drop the manifests of versions: new ones were published."""
        self._manifests.clear()


def _records(store: Store) -> NumberedRecords:
    return NumberedRecords(store, ERASE_FOLDER, "record of an erasure")


def _digest(covered: Collection[int], fragments: Mapping[int, table_pb2.DataFragment]) -> str:
    keys = [fragment_key(fragments[fragment]) for fragment in sorted(covered)]
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()


def _some(numbers: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:_SHOWN]))
    return shown + (f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else "")
