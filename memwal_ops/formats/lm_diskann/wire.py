"""Decode and encode the files of an index folder (docs/formats/lm-diskann.md), and define a commit's changes. No I/O.

``metadata.lmd`` has the parameters, which determine the layout of a node block. The view consists of frames: a header,
a table of named sections, their bytes, one checksum. A frame is decoded completely or not at all: bytes that a killed
writer left at the end of a log have no valid checksum, and are not a frame.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from uuid import UUID

import numpy as np
import xxhash

from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError
from memwal_ops.formats.lm_diskann.errors import COPY_METADATA, PUBLISH_AGAIN, RESTORE, IndexCorruptError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


_MAGIC = b"LMDISKAN"
RELEASE = 1
METRICS = ("l2", "cosine")
QUANTIZERS = ("pq", "ternary")
PAGE = 4096
MAX_DIMENSIONS = 4096
MAX_LINKS = 512
_FORM = struct.Struct("<8sIIHHHHdIII4x16s56x")
_BYTES = 128
TOMBSTONED, OVERFLOW = 1, 2
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
    """The parameters that are fixed at creation; vectors of a cosine index are stored with length 1.

    Attributes:
        links: R_f, the maximum of forward links of a node; R_b, that of inline backlinks, is twice as high.
        alpha: pruning parameter; 1 or more.
        search_list: L, the length of the candidate list of inserts, and the default for searches.
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
        at_ids = _aligned(HEADER.itemsize + 4 * self.dimension, 32)
        at_codes = _aligned(at_ids + 4 * self.links, 32)
        at_backlinks = _aligned(at_codes + self.links * self.code_bytes, 32)
        size = _aligned(at_backlinks + 4 * self.backlinks, PAGE)
        return Layout(self.dimension, self.links, self.backlinks, self.code_bytes, size, at_ids, at_codes, at_backlinks)


def encode_metadata(parameters: Parameters) -> bytes:
    """Encode the 128 bytes of ``metadata.lmd``."""
    kinds = 1 + METRICS.index(parameters.metric), 1 + QUANTIZERS.index(parameters.quantizer)
    body = _FORM.pack(
        _MAGIC, RELEASE, parameters.dimension, *kinds, parameters.links, parameters.backlinks, parameters.alpha,
        parameters.search_list, parameters.code_bytes, parameters.layout.block_size, parameters.uuid.bytes,
    )  # fmt: skip
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_metadata(data: bytes) -> Parameters:
    """Decode ``metadata.lmd``. Raises ``TableCorruptError``, and ``UnsupportedFeatureError``: of a later release."""
    if len(data) != _BYTES or data[:8] != _MAGIC:
        raise IndexCorruptError(
            f"metadata.lmd is not valid: {len(data)} bytes that begin with {data[:8]!r}.", remedy=COPY_METADATA
        )
    body = data[:-8]
    if xxhash.xxh3_64_intdigest(body) != int.from_bytes(data[-8:], "little"):
        raise IndexCorruptError("metadata.lmd is damaged: its checksum does not match.", remedy=COPY_METADATA)
    fields = _FORM.unpack(body)
    _, release, dimension, metric, quantizer, links, backlinks, alpha, search_list, code_bytes, size, uuid = fields
    if release != RELEASE:
        raise UnsupportedFeatureError(f"metadata.lmd has format release {release}; the latest supported is {RELEASE}.")
    try:
        made = Parameters(
            dimension, METRICS[metric - 1], links, alpha, search_list, QUANTIZERS[quantizer - 1], UUID(bytes=uuid)
        )
    except (InvalidUsageError, IndexError) as error:
        raise IndexCorruptError(f"metadata.lmd has impossible values: {error}", remedy=COPY_METADATA) from error
    if (backlinks, code_bytes, size) != (made.backlinks, made.code_bytes, made.layout.block_size) or 0 in fields[3:5]:
        raise IndexCorruptError(
            "metadata.lmd is inconsistent: its block size does not match its parameters.", remedy=COPY_METADATA
        )
    return made


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to


def headers(blocks: NDArray[np.uint8]) -> Any:
    """The headers of blocks of shape [n, block_size]: a structured array [n], a view of the same bytes."""
    return blocks[:, : HEADER.itemsize].view(HEADER)[:, 0]


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
        length: bytes.
        sections: by name, as bytes; :meth:`array` converts them. ``offsets``: their positions in the frame.
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

        Raises ``TableCorruptError``: its length is not a multiple of the type's.
        """
        section = self.sections.get(name)
        if section is None:
            return np.zeros(0, dtype)
        try:
            return section.view(dtype)
        except ValueError as error:
            raise IndexCorruptError(
                f"The section {name} of a view has {len(section)} bytes.", remedy=PUBLISH_AGAIN
            ) from error


def encode_frame(kind: int, number: int, epoch: int, uuid: UUID, sections: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode a frame; sections, and the next frame, start at multiples of 64."""
    at = _aligned(HEADER_BYTES + _SECTION_BYTES * len(sections), ALIGN)
    table, parts = [], []
    for name, values in sections.items():
        data = np.ascontiguousarray(values)
        table.append(_SECTION.pack(name.encode(), at, data.nbytes, data.itemsize, 0))
        parts.append((at, data))
        at = _aligned(at + data.nbytes, ALIGN)
    whole = bytearray(at)
    whole[:HEADER_BYTES] = _HEADER.pack(MAGIC, at, epoch, number, uuid.bytes, kind, len(sections), bytes(8))
    whole[HEADER_BYTES : HEADER_BYTES + _SECTION_BYTES * len(table)] = b"".join(table)
    for offset, data in parts:
        whole[offset : offset + data.nbytes] = data.tobytes()
    digest = xxhash.xxh3_64_intdigest(bytes(whole))
    whole[_AT_CHECKSUM : _AT_CHECKSUM + 8] = digest.to_bytes(8, "little")
    return bytes(whole)


def decode_frame(data: NDArray[np.uint8]) -> Frame | None:
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


U4, U8, I8 = np.dtype("<u4"), np.dtype("<u8"), np.dtype("<i8")
MAX_NODES = 0xFFFFFFFF - 1
"""Node ids that an index can allocate: links are 32 bits, and the highest value is that of an unused one."""
MAX_CODEBOOKS = 0xFFFF
"""Codebooks that an index can train: blocks have 16 bits for the id of theirs."""
_LIMITS = {"next_node_id": MAX_NODES, "slot_count": 0xFFFFFFFF}
_MAX_COUNTER = 1 << 62


_no_numbers: Any = partial(np.zeros, 0, U8)
_no_pairs: Any = partial(np.zeros, (0, 2), U8)


@dataclass(frozen=True)
class State:
    """The one row of ``lmd_metadata``.

    Attributes:
        epoch: of the last commit; the revision of the index.
        merge_sequence_number: merges so far.
        next_node_id: the next unused node id.
        slot_count: slots allocated so far; the file may be longer after a killed run.
        retained_from: the lowest epoch that can be read.
        codebook_id: of the current codebook; 0: there is none, and no graph.
        live: number of live rows.
        healed: tombstones to which no link leads since ``healed`` was set in the sweep list.
        followed: the version of the table that the index follows; 0: none.
        unusable: why the index cannot follow its table any more (``source.Unusable``); 0: it can.
    """

    epoch: int
    merge_sequence_number: int = 0
    next_node_id: int = 0
    slot_count: int = 0
    retained_from: int = 1
    codebook_id: int = 0
    live: int = 0
    healed: int = 0
    followed: int = 0
    unusable: int = 0

    @classmethod
    def checked(cls, values: Sequence[int | None], where: str, remedy: str = RESTORE) -> Self:
        """A state that was read. Raises ``TableCorruptError`` if a number is missing or out of range."""
        for name, value in zip(cls.__dataclass_fields__, values, strict=True):
            if value is None or value > _LIMITS.get(name, _MAX_COUNTER):
                raise IndexCorruptError(f"{where} is damaged: {name} is {value}.", remedy=remedy)
        return cls(*(value for value in values if value is not None))


@dataclass(frozen=True)
class Changes:
    """The changes of one commit.

    Attributes:
        state: the state after the commit.
        delta_nodes, blocks: nodes with a new version in the delta table, and the sealed blocks.
        moved_nodes, moved_epochs, moved_slots: versions that are in the graph from now on, with their epochs.
        retired: uint64 [n, 4]: slot, node, epoch of the version in it, epoch of the next version.
        taken: slots that were on the free list.
        merged_nodes, merged_versions: versions removed from the delta table.
        row_ids, row_nodes: added rows, and their nodes.
        unmapped: nodes whose entries leave the lookup, before rows are added; those of them that are tombstones are
            added as removed ones.
        removed: nodes whose rows are removed, and which become tombstones.
        entries: all entry points from now on; None: unchanged.
        overflow_reset: nodes whose overflowed backlinks are all dropped first.
        overflow_added, overflow_dropped: uint64 [n, 2]: target and referrer.
        codebook: id and bytes of a new codebook.
        healed: deleted nodes to which no link leads any more.
        reclaimed: deleted nodes whose slots are in ``retired``: they leave all tables.
        followed: uuid of the transaction that made ``state.followed``; None: unchanged.
        rewired: nodes that leave the heal list; ``to_rewire``: nodes that are added to it.
    """

    state: State
    delta_nodes: NDArray[np.uint64] = field(default_factory=_no_numbers)
    blocks: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    moved_nodes: NDArray[np.uint64] = field(default_factory=_no_numbers)
    moved_epochs: NDArray[np.uint64] = field(default_factory=_no_numbers)
    moved_slots: NDArray[np.uint64] = field(default_factory=_no_numbers)
    retired: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 4), U8))
    taken: NDArray[np.uint64] = field(default_factory=_no_numbers)
    merged_nodes: NDArray[np.uint64] = field(default_factory=_no_numbers)
    merged_versions: NDArray[np.uint64] = field(default_factory=_no_numbers)
    row_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, I8))
    row_nodes: NDArray[np.uint64] = field(default_factory=_no_numbers)
    unmapped: NDArray[np.uint64] = field(default_factory=_no_numbers)
    removed: NDArray[np.uint64] = field(default_factory=_no_numbers)
    entries: NDArray[np.uint64] | None = None
    overflow_reset: NDArray[np.uint64] = field(default_factory=_no_numbers)
    overflow_added: NDArray[np.uint64] = field(default_factory=_no_pairs)
    overflow_dropped: NDArray[np.uint64] = field(default_factory=_no_pairs)
    codebook: tuple[int, NDArray[np.uint8]] | None = None
    healed: NDArray[np.uint64] = field(default_factory=_no_numbers)
    reclaimed: NDArray[np.uint64] = field(default_factory=_no_numbers)
    followed: str | None = None
    rewired: NDArray[np.uint64] = field(default_factory=_no_numbers)
    to_rewire: NDArray[np.uint64] = field(default_factory=_no_numbers)
