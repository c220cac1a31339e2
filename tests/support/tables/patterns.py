"""Tables whose rows have a pattern of 16 bytes of their own in every type of column, and a search for these bytes.

A file may compress what it has: each is also decoded, by Lance's reader of files, and what it returns is searched.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader

from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIMENSION = 8
_BLOB = {"lance-encoding:blob": "true"}
SCALAR_INDEXES = {
    "id": "BTREE",
    "btree": "BTREE",
    "bitmap": "BITMAP",
    "tags": "LABEL_LIST",
    "text": "INVERTED",
    "ngram": "NGRAM",
    "zone": "ZONEMAP",
    "bloom": "BLOOMFILTER",
}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("grp", pa.int64()),
        *(pa.field(name, pa.string()) for name in ("btree", "bitmap", "text", "ngram", "zone", "bloom")),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("large", pa.large_string()),
        pa.field("bytes", pa.binary()),
        pa.field("fixed", pa.binary(16)),
        pa.field("decimal", pa.decimal128(38, 0)),
        pa.field("nested", pa.struct([pa.field("inner", pa.string()), pa.field("list", pa.list_(pa.string()))])),
        pa.field("wide", pa.string()),
        pa.field("blob", pa.large_binary(), metadata=_BLOB),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)


def pattern(number: int, column: str) -> str:
    """The pattern of a row in a column: 16 letters and digits, lower case, that no other row has."""
    return f"{column[:2]}{number:06d}qx{number * 7919 % 999983:06d}"


def vector(number: int) -> np.ndarray:
    """The vector of a row."""
    return np.random.default_rng(number + 7).random(DIMENSION, dtype=np.float32)


def row(number: int) -> dict[str, object]:
    """A row with a pattern in each column."""
    own = {name: pattern(number, name) for name in SCHEMA.names}
    return {
        "id": number,
        "grp": number % 10,
        **{name: own[name] for name in ("btree", "bitmap", "ngram", "zone", "bloom", "large")},
        "text": f"{own['text']} common word{number % 7}",
        "tags": [own["tags"], f"t{number % 3}"],
        "bytes": own["bytes"].encode(),
        "fixed": own["fixed"].encode(),
        "decimal": int.from_bytes(b"\0" + own["decimal"][:14].encode() + b"\0", "little"),
        "nested": {"inner": own["nested"], "list": [own["nested"][::-1]]},
        "wide": f"{own['wide']}{'w' * 5000}",
        "blob": own["blob"].encode() * 4,
        "vector": vector(number).tolist(),
    }


def rows(numbers: Iterable[int], *, blobs: bool = True) -> pa.Table:
    """Rows by number; without the blob column, which pylance's writer of logs refuses."""
    schema = SCHEMA if blobs else SCHEMA.remove(SCHEMA.get_field_index("blob"))
    return pa.Table.from_pylist([row(number) for number in numbers], schema=schema)


def patterns(number: int) -> dict[str, bytes]:
    """The patterns of a row, as they are stored."""
    found = {
        name: pattern(number, name).encode() for name in SCHEMA.names if name not in {"id", "grp", "decimal", "vector"}
    }
    return {
        **found,
        "decimal": pattern(number, "decimal")[:14].encode(),
        "nested list": pattern(number, "nested")[::-1].encode(),
        "vector": struct.pack(f"<{DIMENSION}f", *vector(number))[:16],
    }


def create(
    uri: str, numbers: Iterable[int] = range(300), *, stable: bool = False, every_index: bool = True, blobs: bool = True
) -> str:
    """A table of three fragments, with an index of each type, or two."""
    every = [*numbers]
    size = -(-len(every) // 3)
    for at in range(0, len(every), size):
        lance.write_dataset(
            rows(every[at : at + size], blobs=blobs),
            uri,
            mode="append" if at else "create",
            enable_stable_row_ids=stable,
        )
    dataset = lance.dataset(uri)
    for column, kind in SCALAR_INDEXES.items():
        if not every_index and column not in {"btree", "text"}:
            continue
        dataset.create_scalar_index(column, kind, name=f"by_{column}")
    if every_index:
        dataset.create_index("vector", "IVF_FLAT", name="by_vector", num_partitions=2)
    return uri


def holders(uri: str, numbers: Iterable[int]) -> dict[str, set[str]]:
    """Each file below a table that has a pattern of one of these rows, with the columns of the patterns.

    So has each version from which Lance reads one, deleted rows among them, as ``version N``.
    """
    wanted = [(name, value) for number in numbers for name, value in patterns(number).items()]
    found: dict[str, set[str]] = {}
    for place, data in [*_files(uri), *_versions(uri)]:
        if hits := {column for column, value in wanted if value in data}:
            found[place] = hits
    return found


def _files(uri: str) -> Iterator[tuple[str, bytes]]:
    for folder, _, names in os.walk(uri):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, uri), file.read() + decoded(path)


def _versions(uri: str) -> Iterator[tuple[str, bytes]]:
    for version in lance.dataset(uri).versions():
        dataset = lance.dataset(uri, version=version["version"])
        scanner = dataset.scanner(include_deleted_rows=True, with_row_id=True, blob_handling="all_binary")
        yield f"version {version['version']}", _bytes(scanner.to_table())


def decoded(path: str) -> bytes:
    """What Lance reads from a file, or Arrow: deleted rows among it. Empty: neither does."""
    try:
        if path.endswith((".lance", ".idx")):
            return _bytes(LanceFileReader(path).read_all().to_table())
        if path.endswith(".arrow"):
            return _bytes(pa.ipc.open_stream(path).read_all())
    except (OSError, ValueError):
        pass  # a data file with blobs, which a version decodes; a deletion file
    return b""


def _bytes(read: pa.Table) -> bytes:
    return b"".join(bytes(buffer) for column in read.columns for chunk in column.chunks for buffer in _buffers(chunk))


def _buffers(array: pa.Array) -> list[pa.Buffer]:
    return [buffer for buffer in array.buffers() if buffer is not None]
