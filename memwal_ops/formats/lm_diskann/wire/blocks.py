"""Decode node blocks: the header as a numpy type, and the checks of a block (docs/formats/lm-diskann.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops.formats.lm_diskann.errors import IndexCorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.wire.parameters import Layout

TOMBSTONED, OVERFLOW = 1, 2
AT_CHECKSUM = 40
HEADER = np.dtype(
    [
        ("node_id", "<u8"),
        ("row_id", "<i8"),
        ("creation_epoch", "<u8"),
        ("version", "<u8"),
        ("origin_txn", "<u8"),
        ("checksum", "<u8"),
        ("overflow_reference", "<u8"),
        ("num_forward_links", "<u2"),
        ("num_inline_backlinks", "<u2"),
        ("codebook_id", "<u2"),
        ("flags", "u1"),
        ("reserved", "u1"),
    ]
)


@dataclass(frozen=True)
class Block:
    """One decoded block. The arrays have as many entries as there are links."""

    header: Any
    vector: NDArray[np.float32]
    links: NDArray[np.uint32]
    codes: NDArray[np.uint8]
    backlinks: NDArray[np.uint32]


def checksum(data: bytes | NDArray[np.uint8]) -> int:
    """XXH3-64 of a block with its checksum field zero."""
    copy = bytearray(data)
    copy[AT_CHECKSUM : AT_CHECKSUM + 8] = bytes(8)
    return xxhash.xxh3_64_intdigest(bytes(copy))


def headers(blocks: NDArray[np.uint8]) -> Any:
    """The headers of blocks of shape [n, block_size]: a structured array [n], a view of the same bytes."""
    return blocks[:, : HEADER.itemsize].view(HEADER)[:, 0]


def decode(data: bytes | NDArray[np.uint8], layout: Layout) -> Block:
    """Decode and check a block.

    Raises:
        TableCorruptError: its length, its checksum or its counts are wrong.
    """
    raw = np.frombuffer(bytes(data), np.uint8)
    if len(raw) != layout.block_size:
        raise IndexCorruptError(f"A node block has {len(raw)} bytes, not {layout.block_size}.")
    header = raw[: HEADER.itemsize].view(HEADER)[0]
    if checksum(raw) != header["checksum"]:
        raise IndexCorruptError(f"The node block with the id {header['node_id']} is damaged: bad checksum.")
    links, backlinks = int(header["num_forward_links"]), int(header["num_inline_backlinks"])
    if links > layout.links or backlinks > layout.backlinks:
        raise IndexCorruptError(f"Node block {header['node_id']} has {links} links and {backlinks} backlinks.")
    codes = raw[layout.at_codes : layout.at_codes + layout.links * layout.code_bytes]
    return Block(
        header,
        raw[HEADER.itemsize : HEADER.itemsize + 4 * layout.dimension].view("<f4"),
        raw[layout.at_ids : layout.at_ids + 4 * links].view("<u4"),
        codes.reshape(layout.links, layout.code_bytes)[:links],
        raw[layout.at_backlinks : layout.at_backlinks + 4 * backlinks].view("<u4"),
    )
