"""Define ``Changes``, everything that one commit changes, both in the store and in the view."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from memwal_ops.formats.lm_diskann.errors import RESTORE, IndexCorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

U4, U8, I8 = np.dtype("<u4"), np.dtype("<u8"), np.dtype("<i8")
MAX_NODES = 0xFFFFFFFF - 1
"""Node ids that an index can allocate: links are 32 bits, and the highest value is that of an unused one."""
MAX_CODEBOOKS = 0xFFFF
"""Codebooks that an index can train: blocks have 16 bits for the id of theirs."""
_LIMITS = {"next_node_id": MAX_NODES, "slot_count": 0xFFFFFFFF}
_MAX_COUNTER = 1 << 62


def _no_numbers() -> NDArray[Any]:
    return np.zeros(0, U8)


def _no_pairs() -> NDArray[Any]:
    return np.zeros((0, 2), U8)


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
