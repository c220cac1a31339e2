"""Encode and decode ``metadata.lmd``, and compute the layout of a node block from it (docs/formats/lm-diskann.md)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

import xxhash

from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lm_diskann.errors import COPY_METADATA, IndexCorruptError

MAGIC = b"LMDISKAN"
RELEASE = 1
METRICS = ("l2", "cosine")
QUANTIZERS = ("pq", "ternary")
PAGE = 4096
HEADER = 64
MAX_DIMENSIONS = 4096
MAX_LINKS = 512
_ALIGN = 32
_FORM = struct.Struct("<8sIIHHHHdIII4x16s56x")
_BYTES = 128


class Layout(NamedTuple):
    """Sizes and byte offsets within a node block, as passed to compiled code."""

    dimension: int
    links: int
    backlinks: int
    code_bytes: int
    block_size: int
    at_ids: int
    at_codes: int
    at_backlinks: int


@dataclass(frozen=True)
class Parameters:
    """The parameters that are fixed at creation.

    Attributes:
        dimension: floats per vector.
        metric: ``l2`` or ``cosine``; vectors of a cosine index are stored with length 1.
        links: R_f, the maximum of forward links of a node; R_b, that of inline backlinks, is twice as high.
        alpha: pruning parameter; 1 or more.
        search_list: L, the length of the candidate list of inserts, and the default for searches.
        quantizer: ``pq`` or ``ternary``.
        uuid: of the index; also in the store and the view.
    """

    dimension: int
    metric: str
    links: int
    alpha: float
    search_list: int
    quantizer: str
    uuid: UUID

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises ``InvalidUsageError``."""
        checks = (
            (1 <= self.dimension <= MAX_DIMENSIONS, f"dimension must be from 1 to {MAX_DIMENSIONS}"),
            (self.metric in METRICS, f"metric must be one of {', '.join(METRICS)}"),
            (4 <= self.links <= MAX_LINKS, f"R must be from 4 to {MAX_LINKS}"),  # noqa: PLR2004 - in the text
            (math.isfinite(self.alpha) and 1 <= self.alpha <= 4, "alpha must be from 1 to 4"),  # noqa: PLR2004
            (1 <= self.search_list <= 1 << 20, "L must be from 1 to 1048576"),
            (self.quantizer in QUANTIZERS, f"quantizer must be one of {', '.join(QUANTIZERS)}"),
        )
        for holds, message in checks:
            if not holds:
                raise InvalidUsageError(f"The index cannot be created: {message}.")

    @property
    def backlinks(self) -> int:
        """R_b."""
        return 2 * self.links

    @property
    def code_bytes(self) -> int:
        """Bytes of one compressed vector: at most 32 for PQ, two bit planes for ternary."""
        return min(32, self.dimension) if self.quantizer == "pq" else 2 * ((self.dimension + 7) // 8)

    @cached_property
    def layout(self) -> Layout:
        """The layout of a block."""
        at_ids = _aligned(HEADER + 4 * self.dimension)
        at_codes = _aligned(at_ids + 4 * self.links)
        at_backlinks = _aligned(at_codes + self.links * self.code_bytes)
        size = -(-(at_backlinks + 4 * self.backlinks) // PAGE) * PAGE
        return Layout(self.dimension, self.links, self.backlinks, self.code_bytes, size, at_ids, at_codes, at_backlinks)


def encode(parameters: Parameters) -> bytes:
    """Encode the 128 bytes of ``metadata.lmd``."""
    body = _FORM.pack(
        MAGIC,
        RELEASE,
        parameters.dimension,
        1 + METRICS.index(parameters.metric),
        1 + QUANTIZERS.index(parameters.quantizer),
        parameters.links,
        parameters.backlinks,
        parameters.alpha,
        parameters.search_list,
        parameters.code_bytes,
        parameters.layout.block_size,
        parameters.uuid.bytes,
    )
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode(data: bytes) -> Parameters:
    """Decode ``metadata.lmd``.

    Raises:
        TableCorruptError: it is damaged, or inconsistent.
        UnsupportedFeatureError: it was written by a later release of the format.
    """
    if len(data) != _BYTES or data[:8] != MAGIC:
        raise IndexCorruptError(
            f"metadata.lmd is not valid: {len(data)} bytes that begin with {data[:8]!r}.", remedy=COPY_METADATA
        )
    body = data[:-8]
    if xxhash.xxh3_64_intdigest(body) != int.from_bytes(data[-8:], "little"):
        raise IndexCorruptError("metadata.lmd is damaged: its checksum does not match.", remedy=COPY_METADATA)
    found = _FORM.unpack(body)
    _, release, dimension, metric, quantizer, links, backlinks, alpha, search_list, code_bytes, size, uuid = found
    if release != RELEASE:
        raise UnsupportedFeatureError(f"metadata.lmd has format release {release}; the latest supported is {RELEASE}.")
    try:
        made = Parameters(
            dimension, METRICS[metric - 1], links, alpha, search_list, QUANTIZERS[quantizer - 1], UUID(bytes=uuid)
        )
    except (InvalidUsageError, IndexError) as error:
        raise IndexCorruptError(f"metadata.lmd has impossible values: {error}", remedy=COPY_METADATA) from error
    if (backlinks, code_bytes, size) != (made.backlinks, made.code_bytes, made.layout.block_size) or 0 in found[3:5]:
        raise IndexCorruptError(
            "metadata.lmd is inconsistent: its block size does not match its parameters.", remedy=COPY_METADATA
        )
    return made


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
