"""The columns of a region's rows in the region layout, and how Lance describes files with these columns.

They are the base table's of one version, with its field ids, and ``_tombstone``, as pylance's own writers have them:
the specification has no deletes. All but the key columns may be NULL, since a delete has nothing but its key.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.fragment import DataFile, FragmentMetadata
from lance.lance import DatasetBasePath

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.blobs import holds_blobs
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, null_in_required
from memwal_ops.formats.lance.retention.schema_history import WriterVersion
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2 as pb

_BASE_ID = 1
_ROOT = -1
_OLD_FILES = "0.1"
_WITHOUT_NULL_STRUCTS = "2.0"


@dataclass(frozen=True)
class RegionColumns:
    """How rows of a region are stored: the schema of WAL entries and generations, the tombstone as its last column.

    Attributes:
        file_version: of Lance's file format, as the base table has it.
        ids: the fields' ids in the base table, each before those inside it.
        template: the manifest of a generation with one fragment, which lies in the first base path.
        required: names of the columns that are NULL in no row but a tombstone.
        opened: the version of which they are; None: not recorded.
    """

    schema: pa.Schema
    key: tuple[str, ...]
    file_version: str
    ids: tuple[int, ...]
    template: VersionManifest
    required: frozenset[str] = frozenset()
    opened: WriterVersion | None = None

    @property
    def has_tombstones(self) -> bool:
        """Whether deletes can be written."""
        return TOMBSTONE in self.schema.names

    def put_rows(self, rows: pa.Table) -> pa.Table:
        """Rows of the base table's columns, in any order, as they are stored.

        Raises:
            InvalidUsageError: other columns, a column twice, a value that a column cannot hold, NULL in a key or in
                another required column.
        """
        wanted = [field for field in self.schema if field.name != TOMBSTONE]
        _check_names(rows, [field.name for field in wanted])
        columns = [_cast(rows.column(field.name), field) for field in wanted]
        self._check_keys(dict(zip((field.name for field in wanted), columns, strict=True)))
        for column, field in zip(columns, wanted, strict=True):
            path = null_in_required(column, field.with_nullable(field.name not in self.required))
            if path is not None:
                raise InvalidUsageError(
                    f"The column {path} is NULL in some rows, and the table requires a value.",
                    remedy=f'Give it a value; or run lance.dataset(URI).alter_columns({{"path": "{path}", "nullable": '
                    "True}), and open another writer.",
                )
        if self.has_tombstones:
            columns.append(_repeat(value=False, times=rows.num_rows))
        return pa.Table.from_arrays(columns, schema=self.schema)

    def delete_rows(self, keys: pa.Table) -> pa.Table:
        """Tombstones for keys. Raises ``InvalidUsageError`` as :meth:`put_rows`, or if rows carry no tombstones."""
        if not self.has_tombstones:
            raise InvalidUsageError("This region's rows carry no tombstones: the specification has no deletes.")
        given: dict[str, Any] = {**self._keys(keys), TOMBSTONE: _repeat(value=True, times=keys.num_rows)}
        columns = [given.get(field.name, pa.nulls(keys.num_rows, field.type)) for field in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def key_columns(self, keys: pa.Table) -> list[pa.Array]:
        """The columns of keys as they are stored, in the order of the key; raises as :meth:`delete_rows`."""
        return [column.combine_chunks() for column in self._keys(keys).values()]

    def _keys(self, keys: pa.Table) -> dict[str, pa.ChunkedArray]:
        _check_names(keys, list(self.key))
        given = {name: _cast(keys.column(name), self.schema.field(name)) for name in self.key}
        self._check_keys(given)
        return given

    def _check_keys(self, columns: dict[str, pa.ChunkedArray]) -> None:
        for name in self.key:
            if columns[name].null_count:
                raise InvalidUsageError(f"The key column {name} has {columns[name].null_count} NULL values.")


def region_columns(table: Table, *, tombstones: bool = True) -> RegionColumns:
    """The columns for a writer of a region that opens this version of the table.

    Without ``tombstones``, rows are exactly as in the specification, and deletes are refused.

    Raises ``UnsupportedFeatureError``: a column that cannot be written to a region's log yet.
    """
    base = table.schema
    blobs = [field.name for field in base if holds_blobs(field)]
    if blobs:
        raise UnsupportedFeatureError(
            f"The columns {', '.join(blobs)} have blobs, which the writer of regions cannot store yet.",
            remedy="Write such tables with pylance's own MemWAL writer.",
        )
    kinds = {name: base.field(name).type for name in table.primary_key}
    others = [name for name, kind in kinds.items() if pa.types.is_dictionary(kind) or pa.types.is_nested(kind)]
    if others:
        raise UnsupportedFeatureError(
            f"The key columns {', '.join(others)} are dictionaries or lists, which a merge cannot compare between "
            "generations.",
            remedy="Create a table whose key columns have the type of a dictionary's values, or a binary type.",
        )
    fields = [field if field.name in table.primary_key else field.with_nullable(True) for field in base]  # noqa: FBT003 - pyarrow's
    if tombstones:
        fields.append(pa.field(TOMBSTONE, pa.bool_(), nullable=False))
    schema = pa.schema(fields)
    version = str(table.handle.get().data_storage_version)
    if version == _OLD_FILES:
        raise UnsupportedFeatureError(
            f"The table's files have Lance's format {version}, which a region's log cannot have.",
            remedy="Rewrite the table with data_storage_version 2.0 or later.",
        )
    structs = [field.name for field in base if pa.types.is_struct(field.type)]
    if structs and version == _WITHOUT_NULL_STRUCTS:
        raise UnsupportedFeatureError(
            f"The columns {', '.join(structs)} are structs, which are NULL where a row is deleted: files of Lance's "
            f"format {version} cannot store that.",
            remedy="Rewrite the table with data_storage_version 2.1 or later.",
        )
    known = {path: field.id for path, field in _paths(table.manifest.manifest.fields).items()}
    known[(TOMBSTONE,)] = max(known.values()) + 1
    laid = _laid_out(schema, table.primary_key, version, lambda made: tuple(known[path] for path in _paths(made)))
    required = frozenset(field.name for field in base if not field.nullable)
    return replace(laid, required=required, opened=WriterVersion.of(table))


def stored_columns(
    schema: pa.Schema, ids: Sequence[int], like: RegionColumns, opened: WriterVersion | None = None
) -> RegionColumns:
    """The columns of rows that another writer stored when the table had other columns.

    Raises ``InvalidFormatError``: the ids are not those of these columns.
    """
    laid = _laid_out(schema.remove_metadata(), like.key, like.file_version, lambda _: tuple(ids))
    return replace(laid, opened=opened)


def _laid_out(
    schema: pa.Schema, key: tuple[str, ...], version: str, ids_of: Callable[[Sequence[pb.Field]], tuple[int, ...]]
) -> RegionColumns:
    with lance_errors("lay out", "a generation of a region"):
        template = _template(schema, version)
    ids = ids_of(template.manifest.fields)
    if len(ids) != len(template.manifest.fields):
        raise InvalidFormatError(f"{len(ids)} field ids for {len(template.manifest.fields)} fields.")
    _renumber(template.manifest, ids)
    return RegionColumns(schema, key, version, ids, template)


def _template(schema: pa.Schema, version: str) -> VersionManifest:
    """The manifest that pylance writes for a generation with these columns, with field ids from 0."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        plain = pa.schema([field.with_nullable(True).remove_metadata() for field in schema])  # noqa: FBT003 - pyarrow's
        row = pa.table({field.name: pa.nulls(1, field.type) for field in plain}, schema=plain)
        made = lance.write_dataset(row, f"{folder}/rows", data_storage_version=cast("Any", version))
        like = made.get_fragments()[0].metadata.files[0]
        data = DataFile(
            "wal", like.fields, like.column_indices, like.file_major_version, like.file_minor_version,
            file_size_bytes=1, base_id=_BASE_ID,
        )  # fmt: skip
        lance.LanceDataset.commit(
            f"{folder}/generation",
            LanceOperation.Overwrite(
                schema,
                [FragmentMetadata(id=0, files=[data], physical_rows=1)],
                initial_bases=[DatasetBasePath(f"{folder}/wal", id=_BASE_ID, is_dataset_root=False)],
            ),
            enable_v2_manifest_paths=True,
        )
        (path,) = Path(folder, "generation", VERSIONS_FOLDER).glob("*.manifest")
        decoded = decode_version_manifest(path.read_bytes())
    # Those of the scratch table: a generation is never committed to again.
    decoded.manifest.ClearField("transaction_file")
    decoded.manifest.ClearField("transaction_section")
    return VersionManifest(decoded.manifest, None, None, decoded.major, decoded.minor)


def _renumber(made: pb.Manifest, ids: Sequence[int]) -> None:
    numbers = {field.id: number for field, number in zip(made.fields, ids, strict=True)} | {_ROOT: _ROOT}
    for field in made.fields:
        field.id, field.parent_id = numbers[field.id], numbers[field.parent_id]
    for fragment in made.fragments:
        for file in fragment.files:
            renumbered = [numbers[field] for field in file.fields]
            del file.fields[:]
            file.fields.extend(renumbered)


def _paths(fields: Sequence[pb.Field]) -> dict[tuple[str, ...], pb.Field]:
    known = {field.id: field for field in fields}

    def path(field: pb.Field) -> tuple[str, ...]:
        return (*path(known[field.parent_id]), field.name) if field.parent_id in known else (field.name,)

    return {path(field): field for field in fields}


def _check_names(rows: pa.Table, wanted: list[str]) -> None:
    if sorted(rows.column_names) != sorted(wanted):
        raise InvalidUsageError(f"The rows have the columns {rows.column_names}; these are expected: {wanted}.")


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidUsageError(f"The column {field.name} is {column.type}, not {field.type}: {error}.") from error


def _repeat(*, value: bool, times: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.repeat(pa.scalar(value), times)])
