"""Which fragments an index segment covers: a roaring bitmap in the portable 32-bit form."""

from __future__ import annotations

from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError


def decode_fragment_bitmap(data: bytes) -> frozenset[int]:
    """The fragment ids; no bytes at all are a segment of which nothing is known, which is none.

    Raises:
        InvalidFormatError: the bytes are no roaring bitmap.
    """
    if not data:
        return frozenset()
    try:
        return frozenset(BitMap.deserialize(data))
    except ValueError as error:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: {error}") from error
