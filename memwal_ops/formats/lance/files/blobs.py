"""Copy blob columns from a generation to the base table, and encode rows as files outside of datasets, in memory.

A scan returns a descriptor for each blob: its position and its size. A writer needs another type: the bytes, or the URI
of an external file. So the descriptors are read with the rows, then the bytes of the winning rows, in batches that fit
the memory budget. An external blob stays a reference and is never opened: it may exceed any budget, and be on a store
that memwal-ops cannot read.

Files of logs, snapshots and indexes are Lance files or Arrow streams, written and read as a whole.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.blob import BlobType
from lance.file import LanceFileReader, LanceFileWriter

from memwal_ops.errors import InvalidFormatError, InvariantViolatedError, SchemaProjectionError
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors
from memwal_ops.formats.lance.wire.lance_file import check_lance_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


_MARK, _MARKED = b"lance-encoding:blob", b"true"
_EXTERNAL = 3


def holds_blobs(field: pa.Field) -> bool:
    """Whether the field is a blob column, of either kind, or contains one."""
    return _is_blob(field) or any(map(holds_blobs, _inner(field.type)))


def holds_blobs_in_lists(field: pa.Field) -> bool:
    """Whether the field contains a list of blobs: pylance's reader panics on a batch in which all are empty."""
    inner = _inner(field.type)
    return any(map(holds_blobs_in_lists if pa.types.is_struct(field.type) else holds_blobs, inner))


def written_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that a writer needs: each blob column in the storage type that can represent every kind of blob.

    pylance uses one type name for two storage types: with a byte range of an external blob, and without.
    """
    return pa.schema([field.with_type(written_type(field.type)) for field in schema], metadata=schema.metadata)


def written_type(kind: pa.DataType) -> pa.DataType:
    """The type that a writer needs, see :func:`written_schema`."""
    return _with_blobs_as(kind, BlobType())


def bytes_type(kind: pa.DataType) -> pa.DataType:
    """The type in which all blobs are plain bytes."""
    return _with_blobs_as(kind, pa.large_binary())


def _with_blobs_as(kind: pa.DataType, blob: pa.DataType) -> pa.DataType:
    if isinstance(kind, BlobType):
        return blob
    inner = [field.with_type(_with_blobs_as(field.type, blob)) for field in _inner(kind)]
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    if pa.types.is_list(kind):
        return pa.list_(inner[0])
    return pa.large_list(inner[0]) if pa.types.is_large_list(kind) else kind


def _is_blob(field: pa.Field) -> bool:
    return isinstance(field.type, BlobType) or (field.metadata or {}).get(_MARK) == _MARKED


def _inner(kind: pa.DataType) -> list[pa.Field]:
    if not (pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return []
    return [kind.field(place) for place in range(kind.num_fields)]


def with_payload(
    dataset: lance.LanceDataset, rows: pa.RecordBatch, max_bytes: int, *, references: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with blobs instead of descriptors, in one batch or several.

    Args:
        dataset: the dataset that was scanned.
        rows: from a scan that returns descriptors, with ``_rowaddr``, which is removed from the result.
        max_bytes: blob bytes per batch; a row with more is a batch of its own.
        references: whether external blobs stay references; otherwise they are read too, and all are plain bytes.

    Raises:
        InvariantViolatedError: other rows were read than were requested.
        SchemaProjectionError: a reference into a storage base of the generation.
    """
    fields = [dataset.schema.field(name) for name in rows.schema.names if name != ROW_ADDRESS]
    blobs = [field for field in fields if holds_blobs(field)]
    sizes = sum((_payload(rows.column(field.name), field) for field in blobs), np.zeros(rows.num_rows, np.int64))
    for start, length in _slices(sizes, max_bytes):
        part = rows.slice(start, length)
        columns = [
            _filled(dataset, part, field, references=references) if field in blobs else part.column(field.name)
            for field in fields
        ]
        yield pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])


def from_bytes(values: pa.Array) -> pa.Array:
    """Blobs of the type that a writer needs, with these bytes."""
    none = [pa.nulls(len(values), field.type) for field in list(BlobType().storage_type)[1:]]
    storage = pa.StructArray.from_arrays(
        [values.cast(pa.large_binary()), *none], fields=list(BlobType().storage_type), mask=values.is_null()
    )
    return pa.ExtensionArray.from_storage(BlobType(), storage)


def _slices(sizes: npt.NDArray[np.int64], max_bytes: int) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        limit = (ends[start - 1] if start else 0) + max_bytes
        end = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
        yield start, end - start
        start = end


def _payload(array: pa.Array, field: pa.Field) -> npt.NDArray[np.int64]:
    """Bytes to read for each row; not 0 if only a read distinguishes NULL from an empty blob."""
    if _is_blob(field):
        size = _int64(array.field("size"))
        if array.type.get_field_index("kind") < 0:  # the older kind of descriptor
            return size + 1
        return np.where(_int64(array.field("kind")) == _EXTERNAL, 0, size) * _valid(array)
    total = np.zeros(len(array), np.int64)
    if pa.types.is_struct(field.type):
        for place, inner in enumerate(_inner(field.type)):
            total += _payload(array.field(place), inner)
        return total * _valid(array)
    for inner in _inner(field.type):
        lengths = _int64(pc.list_value_length(array))
        ends = np.cumsum(lengths)
        sums = np.concatenate([[0], np.cumsum(_payload(array.flatten(), inner))])
        total = sums[ends] - sums[ends - lengths]
    return total


def _filled(dataset: lance.LanceDataset, rows: pa.RecordBatch, field: pa.Field, *, references: bool) -> pa.Array:
    descriptors = rows.column(field.name)
    wanted = _payload(descriptors, field) > 0 if references else np.ones(rows.num_rows, np.bool_)
    addresses = rows.column(ROW_ADDRESS).to_numpy()
    if wanted.all():
        payload = _read(dataset, field.name, addresses)
        return _blobs(descriptors, payload, field) if references else payload
    # Separately: a NULL list has no position for the bytes of its items.
    parts = [_blobs(descriptors.filter(pa.array(~wanted)), None, field)]
    if wanted.any():
        parts.append(_blobs(descriptors.filter(pa.array(wanted)), _read(dataset, field.name, addresses[wanted]), field))
    places = np.concatenate([np.flatnonzero(~wanted), np.flatnonzero(wanted)])
    joined = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
    return joined.take(pa.array(np.argsort(places)))


def _read(dataset: lance.LanceDataset, name: str, addresses: npt.NDArray[np.uint64]) -> pa.Array:
    blobs = dataset.scanner(
        columns=[name],
        filter=f"{ROW_ADDRESS} IN ({', '.join(map(str, addresses.tolist()))})",
        with_row_address=True,
        scan_in_order=True,
        blob_handling="all_binary",
    ).to_table()
    if not np.array_equal(blobs.column(ROW_ADDRESS).to_numpy(), addresses):
        raise InvariantViolatedError(
            f"Column {name!r}: {len(addresses)} blobs were requested, and {blobs.num_rows} were read."
        )
    return blobs.column(name).combine_chunks()


def _blobs(descriptors: pa.Array, payload: pa.Array | None, field: pa.Field) -> pa.Array:
    """Blobs of the type that a writer needs; without ``payload``, all are references or empty."""
    if _is_blob(field):
        return _leaf(descriptors, payload, field)
    inner = _inner(field.type)
    if pa.types.is_struct(field.type):
        children = [
            _blobs(descriptors.field(place), None if payload is None else payload.field(place), column)
            for place, column in enumerate(inner)
        ]
        fields = [column.with_type(written_type(column.type)) for column in inner]
        return pa.StructArray.from_arrays(children, fields=fields, mask=descriptors.is_null())
    if not inner:
        return descriptors
    values = _blobs(descriptors.flatten(), None if payload is None else payload.flatten(), inner[0])
    large = pa.types.is_large_list(field.type)
    offsets = np.concatenate([[0], np.cumsum(_int64(pc.list_value_length(descriptors)))])
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(
        pa.array(offsets, pa.int64() if large else pa.int32()),
        values,
        type=written_type(field.type),
        mask=descriptors.is_null(),
    )


def _leaf(descriptors: pa.Array, payload: pa.Array | None, field: pa.Field) -> pa.Array:
    count = len(descriptors)
    null = descriptors.is_null()
    data = pa.repeat(pa.scalar(b"", pa.large_binary()), count) if payload is None else payload.cast(pa.large_binary())
    if not isinstance(field.type, BlobType):
        return pc.if_else(null, pa.scalar(None, pa.large_binary()), data).cast(field.type)
    external = pc.and_(pc.is_valid(descriptors), pc.equal(descriptors.field("kind"), _EXTERNAL))
    if pc.any(pc.and_(external, pc.not_equal(descriptors.field("blob_id"), 0))).as_py():
        raise SchemaProjectionError(
            f"Column {field.name!r} has external blobs below a storage base that only the generation defines.",
            remedy="Write these rows again with absolute URIs, through a writer of the region.",
        )
    ranged = pc.and_(external, pc.greater(descriptors.field("size"), 0))
    none = pa.scalar(None)
    storage = pa.StructArray.from_arrays(
        [
            pc.if_else(external, none.cast(pa.large_binary()), data),
            pc.if_else(external, descriptors.field("blob_uri"), none.cast(pa.string())),
            pc.if_else(ranged, descriptors.field("position"), none.cast(pa.uint64())),
            pc.if_else(ranged, descriptors.field("size"), none.cast(pa.uint64())),
        ],
        fields=list(BlobType().storage_type),
        mask=null,
    )
    return pa.ExtensionArray.from_storage(BlobType(), storage)


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _int64(array: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False))


_NAME = "file.lance"
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
"""A stream is padded to 8 bytes; Lance panics at decimals that are not at a multiple of 16."""


def lance_bytes(rows: pa.Table, version: str, what: str) -> bytes:
    """Encode rows as a Lance file of a format version; without rows, as an empty file with the schema and metadata.

    Raises ``StorageError``, which names ``what``: pylance cannot write such columns.
    """
    # Its removal fails if the program ends while a background thread still writes there.
    temporary = tempfile.TemporaryDirectory(prefix="memwal-ops-", ignore_cleanup_errors=True)
    with temporary as folder, lance_errors("encode", what):
        path = Path(folder) / _NAME
        with LanceFileWriter(str(path), rows.schema, version=version) as writer:
            for batch in rows.to_batches():
                writer.write_batch(batch)
        return path.read_bytes()


def lance_rows(data: bytes, what: str, *, max_rows: int | None = None) -> pa.Table:
    """Decode the rows of a Lance file.

    Raises ``InvalidFormatError``, which names ``what``: it is not a Lance file, is damaged, or has more than
    ``max_rows``.
    """
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        path = Path(folder) / _NAME
        path.write_bytes(data)
        try:
            check_lance_file(data, len(data))
            with lance_errors("decode", what):
                reader = LanceFileReader(str(path))
                if max_rows is not None and reader.num_rows() > max_rows:
                    raise InvalidFormatError(f"it claims {reader.num_rows()} rows in {len(data)} bytes")
                return _json_as_text(reader.read_all().to_table())
        except Exception as error:
            raise InvalidFormatError(f"{what[:1].upper()}{what[1:]} is not a readable Lance file: {error}") from error


def read_stream(data: bytes) -> pa.Table:
    """The rows of a stream. Raises ``pa.ArrowException`` if it is none."""
    try:
        return _json_as_text(pa.ipc.open_stream(data, options=ALIGNED).read_all())
    except (OSError, ValueError) as error:  # as Arrow raises for some damage
        raise pa.ArrowInvalid(str(error)) from error


def _json_as_text(rows: pa.Table) -> pa.Table:
    """Rows with JSON as a table returns it: files and streams have it in a binary form, which a table decodes."""
    names = [field.name for field in rows.schema if _has_json(field)]
    if names:
        texts = lance.write_dataset(rows.select(names), f"memory://{uuid.uuid4()}").to_table()
        for name in names:
            rows = rows.set_column(rows.schema.get_field_index(name), texts.schema.field(name), texts[name])
    return rows


def _has_json(field: pa.Field) -> bool:
    named = (field.metadata or {}).get(b"ARROW:extension:name") == b"lance.json"
    return named or any(map(_has_json, _inner(field.type)))


def stream_bytes(rows: pa.Table) -> bytes:
    """Rows as a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    written: bytes = sink.getvalue().to_pybytes()
    return written
