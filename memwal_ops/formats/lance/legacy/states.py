"""The state machine of legacy MemWALs: every transition, its owner check, and its conflicts.

Pure values: each function takes the MemWALs of a version and returns a :class:`Change`. It follows Lance's
``rust/lance/src/index/mem_wal.rs``, and the specification where that is stricter (S1-009, S1-023).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memwal_ops.errors import InvalidUsageError, WriterFencedError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.legacy_index import MemWal, MemWalId, State, decode_mem_wal, encode_mem_wal


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the index: MemWALs that are added, replaced and removed.

    ``removed`` has each replaced MemWAL with its previous content: only ids are matched when the change is applied, and
    from the previous content other writers detect what was changed.
    """

    added: tuple[MemWal, ...] = ()
    updated: tuple[MemWal, ...] = ()
    removed: tuple[MemWal, ...] = ()

    @property
    def ids(self) -> frozenset[MemWalId]:
        """The MemWALs that it touches."""
        return frozenset(mem_wal.id for mem_wal in (*self.added, *self.updated, *self.removed))

    @property
    def only_removes(self) -> bool:
        """Whether it is a trim."""
        return not self.added and not self.updated

    def applied(self, mem_wals: Iterable[MemWal], version: int) -> tuple[MemWal, ...]:
        """The MemWALs of ``version``, which the change makes; what it adds or updates carries its number (S1-024)."""
        new = {mem_wal.id: replace(mem_wal, last_updated_dataset_version=version) for mem_wal in self.updated}
        gone = {mem_wal.id for mem_wal in self.removed} - new.keys()
        kept = [new.get(mem_wal.id, mem_wal) for mem_wal in mem_wals if mem_wal.id not in gone]
        return (*kept, *(replace(mem_wal, last_updated_dataset_version=version) for mem_wal in self.added))

    def message(self, version: int) -> table_pb2.LegacyUpdateMemWalState:
        """The change as the operation of a transaction that makes ``version``."""
        stamped = [
            [encode_mem_wal(replace(mem_wal, last_updated_dataset_version=version)) for mem_wal in group]
            for group in (self.added, self.updated)
        ]
        return table_pb2.LegacyUpdateMemWalState(
            added=stamped[0], updated=stamped[1], removed=map(encode_mem_wal, self.removed)
        )

    @classmethod
    def of(cls, message: table_pb2.LegacyUpdateMemWalState) -> Change:
        """The change that a transaction made. Raises ``TableCorruptError`` where it does not decode."""
        return cls(
            tuple(map(decode_mem_wal, message.added)),
            tuple(map(decode_mem_wal, message.updated)),
            tuple(map(decode_mem_wal, message.removed)),
        )

    def __or__(self, other: Change) -> Change:
        """Both changes as one; they touch different MemWALs."""
        return Change(self.added + other.added, self.updated + other.updated, self.removed + other.removed)


def advance(
    mem_wals: Sequence[MemWal],
    region: str,
    *,
    mem_table_location: str,
    wal_location: str,
    owner_id: str,
    expected_owner_id: str | None = None,
) -> Change:
    """Open a region's next generation, and seal the one before in the same change (S1-008, S1-009, S1-018).

    A region that has no MemWAL yet begins with generation 0. Both locations, of the new generation, differ from those
    of the one before. ``owner_id`` is that of the new generation, ``expected_owner_id`` of the newest; None: the region
    has none.

    Raises ``InvalidUsageError``: ``expected_owner_id`` is given and the region has no generation, or is not given and
    it has one; or a location is used again; ``WriterFencedError``: the newest generation has another owner (S1-022).
    """
    newest = max(
        (mem_wal for mem_wal in mem_wals if mem_wal.id.region == region), key=lambda mem_wal: mem_wal.id, default=None
    )
    if newest is None:
        if expected_owner_id is not None:
            raise InvalidUsageError(
                f"Region {region!r} has no MemWAL yet: expected_owner_id must be None, not {expected_owner_id!r}."
            )
        return create(mem_wals, MemWalId(region, 0), mem_table_location, wal_location, owner_id)
    if expected_owner_id is None:
        raise InvalidUsageError(
            f"Region {region!r} has a MemWAL already: expected_owner_id must be its owner, not None."
        )
    _check_owner(newest, expected_owner_id)
    if wal_location == newest.wal_location or mem_table_location == newest.mem_table_location:
        raise InvalidUsageError(f"The next generation of region {region!r} needs a WAL and a MemTable of its own.")
    opened = create(mem_wals, MemWalId(region, newest.id.generation + 1), mem_table_location, wal_location, owner_id)
    return seal(mem_wals, newest.id, expected_owner_id) | opened if newest.state is State.OPEN else opened


def create(
    mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, mem_table_location: str, wal_location: str, owner_id: str
) -> Change:
    """Add a generation, OPEN and without entries, regardless of others; writers use :func:`advance` instead.

    Raises ``InvalidUsageError``: there is one of that id.
    """
    if any(mem_wal.id == mem_wal_id for mem_wal in mem_wals):
        raise InvalidUsageError(f"There is a MemWAL for {mem_wal_id} already.")
    return Change(added=(MemWal(mem_wal_id, mem_table_location, wal_location, owner_id=owner_id),))


def append_entry(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, entry_id: int, owner_id: str) -> Change:
    """Record that the log has an entry (S1-004); entries that were skipped become holes (S1-015, S1-016).

    Raises ``InvalidUsageError``: no such MemWAL, it is not OPEN, or the entry is not above its last one;
    ``WriterFencedError``: another owner.
    """
    before = _owned(mem_wals, mem_wal_id, State.OPEN, owner_id)
    return _changed(before, replace(before, wal_entries=before.wal_entries.with_new_high(entry_id)))


def seal(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, owner_id: str) -> Change:
    """OPEN to SEALED: it accepts no more entries. Raises as :func:`append_entry`."""
    return _next_state(mem_wals, mem_wal_id, State.OPEN, owner_id)


def flush(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, owner_id: str) -> Change:
    """SEALED to FLUSHED: the rows are on disk (S1-019). Raises as :func:`append_entry`."""
    return _next_state(mem_wals, mem_wal_id, State.SEALED, owner_id)


def merge(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, owner_id: str) -> Change:
    """FLUSHED to MERGED: the rows are in the table (S1-020). Raises as :func:`append_entry`."""
    return _next_state(mem_wals, mem_wal_id, State.FLUSHED, owner_id)


def set_owner(
    mem_wals: Sequence[MemWal],
    mem_wal_id: MemWalId,
    owner_id: str,
    *,
    expected_owner_id: str | None = None,
    mem_table_location: str | None = None,
) -> Change:
    """Claim a MemWAL by changing its owner, in any state (S1-023); all that the old owner does then fails.

    ``expected_owner_id``: the owner before; None: any, which is all that Lance itself offers. ``mem_table_location``:
    the new owner's MemTable, another one than before; None: it stays.

    Raises ``InvalidUsageError``: no such MemWAL, or the owner or MemTable is the same; ``WriterFencedError``: the owner
    before is another one than expected.
    """
    before = find(mem_wals, mem_wal_id)
    if expected_owner_id is not None:
        _check_owner(before, expected_owner_id)
    if owner_id == before.owner_id:
        raise InvalidUsageError(f"{owner_id!r} owns {mem_wal_id} already.")
    if mem_table_location == before.mem_table_location:
        raise InvalidUsageError(f"A new owner of {mem_wal_id} needs a MemTable of its own.")
    location = before.mem_table_location if mem_table_location is None else mem_table_location
    return _changed(before, replace(before, owner_id=owner_id, mem_table_location=location))


def trim(mem_wals: Sequence[MemWal], covered: int | None) -> Change:
    """Remove the MERGED ones that every user index has caught up with; ``covered`` is by :func:`covered_version`."""
    return Change(removed=tuple(mem_wal for mem_wal in mem_wals if is_trimmable(mem_wal, covered)))


def is_trimmable(mem_wal: MemWal, covered: int | None) -> bool:
    """Lance's rule: MERGED, and last updated in a version that every user index has seen; see :func:`trim`."""
    seen = covered is None or mem_wal.last_updated_dataset_version <= covered
    return mem_wal.state is State.MERGED and seen


def covered_version(indexes: table_pb2.IndexSection | None) -> int | None:
    """The lowest version that a user index covers, each by its newest delta; None: there is no user index."""
    newest: dict[str, int] = {}
    for entry in () if indexes is None else indexes.indices:
        if not entry.name.startswith("__lance_"):
            newest[entry.name] = max(newest.get(entry.name, 0), entry.dataset_version)
    return min(newest.values(), default=None)


def find(mem_wals: Iterable[MemWal], mem_wal_id: MemWalId) -> MemWal:
    """The MemWAL of an id. Raises ``InvalidUsageError`` where there is none."""
    held = next((mem_wal for mem_wal in mem_wals if mem_wal.id == mem_wal_id), None)
    if held is None:
        raise InvalidUsageError(f"The table has no MemWAL for {mem_wal_id}.")
    return held


def disorder(mem_wals: Sequence[MemWal], region: str) -> str | None:
    """Describe the states of a region that no transition can produce; None: there are none.

    These are more than one generation that is not sealed (S1-009), or one in a later state than a lower one.
    """
    ascending = sorted((mem_wal for mem_wal in mem_wals if mem_wal.id.region == region), key=lambda mem_wal: mem_wal.id)
    unsealed = [mem_wal.id.generation for mem_wal in ascending if mem_wal.state is State.OPEN]
    if len(unsealed) > 1:
        listed = ", ".join(map(str, unsealed))
        return f"Region {region!r} has {len(unsealed)} OPEN generations ({listed}); at most one is allowed."
    for lower, higher in pairwise(ascending):
        if higher.state > lower.state:
            return (
                f"Region {region!r}: generation {higher.id.generation} is {higher.state.name}, and generation "
                f"{lower.id.generation} before it only {lower.state.name}."
            )
    return None


class Other(enum.Enum):
    """What another writer may have committed, by its conflicts with a change of MemWALs."""

    STATE = "UpdateMemWalState"
    MERGE = "Update with mem_wal_to_merge"
    DATA = "Append, Update, Overwrite, Delete, DataReplacement, Merge, Restore, Clone, Project"
    INDEPENDENT = "CreateIndex, Rewrite, UpdateConfig, ReserveFragments, UpdateBases"


def conflicts(ours: Change, other: Other, theirs: Change | None = None) -> bool:
    """Whether our change conflicts, by Lance's rules, with one that was committed since its version was read.

    ``theirs``: the MemWALs that the other one touched; for STATE and MERGE.
    """
    if other is Other.DATA:
        return True
    if other is Other.INDEPENDENT or theirs is None:
        return False
    if other is Other.STATE and (ours.only_removes or theirs.only_removes):
        return False
    # Lance accepts any state change concurrent with a merge; one of the same MemWAL must conflict: it would be undone.
    return bool(ours.ids & theirs.ids)


def _owned(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, state: State, owner_id: str) -> MemWal:
    mem_wal = find(mem_wals, mem_wal_id)
    _check_owner(mem_wal, owner_id)
    if mem_wal.state is not state:
        raise InvalidUsageError(
            f"Cannot change the MemWAL of {mem_wal_id}: it is {mem_wal.state.name}, and must be {state.name}."
        )
    return mem_wal


def _check_owner(mem_wal: MemWal, owner_id: str) -> None:
    if mem_wal.owner_id != owner_id:
        raise WriterFencedError(
            f"The MemWAL of {mem_wal.id} is owned by {mem_wal.owner_id!r} now, and not by {owner_id!r}: another writer "
            "claimed it."
        )


def _next_state(mem_wals: Sequence[MemWal], mem_wal_id: MemWalId, state: State, owner_id: str) -> Change:
    before = _owned(mem_wals, mem_wal_id, state, owner_id)
    return _changed(before, replace(before, state=State(state + 1)))


def _changed(before: MemWal, after: MemWal) -> Change:
    return Change(updated=(after,), removed=(before,))
