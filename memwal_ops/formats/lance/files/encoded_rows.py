"""Encode rows as a Lance file or an Arrow stream in memory, and decode them: files of logs, snapshots and indexes.

These are written and read as a whole, outside of datasets.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from lance.file import LanceFileReader, LanceFileWriter

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.wire.lance_file import check_lance_file

_NAME = "file.lance"
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
"""A stream is padded to 8 bytes; Lance panics at decimals that are not at a multiple of 16."""


def lance_bytes(rows: pa.Table, version: str, what: str) -> bytes:
    """Encode rows as a Lance file of a format version; without rows, as an empty file with the schema and metadata.

    Args:
        version: the format version.
        what: a description of the file, for errors.

    Raises:
        StorageError: pylance cannot write such columns.
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

    Args:
        what: a description of the file, for errors.
        max_rows: refuse a file that claims more rows; None: no limit.

    Raises:
        InvalidFormatError: it is not a Lance file, or is damaged.
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
                return reader.read_all().to_table()
        except Exception as error:
            raise InvalidFormatError(f"{what[:1].upper()}{what[1:]} is not a readable Lance file: {error}") from error


def read_stream(data: bytes) -> pa.Table:
    """The rows of a stream. Raises ``pa.ArrowException`` if it is none."""
    return pa.ipc.open_stream(data, options=ALIGNED).read_all()


def stream_bytes(rows: pa.Table) -> bytes:
    """Rows as a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    written: bytes = sink.getvalue().to_pybytes()
    return written
