"""Check the length of a DuckDB file by its header and its list of free blocks, without opening the database.

The file has a header of its own, two headers in turn, of which the one of the higher iteration counts, and blocks of
one size. A checkpoint cuts free blocks off the end after it has written the header, which still counts them.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.files import io_error

_MAGIC, _AT_MAGIC = b"DUCK", 8
_HEADERS, _FIRST_BLOCK = (4096, 8192), 12_288
_HEADER = struct.Struct("<8x7Q")  # after a checksum, as in each block
_CHECKSUM, _NUMBER = 8, 8
_NOWHERE = 2**64 - 1
_PER_BLOCK = 64
"""Parts of a block of metadata. A pointer to one is the number of the block, with that of the part in the top byte."""
_BLOCK_SIZES = {1 << power for power in range(14, 19)}
_FORM = 69
"""The only form of files whose list of free blocks is read here; of another one, only the magic is checked."""
_ATTEMPTS = 5


class _Header(NamedTuple):
    iteration: int
    metadata: int
    free: int
    blocks: int
    block_size: int
    vector_size: int
    form: int


def check_store_file(path: str) -> None:
    """Check that a store exists, and that none of its blocks is missing. Reads a few KiB.

    Raises:
        StorageError: it cannot be read.
        TableCorruptError: it is missing, cut short, or not a DuckDB database.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_ATTEMPTS):
                header = _header(file, path)
                if header.form != _FORM:
                    return
                used = _used(file, header)
                length = os.fstat(file).st_size
                if length >= used:
                    return
                if _header(file, path) == header:  # else a checkpoint wrote it meanwhile
                    break
        finally:
            os.close(file)
    except FileNotFoundError:
        raise IndexCorruptError(f"{path} is missing.") from None
    except OSError as error:
        raise io_error(error) from error
    raise IndexCorruptError(f"{path} has {length:,} bytes; its blocks need {used:,} at least.")


def _header(file: int, path: str) -> _Header:
    head = os.pread(file, _FIRST_BLOCK, 0)
    if len(head) < _FIRST_BLOCK or head[_AT_MAGIC : _AT_MAGIC + len(_MAGIC)] != _MAGIC:
        raise IndexCorruptError(f"{path} is not a DuckDB database.")
    found = max(_Header(*_HEADER.unpack_from(head, at)) for at in _HEADERS)
    if found.form == _FORM and found.block_size not in _BLOCK_SIZES:
        raise IndexCorruptError(f"{path} is damaged: its header has blocks of {found.block_size:,} bytes.")
    return found


def _used(file: int, header: _Header) -> int:
    """The bytes up to the end of the last block that is not free; of what is cut off, as many as are known."""
    part = (header.block_size - _CHECKSUM) // _PER_BLOCK // _NUMBER * _NUMBER
    at, numbers, seen = header.free, bytearray(), set[int]()
    while at != _NOWHERE and at not in seen:
        seen.add(at)
        block, index = at & ((1 << 56) - 1), at >> 56
        end = _FIRST_BLOCK + (block + 1) * header.block_size
        if block >= header.blocks or end > os.fstat(file).st_size:
            return end
        data = os.pread(file, part, end - header.block_size + _CHECKSUM + index * part)
        at = int.from_bytes(data[:_NUMBER], "little")
        numbers += data[_NUMBER:]
    count = int.from_bytes(numbers[:_NUMBER], "little")
    free = {*struct.unpack_from(f"<{min(count, len(numbers) // _NUMBER - 1)}Q", numbers, _NUMBER)} if numbers else set()
    blocks = header.blocks
    while blocks - 1 in free:
        blocks -= 1
    return _FIRST_BLOCK + blocks * header.block_size
