"""Read and write Arrow streams of logs, with values where Lance expects them."""

from __future__ import annotations

import pyarrow as pa

ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
"""A stream is padded to 8 bytes; Lance panics at decimals that are not at a multiple of 16."""


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
