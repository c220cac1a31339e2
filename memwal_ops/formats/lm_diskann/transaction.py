"""A transaction of the writer: changed blocks in memory, spilled to free slots of the graph if too many, one commit.

Uncommitted changes are not visible: the blocks in memory are this process's, and no map has the slots that were
written. After a rollback or a kill, those slots are on no map, and the next writer uses them.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidUsageError, InvariantViolatedError, StorageError
from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.errors import IdsExhaustedError
from memwal_ops.formats.lm_diskann.files import GRAPH, Step, sync, write_all
from memwal_ops.formats.lm_diskann.kernels.healing import neighbours
from memwal_ops.formats.lm_diskann.kernels.inserting import insert, set_tombstones
from memwal_ops.formats.lm_diskann.kernels.reading import Codebook, Starts, scratch, seal, touch
from memwal_ops.formats.lm_diskann.store import Slots, Store
from memwal_ops.formats.lm_diskann.vectors import encode, entry_points
from memwal_ops.formats.lm_diskann.view import View, read_starts
from memwal_ops.formats.lm_diskann.wire import I8, MAX_CODEBOOKS, MAX_NODES, OVERFLOW, TOMBSTONED, U8, Changes, headers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


"""Live rows from which on there is a codebook and a graph. With fewer, every search compares all of them."""
_REPATRIATE_SHARE = 0.75


class Transaction:
    """One transaction and its uncommitted changes.

    Args:
        view: with memory for an overlay; at the newest epoch.
        store: open.
        horizon: slots that were freed at this epoch or before it may be used.
        step: performs durable steps.
        delta_bytes: of changed blocks above which the commit writes them into the graph, not into the delta table.
    """

    def __init__(self, view: View, store: Store, horizon: int, step: Step, delta_bytes: int) -> None:
        self._delta_bytes = delta_bytes
        self.view, self.store, self.step = view, store, step
        self.parameters = view.parameters
        self.epoch = store.state.epoch + 1
        self.origin = secrets.randbits(63)
        self.slots = Slots(store, horizon)
        self.next_node = store.state.next_node_id
        self.codebook_id = store.state.codebook_id
        self.codebook: NDArray[np.uint8] | None = None
        self.entries: NDArray[np.int64] | None = None
        self._starts: tuple[NDArray[np.int64], Starts | None] | None = None
        self._added: dict[int, int] = {}
        self._removed: set[int] = set()
        self._moved: dict[int, int] = {}
        self._events: dict[tuple[int, int], int] = {}
        self._reset: set[int] = set()
        self._graph: int | None = None
        self.healed: NDArray[np.int64] = np.zeros(0, np.int64)
        self.rewired: NDArray[np.int64] = np.zeros(0, np.int64)
        self.followed: tuple[int, str] | None = None
        self.unusable = store.state.unusable
        self._failed = self._committed = False

    # -- changes

    def use_codebook(self, book: Codebook) -> None:
        """Encode with another codebook from now on: the caller writes all links again."""
        if self.codebook_id == MAX_CODEBOOKS:
            raise IdsExhaustedError("The index has had 65,535 codebooks: no ids are left.")
        self.view.book, self.codebook, self.codebook_id = book, encode(book), self.codebook_id + 1

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A change that is applied completely: if it fails, the transaction cannot be committed."""
        self._failed, failed = True, self._failed
        yield
        self._failed = failed

    def allocate(self, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The nodes of new rows, which this transaction has not written yet.

        Raises ``IdsExhaustedError``: no node ids are left.
        """
        nodes = np.arange(self.next_node, self.next_node + len(row_ids), dtype=np.int64)
        if self.next_node + len(row_ids) > MAX_NODES:
            raise IdsExhaustedError("The index has had 4,294,967,294 nodes: no node ids are left.")
        self.next_node += len(row_ids)
        self._added.update(zip(row_ids.tolist(), nodes.tolist(), strict=True))
        return nodes

    def delete(self, row_ids: NDArray[np.int64]) -> int:
        """Delete rows, including those of this transaction, and return how many of them existed."""
        staged = [self._added.pop(row) for row in row_ids.tolist() if row in self._added]
        [live] = self.store.columns(
            "SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL AND row_id IN (SELECT id FROM wanted)",
            wanted=row_ids,
        )
        nodes = np.array([*staged, *(node for node in live.tolist() if node not in self._removed)], np.int64)
        for chunk in np.array_split(nodes, max(1, -(-len(nodes) // 4096))):
            self.reserve(len(chunk))
            self.check(set_tombstones(self.view.source, self.parameters.layout, chunk, self.epoch, self.origin))
        self._removed.update(nodes.tolist())
        return len(nodes)

    @property
    def live(self) -> int:
        """Number of live rows once this is committed."""
        committed = self.store.state.next_node_id
        gone = sum(node < committed for node in self._removed)
        return self.store.state.live - gone + len(self._added)

    def link(self, nodes: NDArray[np.int64], row_ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Write the nodes and link them with their neighbours."""
        p = self.parameters
        layout = p.layout
        worst = p.links * (p.links + 4) + 2
        events = np.empty((worst + (p.backlinks + 1) * 2 * p.links + 65536, 3), np.int64)
        room = scratch(p.search_list, p.links, p.code_bytes, p.dimension, self.next_node, collect=True)
        at = 0
        while at < len(nodes):
            self.reserve(worst)
            counts = np.zeros(2, np.int64)
            result = insert(
                self.view.source, layout, room, self.view.book, nodes, row_ids, vectors, self.epoch, self.origin,
                self.codebook_id, np.float32(p.alpha**2), p.search_list, self.starts(), at, events, counts,
            )  # fmt: skip
            self.check(result)
            self.note(events[: counts[0]])
            at = int(counts[1])

    def note(self, events: NDArray[np.int64]) -> None:
        """Count changes of the overflow table: [n, 3] of target, referrer, and 1 or -1."""
        for target, referrer, sign in events.tolist():
            self._events[target, referrer] = self._events.get((target, referrer), 0) + sign

    def entries_now(self) -> NDArray[np.int64]:
        """The entry points once this is committed."""
        return self.view.entries(self.epoch - 1) if self.entries is None else self.entries

    def starts(self) -> Starts:
        """The entry points once this is committed, with their vectors."""
        if self.entries is None:
            starts = self.view.starts(self.epoch - 1)
        else:
            if self._starts is None or self._starts[0] is not self.entries:
                self._starts = (self.entries, read_starts(self.view, self.entries, self.epoch))
            starts = self._starts[1]
        if starts is None:
            raise self.view.fail()
        return starts

    def check(self, result: int) -> None:
        """Raise ``TableCorruptError`` if compiled code could not read a block."""
        if result < 0:
            raise self.view.fail()

    # -- blocks

    def reserve(self, rows: int) -> None:
        """Ensure that the overlay has space for that many blocks; otherwise spill all of it to free slots."""
        source = self.view.source
        free = len(source.pool.u64) - len(source.tags) - int(source.counts[1])
        if free < rows:
            self._spill()

    def _spill(self) -> None:
        blocks = self.view.overlay_rows
        nodes = headers(blocks)["node_id"].astype(np.int64)
        first = len(self.view.source.tags)
        seal(self.view.source.pool.u64, first, first + len(blocks))
        fresh = np.array([node for node in nodes.tolist() if node not in self._moved], np.int64)
        self._moved.update(zip(fresh.tolist(), self.slots.take(len(fresh)).tolist(), strict=True))
        slots = np.array([self._moved[node] for node in nodes.tolist()], np.int64)
        self.write(slots, blocks)
        self.view.clear_overlay()
        self.view.add_private(nodes, self.epoch, slots)

    def write(self, slots: NDArray[np.int64], blocks: NDArray[np.uint8]) -> None:
        """Write blocks into slots that no reader uses, ascending, adjacent ones in one write."""
        if self._graph is None:
            self.store.check_own()
            publishing.settle(self.view, self.step)
            self._graph = os.open(os.path.join(self.view.folder, GRAPH), os.O_WRONLY | os.O_CLOEXEC)
        graph, size = self._graph, self.parameters.layout.block_size
        self.step("write blocks into free slots", lambda: write_runs(graph, size, slots, blocks))

    def move(self, nodes: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Record that the new versions of these nodes are in those slots only."""
        self._moved.update(zip(nodes.tolist(), slots.tolist(), strict=True))
        self.view.add_private(nodes, self.epoch, slots)

    @property
    def moved(self) -> int:
        """The number of nodes whose new versions are in the graph, and not in delta blocks."""
        return len(self._moved)

    def keep_only_tombstones(self) -> None:
        """Discard the changed blocks except those of tombstones: a build writes all others again."""
        blocks = self.view.overlay_rows
        kept = blocks[(headers(blocks)["flags"] & TOMBSTONED) != 0].copy()
        self.view.clear_overlay()
        source = self.view.source
        from memwal_ops.formats.lm_diskann.kernels.reading import new_row  # noqa: PLC0415 - compiled on use

        for block, head in zip(kept, headers(kept), strict=True):
            row = new_row(source, int(head["node_id"]))
            source.pool.u8[row] = block
        self._events.clear()

    def live_nodes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Live nodes and rows, committed and staged; those that this transaction inserted last."""
        nodes, rows = self.store.columns(
            "SELECT node_id, row_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id"
        )
        stays = ~np.isin(nodes, np.array([*self._removed], U8))
        added = np.array(sorted(self._added.items(), key=lambda item: item[1]), np.int64).reshape(-1, 2)
        return (
            np.concatenate([nodes[stays].astype(np.int64), added[:, 1]]),
            np.concatenate([rows[stays].astype(np.int64), added[:, 0]]),
        )

    def unhealed(self) -> NDArray[np.int64]:
        """Deleted nodes, committed and staged, that are not healed yet."""
        [waiting] = self.store.columns("SELECT node_id FROM lmd_sweep_list WHERE reason = 'tombstoned'")
        return np.union1d(waiting.astype(np.int64), np.array([*self._removed], np.int64))

    def reset_overflow(self, nodes: NDArray[np.int64], pairs: NDArray[np.int64]) -> None:
        """Replace the overflowed backlinks of these nodes by ``pairs`` of target and referrer."""
        self._reset.update(nodes.tolist())
        self._events = {key: sign for key, sign in self._events.items() if key[0] not in self._reset}
        self._events.update(dict.fromkeys(map(tuple, pairs.tolist()), 1))

    # -- the end

    def commit(self) -> bool:
        """Make it durable, then visible; False if nothing was changed.

        Raises ``InvalidUsageError``: a change failed, and the caller continued.
        """
        if self._failed:
            raise InvalidUsageError("A change of this transaction failed; nothing of it was committed.")
        other = self.followed is not None or self.unusable != self.store.state.unusable
        other = other or bool(self._moved)
        if not (self._added or self._removed or len(self.healed) or len(self.rewired) or other):
            return False
        self._replace_entries()
        self._repatriate()
        rows = self.view.overlay_rows
        if self._moved or rows.nbytes > self._delta_bytes:
            if len(rows):
                self._spill()
            rows = self.view.overlay_rows
        first = len(self.view.source.tags)
        seal(self.view.source.pool.u64, first, first + len(rows))
        changes = self._changes(rows.copy())
        if self._graph is not None:
            graph = self._graph
            self.step("sync the graph", lambda: sync(graph))
        self.step("commit to the store", lambda: self.store.commit(changes))
        self._committed = True
        with suppress(StorageError):  # it is committed: the index publishes another view
            publishing.append(self.view, changes, self.step)
        return True

    def close(self) -> None:
        """Discard uncommitted changes. What was committed is in the places where the view has it."""
        self.view.clear_overlay()
        if not self._committed and (self._moved or self.codebook is not None):
            self.view.reload()
        if self._graph is not None:
            os.close(self._graph)
            self._graph = None

    def _replace_entries(self) -> None:
        """Replace deleted entry points by live nodes near them; add random ones once a quarter is missing."""
        if not self.codebook_id:
            return
        entries, wanted = self.entries_now(), entry_points(self.live)
        dead = np.concatenate([self.view.dead, np.array([*self._removed], np.int64)])
        alive = entries[~np.isin(entries, dead)]
        if not self.live:
            return  # the next insert builds another graph
        if len(alive) < len(entries):
            near = self._linked_from(np.setdiff1d(entries, alive), np.concatenate([dead, alive]))
            self.entries = alive = np.concatenate([alive, near[: max(0, wanted - len(alive))]])
        if 4 * len(alive) < 3 * wanted:
            nodes, _ = self.live_nodes()
            others = np.setdiff1d(nodes, alive)
            more = np.random.default_rng(self.epoch).choice(
                others, min(wanted - len(alive), len(others)), replace=False
            )
            self.entries = np.concatenate([alive, more])

    def _linked_from(self, nodes: NDArray[np.int64], but_not: NDArray[np.int64]) -> NDArray[np.int64]:
        """Nodes to which these link, without ``but_not``: the first of each, if there is one and no other has it."""
        p, count = self.parameters, len(nodes)
        links = np.full((count, p.links), -1, np.int64)
        others, overflowed = np.empty((count, p.backlinks), np.int64), np.empty(count, np.uint8)
        vectors = np.empty((count, p.dimension), np.float32)
        self.check(neighbours(self.view.source, p.layout, nodes, self.epoch, links, others, overflowed, vectors))
        good = (links >= 0) & ~np.isin(links, but_not)
        return np.unique(links[np.arange(count), good.argmax(1)][good.any(1)])

    def _repatriate(self) -> None:
        """Move overflowed backlinks back into the block if enough of its backlinks were dropped."""
        few = self._with_few_overflowed()
        if not len(few):
            return
        targets, referrers = self.store.columns(
            "SELECT target_node_id, referrer_node_id FROM lmd_backlink_overflow "
            "WHERE target_node_id IN (SELECT id FROM few)", few=few,
        )  # fmt: skip
        left: dict[int, set[int]] = {int(target): set() for target in few}
        for target, referrer in zip(targets.tolist(), referrers.tolist(), strict=True):
            if target not in self._reset:
                left[target].add(referrer)
        for (target, referrer), sign in self._events.items():
            if target in left:
                (left[target].add if sign > 0 else left[target].discard)(referrer) if sign else None
        layout = self.parameters.layout
        for target, back in left.items():
            self.reserve(1)
            source = self.view.source
            row = touch(source, layout.block_size, target, self.epoch, self.origin)
            self.check(row)
            head = headers(source.pool.u8[row : row + 1])[0]
            if not head["flags"] & OVERFLOW:
                raise InvariantViolatedError(f"Node {target} has overflowed backlinks, and its block lacks the flag.")
            head["flags"] &= ~OVERFLOW & 0xFF
            head["overflow_reference"], head["num_inline_backlinks"] = 0, len(back)
            at = layout.at_backlinks // 4
            source.pool.u32[row, at : at + len(back)] = sorted(back)
            self._reset.add(target)
        # At the end, not per target: 100,000 inserts into 900,000 nodes spent an hour on it.
        self._events = {key: sign for key, sign in self._events.items() if key[0] not in left}

    def _with_few_overflowed(self) -> NDArray[np.uint64]:
        """The nodes of which overflowed backlinks were dropped, and few enough are left for the block."""
        events = np.array([(target, sign) for (target, _), sign in self._events.items()], np.int64).reshape(-1, 2)
        shrunk = np.unique(events[events[:, 1] < 0, 0])
        if not len(shrunk):
            return np.zeros(0, U8)
        targets, counts = self.store.columns(
            "SELECT target_node_id, count(*) FROM lmd_backlink_overflow "
            "WHERE target_node_id IN (SELECT id FROM shrunk) GROUP BY 1", shrunk=shrunk.astype(U8),
        )  # fmt: skip
        left = np.zeros(len(shrunk), np.int64)
        left[np.searchsorted(shrunk, targets.astype(np.int64))] = counts
        left[np.isin(shrunk, np.array([*self._reset], np.int64))] = 0
        changed = events[np.isin(events[:, 0], shrunk)]
        np.add.at(left, np.searchsorted(shrunk, changed[:, 0]), changed[:, 1])
        return shrunk[left <= _REPATRIATE_SHARE * self.parameters.layout.backlinks].astype(U8)

    def _changes(self, blocks: NDArray[np.uint8]) -> Changes:
        nodes = headers(blocks)["node_id"].astype(U8) if len(blocks) else np.zeros(0, U8)
        moved = np.stack([np.fromiter(part, U8, len(self._moved)) for part in (self._moved, self._moved.values())], 1)
        moved = moved[np.argsort(moved[:, 0])]
        added = np.array([*self._added.items()], np.int64).reshape(-1, 2)
        # Including nodes that were added and removed in this transaction: their blocks must be reclaimed.
        removed = np.array(sorted(self._removed), U8)
        if any(abs(sign) > 1 for sign in self._events.values()):
            raise InvariantViolatedError("A backlink was added or dropped twice; this transaction was not committed.")
        pairs = {sign: [key for key, count in self._events.items() if count == sign] for sign in (1, -1)}
        state = replace(
            self.store.state, epoch=self.epoch, next_node_id=self.next_node, slot_count=self.slots.count,
            codebook_id=self.codebook_id, live=self.live, healed=self.store.state.healed + len(self.healed),
            followed=self.store.state.followed if self.followed is None else self.followed[0],
            unusable=self.unusable if self.followed is None else 0,
        )  # fmt: skip
        return Changes(
            state, delta_nodes=nodes, blocks=blocks, moved_nodes=moved[:, 0], moved_slots=moved[:, 1],
            moved_epochs=np.full(len(moved), self.epoch, U8), retired=self.slots.superseded(moved[:, 0], self.epoch),
            taken=self.slots.taken, row_ids=added[:, 0].astype(I8), row_nodes=added[:, 1].astype(U8), removed=removed,
            entries=None if self.entries is None else self.entries.astype(U8),
            overflow_reset=np.array(sorted(self._reset), U8), overflow_added=_pairs(pairs[1]),
            overflow_dropped=_pairs(pairs[-1]),
            codebook=None if self.codebook is None else (self.codebook_id, self.codebook),
            followed=None if self.followed is None else self.followed[1],
            healed=self.healed.astype(U8), rewired=self.rewired.astype(U8),
        )  # fmt: skip


def write_runs(file: int, size: int, slots: NDArray[np.int64], blocks: NDArray[np.uint8]) -> None:
    """Write blocks into slots, ascending; adjacent slots in one write."""
    ascending = slots
    if np.any(slots[1:] < slots[:-1]):
        order = np.argsort(slots, kind="stable")
        ascending, blocks = slots[order], blocks[order]
    edges = np.flatnonzero(np.diff(ascending) != 1) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(slots)], strict=True):
        if last > first:
            write_all(file, blocks[first:last], int(ascending[first]) * size)


def _pairs(pairs: list[Any]) -> NDArray[np.uint64]:
    return np.array(pairs, U8).reshape(-1, 2)
