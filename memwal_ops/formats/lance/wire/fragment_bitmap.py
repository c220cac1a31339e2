"""The fragments that an index segment covers: a roaring bitmap in the portable 32-bit format."""

from __future__ import annotations

from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError

# Far above any real table. Eight bytes of a bitmap can encode 65,536 ids, so 60 KB could decode to gigabytes.
_MAX_FRAGMENTS = 1 << 22


def decode_fragment_bitmap(data: bytes) -> frozenset[int]:
    """The fragment ids; none if there are no bytes, since the segment's coverage is then unknown.

    Raises:
        InvalidFormatError: the bytes are not a roaring bitmap, or encode an impossible number of fragments.
    """
    if not data:
        return frozenset()
    try:
        bitmap = BitMap.deserialize(data)
    except ValueError as error:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: {error}") from error
    if len(bitmap) > _MAX_FRAGMENTS:
        raise InvalidFormatError(f"The fragment bitmap of an index is damaged: it has {len(bitmap)} fragments.")
    return frozenset(bitmap)


def encode_fragment_bitmap(fragments: frozenset[int]) -> bytes:
    """The bitmap of these fragment ids."""
    return bytes(BitMap(fragments).serialize())
