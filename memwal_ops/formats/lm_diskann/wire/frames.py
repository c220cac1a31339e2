"""Decode and encode the frames of the published view: a header, a table of named sections, their bytes, one checksum.

A frame is decoded completely or not at all: bytes that a killed writer left at the end of a log have no valid
checksum, and are not a frame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import xxhash

from memwal_ops.formats.lm_diskann.errors import PUBLISH_AGAIN, IndexCorruptError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

MAGIC = b"LMDFRAME"
CURRENT, BASE, COMMIT = 1, 2, 3
ALIGN = 64
_HEADER = struct.Struct("<8sQQQ16sII8s")
_SECTION = struct.Struct("<8sQQII")
HEADER_BYTES = _HEADER.size
_SECTION_BYTES = _SECTION.size
_AT_CHECKSUM = 56
_MAX_SECTIONS = 64


@dataclass(frozen=True)
class Frame:
    """A decoded frame.

    Attributes:
        kind: ``CURRENT``, ``BASE`` or ``COMMIT``.
        number: of the view that it belongs to.
        epoch: of the index, once the frame is applied.
        uuid: of the index.
        length: bytes.
        sections: by name, as bytes; :meth:`array` converts them.
        offsets: the position of each section in the frame.
    """

    kind: int
    number: int
    epoch: int
    uuid: UUID
    length: int
    sections: Mapping[str, NDArray[Any]]
    offsets: Mapping[str, int]

    def array(self, name: str, dtype: Any) -> NDArray[Any]:
        """A section as numbers of a type; empty if the frame does not have it.

        Raises:
            TableCorruptError: its length is not a multiple of the type's.
        """
        found = self.sections.get(name)
        if found is None:
            return np.zeros(0, dtype)
        try:
            return found.view(dtype)
        except ValueError as error:
            raise IndexCorruptError(
                f"The section {name} of a view has {len(found)} bytes.", remedy=PUBLISH_AGAIN
            ) from error


def encode(kind: int, number: int, epoch: int, uuid: UUID, sections: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode a frame; sections, and the next frame, start at multiples of 64."""
    at = _aligned(HEADER_BYTES + _SECTION_BYTES * len(sections))
    table, parts = [], []
    for name, values in sections.items():
        data = np.ascontiguousarray(values)
        table.append(_SECTION.pack(name.encode(), at, data.nbytes, data.itemsize, 0))
        parts.append((at, data))
        at = _aligned(at + data.nbytes)
    whole = bytearray(at)
    whole[:HEADER_BYTES] = _HEADER.pack(MAGIC, at, epoch, number, uuid.bytes, kind, len(sections), bytes(8))
    whole[HEADER_BYTES : HEADER_BYTES + _SECTION_BYTES * len(table)] = b"".join(table)
    for offset, data in parts:
        whole[offset : offset + data.nbytes] = data.tobytes()
    digest = xxhash.xxh3_64_intdigest(bytes(whole))
    whole[_AT_CHECKSUM : _AT_CHECKSUM + 8] = digest.to_bytes(8, "little")
    return bytes(whole)


def decode(data: NDArray[np.uint8]) -> Frame | None:
    """Decode the frame at the start of some bytes; None if there is no complete and undamaged one."""
    if len(data) < HEADER_BYTES:
        return None
    head = bytes(data[:HEADER_BYTES])
    magic, length, epoch, number, uuid, kind, count, digest = _HEADER.unpack(head)
    if magic != MAGIC or not HEADER_BYTES <= length <= len(data) or length % ALIGN or count > _MAX_SECTIONS:
        return None
    seen = xxhash.xxh3_64(head[:_AT_CHECKSUM] + bytes(8))
    seen.update(np.ascontiguousarray(data[HEADER_BYTES:length]).data)
    if seen.intdigest() != int.from_bytes(digest, "little"):
        return None
    sections, offsets = {}, {}
    for at in range(count):
        name, offset, size, _, _ = _SECTION.unpack_from(
            bytes(data[HEADER_BYTES + _SECTION_BYTES * at :][:_SECTION_BYTES])
        )
        if offset + size > length:
            return None
        key = name.rstrip(b"\0").decode("ascii", "replace")
        sections[key], offsets[key] = data[offset : offset + size], offset
    return Frame(kind, number, epoch, UUID(bytes=uuid), length, sections, offsets)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
