"""Which fragments an index segment covers: a roaring bitmap in the portable 32-bit form."""

from __future__ import annotations

from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError

# More than any table has by far. Eight bytes of a bitmap can stand for 65,536 ids: 60 KB for gigabytes.
_MOST = 1 << 22


def decode_fragment_bitmap(data: bytes) -> frozenset[int]:
    """The fragment ids; no bytes at all are a segment of which nothing is known, which is none.

    Raises:
        InvalidFormatError: the bytes are no roaring bitmap, or that of an impossible number of fragments.
    """
    if not data:
        return frozenset()
    try:
        bitmap = BitMap.deserialize(data)
    except ValueError as error:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: {error}") from error
    if len(bitmap) > _MOST:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: it has {len(bitmap)} fragments.")
    return frozenset(bitmap)
