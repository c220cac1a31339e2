"""Find and open the rows of legacy MemWALs as Lance datasets.

The location of a flushed MemTable is not recorded. It is searched in this order: at ``mem_table_location``, if a
dataset opens there; at the location of the ``--mem-table`` template; otherwise its log is replayed into a temporary
dataset.
"""

from __future__ import annotations

import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import lance
import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.files.blobs import written_schema
from memwal_ops.formats.lance.files.datasets import STORE_ERRORS, lance_errors, open_dataset
from memwal_ops.formats.lance.files.named_files import damaged_deletions
from memwal_ops.formats.lance.files.version_files import read_version_manifest
from memwal_ops.formats.lance.generations.generation import Generation, GenerationRef
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, Node, nodes, plan_projection
from memwal_ops.formats.lance.legacy.replay import wal_reader
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from uuid import UUID

    from memwal_ops.formats.lance.options import LegacyOptions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.legacy_index import MemWal
    from memwal_ops.storage.locations import Location

_NAMESPACE = uuid.UUID("c3b1f7de-6d9c-4b77-9d0c-1f5f0f4b4c11")
_IN_MEMORY = "memory:"


@dataclass(frozen=True, slots=True)
class MemTableRef(GenerationRef):
    """A flushed MemTable, for the engines. Its region gets an id.

    ``region``: its name. ``uri``: where its rows were found.
    """

    region: str = ""
    uri: str = ""

    @property
    def folder(self) -> str:
        """Its location, for messages."""
        return self.uri

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region!r} ({self.uri})"


def region_number(region: str) -> UUID:
    """An id for a region's name, used within a run."""
    return uuid.uuid5(_NAMESPACE, region)


def mem_table_ref(mem_wal: MemWal, uri: str = "") -> MemTableRef:
    """The reference to a MemWAL's rows."""
    number = region_number(mem_wal.id.region)
    return MemTableRef(number, mem_wal.id.generation, "", None, None, mem_wal.id.region, uri)


class MemTables:
    """Opens MemTables of one table version, whose key is set. A context manager: it drops replayed rows at its end."""

    def __init__(self, table: Table, options: LegacyOptions) -> None:
        """Nothing is opened yet."""
        self._table, self._options = table, options
        self._read = wal_reader(options.wal_reader)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def generation(self, mem_wal: MemWal) -> Generation | None:
        """A flushed MemTable, matched to the table's columns by name; None: it has no rows, and no dataset.

        Raises ``GenerationMissingError``: its rows were not found; ``GenerationCorruptError``: they cannot be read, or
        have NULL in the key; ``SchemaProjectionError``: they have other columns than the table.
        """
        opened = self.dataset(mem_wal)
        return None if opened is None else self._generation(mem_wal, *opened)

    def drained(self, mem_wal: MemWal) -> Generation | None:
        """The rows in the log of a MemWAL that is not flushed; None: it has no entries (S1-005, S1-027).

        Its MemTable is in its writer's memory; rows that are not in the log are not durable, and were not acknowledged.

        Raises: as :meth:`generation`.
        """
        if not mem_wal.wal_entries.count:
            return None
        try:
            return self._generation(mem_wal, mem_wal.wal_location, self.replayed(mem_wal))
        except errors.ObjectNotFoundError as error:
            raise errors.GenerationMissingError(
                f"The log of {mem_wal.id}, which is {mem_wal.state.name}, cannot be replayed: {error}",
                remedy=f"Let its writer, {mem_wal.owner_id!r}, flush it; or give --wal-reader for a log that is not of "
                "Lance or Arrow files; or restore the files from a backup.",
            ) from error

    def empty(self, mem_wal: MemWal) -> Generation:
        """A generation without rows, for a MemWAL that has none and keeps its number.

        Raises: as :meth:`generation`.
        """
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="memwal-ops-"))
        schema = written_schema(self._table.schema)
        with lance_errors("write", folder):
            return self._generation(mem_wal, folder, lance.write_dataset(schema.empty_table(), f"{folder}/rows"))

    def _generation(self, mem_wal: MemWal, uri: str, dataset: lance.LanceDataset) -> Generation:
        ref = mem_table_ref(mem_wal, uri)
        with lance_errors(f"read the rows of {mem_wal.id} at", uri):
            files = [file for fragment in dataset.get_fragments() for file in fragment.metadata.files]
            own, base = _with_base_ids(mem_wal, dataset, self._table), nodes(self._table.handle.get())
            schema, key = written_schema(self._table.schema), self._table.primary_key
            generation = Generation(
                ref,
                dataset,
                plan_projection(own, base, schema, key, lambda *_: True),
                data_bytes=sum(file.file_size_bytes or 0 for file in files),
                physical_rows=sum(fragment.physical_rows for fragment in dataset.get_fragments()),
                newest_row_first=False,
            )
            for name in generation.projection.keys:
                if dataset.count_rows(f"`{name}` IS NULL"):
                    raise errors.GenerationCorruptError(f"Rows of {ref} have NULL in the key {name!r}.")
        return generation

    def dataset(self, mem_wal: MemWal) -> tuple[str, lance.LanceDataset] | None:
        """The rows of a MemWAL, and their location; None: it has no entries, and no dataset opens.

        Raises: as :meth:`generation`.
        """
        tried: list[str] = []
        for uri in self._places(mem_wal):
            tried.append(uri)
            dataset = self._opened(mem_wal, uri)
            if dataset is not None:
                return uri, dataset
        if not mem_wal.wal_entries.count:
            return None
        try:
            return mem_wal.wal_location, self.replayed(mem_wal)
        except errors.ObjectNotFoundError as error:
            searched = f"no dataset opens at {' or '.join(tried)}, and " if tried else ""
            raise errors.GenerationMissingError(
                f"The rows of {mem_wal.id} were not found: {searched}its log cannot be replayed: {error}",
                remedy="Give --mem-table URI, with {region} and {generation} where they are in it; or --wal-reader "
                "for a log that is not of Lance or Arrow files; or restore the files from a backup. Merging past it "
                "would lose its rows.",
            ) from error

    def replayed(self, mem_wal: MemWal) -> lance.LanceDataset:
        """The rows of a MemWAL's log in a temporary dataset, in the order of its entries.

        Raises:
            ObjectNotFoundError: an entry is missing.
            GenerationCorruptError: an entry cannot be read, or has other columns than the first one.
        """
        store = open_store(self.located(mem_wal.wal_location))
        try:
            # A MemTable is what its writer held in memory.
            tables = list(self._read(store, mem_wal.wal_entries))
            if any(table.schema != tables[0].schema for table in tables):
                raise errors.InvalidFormatError("its entries have different columns")
        except errors.InvalidFormatError as error:
            raise errors.GenerationCorruptError(f"The log of {mem_wal.id} cannot be replayed: {error}") from error
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="memwal-ops-"))
        with lance_errors("replay", mem_wal.wal_location):
            return lance.write_dataset(pa.concat_tables(tables), f"{folder}/rows")

    def located(self, text: str) -> Location:
        """A location that the index names; relative ones are below the table's root.

        Raises ``InvalidUsageError``: it is no URI, or leads out of the table by ``..``.
        """
        root = self._table.location
        if "://" not in text and not text.startswith("/"):
            if ".." in text.split("/") or not text.strip("/"):
                raise errors.InvalidUsageError(
                    f"The legacy index names {text!r:.200}, which is not a location of rows."
                )
            text = f"{root.uri}/{text}"
        plain = resolve(text) if "://" not in text or text.startswith("file:") else None
        if plain is not None:
            return plain
        same = text.partition("://")[0] == root.scheme
        return resolve(text, dict(root.lance_options) if same else None)

    def _places(self, mem_wal: MemWal) -> Iterator[str]:
        if mem_wal.mem_table_location and not mem_wal.mem_table_location.startswith(_IN_MEMORY):
            yield mem_wal.mem_table_location
        if self._options.mem_table is not None:
            values = {
                "region": mem_wal.id.region,
                "generation": mem_wal.id.generation,
                "table": self._table.location.uri,
            }
            try:
                yield self._options.mem_table.format(**values)
            except (KeyError, IndexError, ValueError) as error:
                raise errors.InvalidUsageError(
                    f"--mem-table {self._options.mem_table} has a placeholder that does not exist: {error}",
                    remedy="There are {region}, {generation} and {table}.",
                ) from error

    def _opened(self, mem_wal: MemWal, uri: str) -> lance.LanceDataset | None:
        location = self.located(uri)
        if location.uri == self._table.location.uri:
            raise errors.GenerationCorruptError(
                f"The index names {uri} as the location of the rows of {mem_wal.id}: that is the table itself."
            )
        try:
            with lance_errors("open", uri):
                dataset = open_dataset(location)
            store = open_store(location)
            manifest = read_version_manifest(store, int(dataset.version)).manifest
            damage = damaged_deletions(location, store, manifest, set())
        except (errors.TableNotFoundError, errors.ObjectNotFoundError, errors.NotALanceTableError):
            return None
        except (errors.StorageError, errors.InvalidFormatError) as error:
            if isinstance(error, STORE_ERRORS):
                raise
            raise errors.GenerationCorruptError(f"The rows of {mem_wal.id} at {uri} do not open: {error}") from error
        if damage is not None:
            raise errors.GenerationCorruptError(
                f"The rows of {mem_wal.id} at {uri} are damaged: {damage.path} {damage.why}."
            )
        return dataset


def with_key(table: Table, options: LegacyOptions) -> Table:
    """The table with its primary key: the one that it marks, or else the one that is given.

    Raises ``NoPrimaryKeyError``: neither; ``InvalidUsageError``: another one than it marks, or no column.
    """
    given = options.primary_key
    names = table.schema.names
    if unknown := [name for name in given if name not in names]:
        raise errors.InvalidUsageError(
            f"{table.location.uri} has no column {', '.join(unknown)}; it has {', '.join(names)}."
        )
    if table.primary_key and given and given != table.primary_key:
        raise errors.InvalidUsageError(
            f"{table.location.uri} marks {', '.join(table.primary_key)} as its primary key, and --primary-key is "
            f"{', '.join(given)}.",
            remedy="Leave --primary-key out.",
        )
    if not table.primary_key and not given:
        raise errors.NoPrimaryKeyError(
            f"No column of {table.location.uri} is marked as its primary key, by which rows replace each other.",
            remedy="Give it: --primary-key COLUMN (repeatable), the column by which the MemWALs' writers upserted.",
        )
    return replace(table, primary_key=table.primary_key or given)


def _with_base_ids(mem_wal: MemWal, dataset: lance.LanceDataset, table: Table) -> tuple[Node, ...]:
    """The MemTable's fields under the ids that the table has for fields of their names."""
    base = {node.name: node for node in nodes(table.handle.get())}
    described = []
    unknown = []
    for node in nodes(dataset):
        if node.name == TOMBSTONE:
            described.append(node)
        elif (target := base.get(node.name)) is None or (matched := _matched(node, target)) is None:
            unknown.append(node.name)
        else:
            described.append(matched)
    missing = [
        name for name, node in base.items() if name not in {field.name for field in described} and not node.nullable
    ]
    if unknown or missing:
        what = [f"has {', '.join(unknown)}, which the table has not"] if unknown else []
        what += [f"lacks {', '.join(missing)}"] if missing else []
        raise errors.SchemaProjectionError(
            f"The MemTable of {mem_wal.id} {' and '.join(what)}.",
            remedy="Change the table's columns back to those at the flush, and change them again after the merge.",
        )
    return tuple(described)


def _matched(source: Node, target: Node) -> Node | None:
    """The field and all inside it under the target's ids, matched by name; None where one has no counterpart."""
    inner = {node.name: node for node in target.children}
    children = []
    for child in source.children:
        counterpart = inner.get(child.name)
        matched = None if counterpart is None else _matched(child, counterpart)
        if matched is None:
            return None
        children.append(matched)
    return replace(source, field_id=target.field_id, children=tuple(children))
