"""Check an index folder: blocks, slot map, free list, rows, tombstones, links in both directions, and the view.

Memory is a few numbers per node, regardless of the links: for each node, a checksum over the links to it is compared
with the same checksum over its backlinks.

The block of a node has its row id and whether it was deleted, under a checksum. So the lookup can be computed from the
blocks, if none is missing. That is proven by the number of rows in ``lmd_metadata``, and by the tombstones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.verification import Inconsistencies, Inconsistency, Severity
from memwal_ops.errors import MemwalOpsError, TableCorruptError, runbook
from memwal_ops.formats.lm_diskann.errors import COPY_FOLLOW, RESTORE
from memwal_ops.formats.lm_diskann.files import GRAPH
from memwal_ops.formats.lm_diskann.kernels.reading import intact
from memwal_ops.formats.lm_diskann.publishing import check_commits, check_node_ids
from memwal_ops.formats.lm_diskann.source import FOLLOW, IndexUnusableError, read_source, usable
from memwal_ops.formats.lm_diskann.store import NAME, Store
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.formats.lm_diskann.wire import I8, OVERFLOW, TOMBSTONED, U8, Changes, Parameters, headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext


_CHUNK = 1024
_SEEN, _DEAD, _OVERFLOWED, _HEALED = 1, 2, 4, 8
_ALWAYS = np.iinfo(np.uint64).max


# Checks by the part that they concern.
CHECKS = frozenset({
    "row_differs", "row_missing", "row_without_block", "tombstone_differs", "tombstone_missing", "count_differs",
})  # fmt: skip
"""Those whose findings may be caused by the lookup alone."""
OF_VIEW = frozenset({"view_damaged", "view_behind", "view_differs"})
FOLLOW_DAMAGED = "follow_damaged"
_OF_STORE = {
    "slot_used_twice", "slot_beyond_end", "node_mapped_twice", "delta_damaged", "row_without_block",
    "row_missing", "tombstone_missing", "count_differs", "entry_point_dead", "entry_point_missing", "slot_lost",
    "epoch_beyond_end", "node_not_allocated", "commits_missing",
}  # fmt: skip
_PLACES = {
    **dict.fromkeys(OF_VIEW, "the published view"),
    **dict.fromkeys(_OF_STORE, NAME),
    FOLLOW_DAMAGED: FOLLOW,
}  # all others concern the graph
# If there are findings only about links, no block is missing.
_OF_LINKS = {
    "link_to_nothing", "backlink_to_nothing", "healed_node_linked", "backlinks_differ", "overflow_without_flag",
    "entry_point_dead", "entry_point_missing",
}  # fmt: skip
_WARNINGS = {"unreachable", "slot_lost"}
OLD_VERSION_DAMAGED = "old_version_damaged"
_CONSEQUENCES = {
    OLD_VERSION_DAMAGED: "Searches as of these epochs fail. The newest epoch is not affected.",
    "commits_missing": "Acknowledged changes are lost, and slots of the graph may have later content.",
    "graph_of_another_index": "Searches return rows of that index, and commits would be written into it.",
    "unreachable": "Searches do not find this row, unless it is in ``allow``.",
    "slot_lost": "The file is longer than necessary.",
    FOLLOW_DAMAGED: "The index does not follow its table any more.",
}
_REMEDIES = {
    **dict.fromkeys(CHECKS, "memwal-ops repair URI --apply maps the rows again, if all blocks are there."),
    "unreachable": "memwal-ops repair URI --deep --apply links it again.",
    "slot_lost": "None is needed.",
    OLD_VERSION_DAMAGED: "Use a later epoch. memwal-ops repair URI --apply gives these up, if no reader and no hold "
    "needs them.",
    FOLLOW_DAMAGED: f"{COPY_FOLLOW} Where the table is not what it was: memwal-ops catchup URI --rebuild.",
}
_BEHIND = "Readers see an older epoch, or fail, until the view is published again."
_BROKEN = "Searches may miss rows, return deleted ones, or fail."
_PAGE = runbook(TableCorruptError.exit_code) or ""


@dataclass
class Verified:
    """The findings, and the number of blocks that were read."""

    findings: Inconsistencies
    blocks: int = 0

    def add(self, check: str, details: Iterable[str], about: str = "") -> None:
        """Add one finding for each of ``details``, which start with the place; ``about``: for the repair."""
        for detail in details:
            view = check in OF_VIEW
            self.findings.add(Inconsistency(
                Severity.WARNING if check in _WARNINGS else Severity.ERROR,
                check,
                _PLACES.get(check, GRAPH),
                detail,
                _CONSEQUENCES.get(check, _BEHIND if view else _BROKEN),
                _REMEDIES.get(check, "memwal-ops repair URI --apply publishes it again." if view
                else RESTORE),
                "" if view or check in _WARNINGS else _PAGE,
                about,
            ))  # fmt: skip


def verify(folder: str, parameters: Parameters, most: int, context: RunContext) -> Verified:
    """Find all inconsistencies. The caller has the writer lock. Raises ``TableCorruptError``: of the store."""
    checks = Verified(Inconsistencies(most))
    store = Store(folder, parameters, read_only=True)
    try:
        store.read_all()
        check_node_ids(folder, parameters, store)
        Check(folder, parameters, store, checks, context).run()
    finally:
        store.close()
    return checks


class Check:
    """The checks of one folder. Args: see :func:`verify`; the store is open, and findings are added to ``found``."""

    def __init__(self, folder: str, parameters: Parameters, store: Store, found: Verified, context: RunContext) -> None:
        self.folder, self.parameters, self.store, self.found, self.context = folder, parameters, store, found, context
        count = store.state.next_node_id
        self.marks = np.zeros(count, np.uint8)
        self.rows = np.full(count, -1, np.int64)
        self.incoming, self.backlinks = np.zeros(count, U8), np.zeros(count, U8)

    def run(self) -> None:
        """All checks, the cheap ones first."""
        self._map()
        self.read_blocks()
        for table in ("lmd_sweep_list", "lmd_heal_list"):
            [beyond] = self.store.columns(f"SELECT node_id FROM {table} WHERE node_id >= {len(self.marks)}")
            self.found.add("node_not_allocated", (
                f"node {node} is in {table}, but only {len(self.marks)} ids were allocated" for node in beyond
            ))  # fmt: skip
        [healed] = self.store.columns("SELECT node_id FROM lmd_sweep_list WHERE reason = 'healed'")
        self.marks[healed[healed < len(self.marks)].astype(np.int64)] |= _HEALED
        for blocks in self._blocks():
            self._links(blocks)
        self._entries()
        self._overflow()
        differ = np.flatnonzero((self.incoming != self.backlinks) & self._alive(np.arange(len(self.marks))))
        self.found.add("backlinks_differ", (f"backlinks of node {node} differ from links to it" for node in differ))
        self._lookup()
        self._view()
        self._followed()

    def _map(self) -> None:
        count, size = self.store.state.slot_count, self.parameters.layout.block_size
        [twice] = self.store.columns(
            "SELECT slot FROM (SELECT slot FROM lmd_slots UNION ALL SELECT slot FROM lmd_free_nodes) GROUP BY slot "
            "HAVING count(*) > 1 ORDER BY slot"
        )
        self.found.add("slot_used_twice", (f"slot {slot} is mapped or free more than once" for slot in twice))
        for table, what in ("lmd_slots", "in the map"), ("lmd_free_nodes", "free"):
            [beyond] = self.store.columns(f"SELECT slot FROM {table} WHERE slot >= {count}")
            self.found.add("slot_beyond_end", (f"slot {slot} is {what}, of {count} slots" for slot in beyond))
        [double] = self.store.columns("SELECT node_id FROM lmd_slots GROUP BY node_id HAVING count(*) > 1")
        self.found.add("node_mapped_twice", (f"node {node} has more than one slot" for node in double))
        length = os.path.getsize(os.path.join(self.folder, GRAPH))
        if length < count * size:
            self.found.add("graph_too_short", [f"{GRAPH} has {length} bytes, for {count} slots of {size}"])
            return
        try:
            self.store.check_identity()
        except TableCorruptError as error:
            self.found.add("graph_of_another_index", [str(error)])

    def _blocks(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the intact newest versions of all nodes, in chunks.

        The first time, damaged ones are findings, and so are older versions that a retained epoch reads.
        """
        size, first_time, last = self.parameters.layout.block_size, not self.found.blocks, -1
        while True:
            [nodes, epochs], whole, fits = self.store.blocks(
                "SELECT node_id, commit_epoch, data FROM lmd_delta_blocks WHERE node_id IN (SELECT DISTINCT "
                f"node_id FROM lmd_delta_blocks WHERE node_id >= {last + 1} ORDER BY node_id LIMIT {_CHUNK}) "
                "ORDER BY node_id, commit_epoch",
                size,
            )
            if not len(nodes):
                break
            last = int(nodes[-1])
            until = self._until(nodes, epochs)
            yield from self._checked(whole, nodes, epochs, (until == _ALWAYS) & fits, report=first_time)
            if first_time:
                lost = np.flatnonzero((until == _ALWAYS) & ~fits)
                self.found.add("delta_damaged", (f"delta block of node {nodes[at]} has a wrong length" for at in lost))
                read = (until != _ALWAYS) & (until > self.store.state.retained_from)
                self._check_old(whole, nodes, epochs, read)
        newest = self.store.in_graph(self.store.state.epoch)
        for whole, nodes, epochs in self._in_slots(*newest):
            yield from self._checked(whole, nodes, epochs, np.ones(len(whole), bool), report=first_time)
        if first_time:
            retained = self.store.in_graph(self.store.state.retained_from)
            old = ~np.isin(retained[1], newest[1])
            for whole, nodes, epochs in self._in_slots(*(column[old] for column in retained)):
                self._check_old(whole, nodes, epochs, np.ones(len(whole), bool))

    def _in_slots(
        self, nodes: NDArray[Any], slots: NDArray[Any], epochs: NDArray[Any]
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any]]]:
        size = self.parameters.layout.block_size
        with open(os.path.join(self.folder, GRAPH), "rb") as graph:
            for first in range(0, len(slots), _CHUNK):
                part = slice(first, first + _CHUNK)
                whole = np.zeros((len(slots[part]), size), np.uint8)
                for at, slot in enumerate(slots[part].tolist()):
                    block = os.pread(graph.fileno(), size, min(slot, self.store.state.slot_count) * size)
                    whole[at, : len(block)] = np.frombuffer(block, np.uint8)
                yield whole, nodes[part], epochs[part]

    def _until(self, nodes: NDArray[np.uint64], epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The epoch of the next version of each of these delta blocks, which are sorted."""
        slotted_nodes, slotted = self.store.columns(
            "SELECT node_id, from_epoch FROM lmd_slots WHERE node_id IN (SELECT id FROM wanted)",
            wanted=np.unique(nodes),
        )
        until = np.full(len(nodes), _ALWAYS, U8)
        same = nodes[1:] == nodes[:-1]
        until[:-1][same] = epochs[1:][same]
        order = np.argsort(slotted_nodes)
        if len(slotted_nodes):
            at = np.minimum(np.searchsorted(slotted_nodes[order], nodes), len(slotted_nodes) - 1)
            later = (slotted_nodes[order][at] == nodes) & (slotted[order][at] > epochs)
            until[later] = np.minimum(until[later], slotted[order][at][later])
        return until

    def _check_old(
        self, blocks: NDArray[np.uint8], nodes: NDArray[Any], epochs: NDArray[Any], wanted: NDArray[Any]
    ) -> None:
        heads, right = headers(blocks), intact(np.ascontiguousarray(blocks).view(np.uint64))
        good = right & (heads["node_id"] == nodes) & (heads["creation_epoch"] == epochs)
        self.found.blocks += int(wanted.sum())
        self.found.add(OLD_VERSION_DAMAGED, (
            f"the block of node {nodes[at]} (epoch {epochs[at]}), which older retained epochs read"
            for at in np.flatnonzero(wanted & ~good)
        ))  # fmt: skip

    def _checked(
        self,
        blocks: NDArray[np.uint8],
        nodes: NDArray[Any],
        epochs: NDArray[Any],
        wanted: NDArray[Any],
        *,
        report: bool,
    ) -> Iterator[NDArray[np.uint8]]:
        heads, right = headers(blocks), intact(np.ascontiguousarray(blocks).view(np.uint64))
        links, backlinks = heads["num_forward_links"], heads["num_inline_backlinks"]
        good = wanted & right & (heads["node_id"] == nodes) & (heads["creation_epoch"] == epochs)
        good &= (links <= self.parameters.links) & (backlinks <= self.parameters.backlinks)
        good &= nodes < len(self.marks)
        for at in np.flatnonzero(wanted & ~good) if report else ():
            head = heads[at]
            if not right[at]:
                why = "checksum", f"the block of node {nodes[at]} (epoch {epochs[at]}) has a bad checksum"
            elif head["node_id"] != nodes[at] or head["creation_epoch"] != epochs[at]:
                other = f"node {head['node_id']} (epoch {head['creation_epoch']})"
                why = "wrong_block", f"the slot of node {nodes[at]} (epoch {epochs[at]}) has {other}"
            elif links[at] > self.parameters.links or backlinks[at] > self.parameters.backlinks:
                why = "counts", f"node {nodes[at]} has {links[at]} links and {backlinks[at]} backlinks"
            else:
                why = "node_beyond_end", f"node {nodes[at]} has a block, but only {len(self.marks)} ids were allocated"
            self.found.add(why[0], [why[1]])
        if good.any():
            yield blocks[good]

    def _note(self, blocks: NDArray[np.uint8]) -> None:
        head = headers(blocks)
        nodes = head["node_id"].astype(np.int64)
        flags = head["flags"]
        dead, more = (flags & TOMBSTONED) != 0, (flags & OVERFLOW) != 0
        self.marks[nodes] = _SEEN | np.where(dead, _DEAD, 0) | np.where(more, _OVERFLOWED, 0)
        self.rows[nodes] = head["row_id"]

    def _alive(self, nodes: NDArray[np.int64]) -> NDArray[Any]:
        alive: NDArray[np.bool_] = (self.marks[nodes] & (_SEEN | _DEAD)) == _SEEN
        return alive

    def _links(self, blocks: NDArray[np.uint8]) -> None:
        layout, head = self.parameters.layout, headers(blocks)
        words = np.ascontiguousarray(blocks).view(np.uint32)
        nodes = head["node_id"].astype(np.int64)
        alive = self._alive(nodes)
        for name, at, most, forward in (
            ("num_forward_links", layout.at_ids, layout.links, True),
            ("num_inline_backlinks", layout.at_backlinks, layout.backlinks, False),
        ):
            ids = words[:, at // 4 : at // 4 + most].astype(np.int64)
            used = np.arange(most)[None, :] < head[name][:, None]
            mine = np.repeat(nodes, most).reshape(ids.shape)
            known = ids < len(self.marks)
            whole = used & known & np.where(known, self.marks[np.where(known, ids, 0)] & _SEEN, 0).astype(bool)
            lost = used & ~whole & alive[:, None]
            self.found.add("link_to_nothing" if forward else "backlink_to_nothing", (
                f"node {a} {'links to' if forward else 'has a backlink of'} node {b}, which has no block"
                for a, b in zip(mine[lost], ids[lost], strict=True)
            ))  # fmt: skip
            # Deleted nodes that are not healed count as well: searches pass through them.
            passed = whole & ((self.marks[nodes] & _HEALED) == 0)[:, None] & (alive[:, None] | forward)
            passed[passed] = (self.marks[ids[passed]] & _HEALED) != 0
            self.found.add("healed_node_linked", (
                f"node {a} has a {'link to' if forward else 'backlink of'} node {b}, which is deleted and healed"
                for a, b in zip(mine[passed], ids[passed], strict=True)
            ))  # fmt: skip
            both = whole & alive[:, None]
            both[both] = self._alive(ids[both])
            self._sum(mine[both], ids[both], forward=forward)

    def _entries(self) -> None:
        [entries] = self.store.columns("SELECT node_id FROM lmd_entry_points WHERE removed_epoch IS NULL")
        alive, known = np.zeros(len(entries), bool), entries < len(self.marks)
        alive[known] = self._alive(entries[known].astype(np.int64))
        state = self.store.state
        if state.live:
            self.found.add(
                "entry_point_dead", (f"node {node} is an entry point, but does not exist" for node in entries[~alive])
            )
        if state.live and state.codebook_id and not alive.any():
            self.found.add("entry_point_missing", ["no search finds anything: there is no live entry point"])

    def _sum(self, mine: NDArray[np.int64], others: NDArray[np.int64], *, forward: bool) -> None:
        referrer, target = (mine, others) if forward else (others, mine)
        mixed = (referrer.astype(U8) + U8.type(1)) * U8.type(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> U8.type(29))) * U8.type(0xBF58476D1CE4E5B9)
        np.add.at(self.incoming if forward else self.backlinks, target, mixed ^ (mixed >> U8.type(32)))

    def _overflow(self) -> None:
        targets, referrers = self.store.columns("SELECT target_node_id, referrer_node_id FROM lmd_backlink_overflow")
        known = (targets < len(self.marks)) & (referrers < len(self.marks))
        targets, referrers = targets.astype(np.int64), referrers.astype(np.int64)
        flagged = np.zeros(len(targets), bool)
        flagged[known] = (self.marks[targets[known]] & _OVERFLOWED) != 0
        unflagged = np.unique(targets[~flagged])
        self.found.add("overflow_without_flag", (f"node {node} has overflow, but no flag" for node in unflagged))
        unflagged = np.zeros(len(targets), bool)
        unflagged[known] = self._alive(targets[known]) & ((self.marks[referrers[known]] & _HEALED) != 0)
        self.found.add("healed_node_linked", (
            f"node {a} has an overflowed backlink of node {b}, which is deleted and healed"
            for a, b in zip(targets[unflagged], referrers[unflagged], strict=True)
        ))  # fmt: skip
        use = known.copy()
        use[known] = self._alive(targets[known]) & self._alive(referrers[known])
        self._sum(targets[use], referrers[use], forward=False)

    def read_blocks(self) -> Blocks:
        """Read and check all blocks, and collect their rows."""
        for blocks in self._blocks():
            self.found.blocks += len(blocks)
            self.context.advance("verifying", "blocks", len(blocks))
            self._note(blocks)
        return self._rows_of_blocks()

    def _rows_of_blocks(self) -> Blocks:
        damaged = bool(self.found.findings.counts.keys() - CHECKS - OF_VIEW - _OF_LINKS - {OLD_VERSION_DAMAGED})
        return Blocks((self.marks & _SEEN) != 0, (self.marks & _DEAD) != 0, self.rows, damaged)

    def _lookup(self) -> None:
        rows, nodes, removed = self.store.columns(
            "SELECT row_id, node_id, CASE WHEN removed_epoch IS NULL THEN 0 ELSE 1 END FROM lmd_lookup ORDER BY node_id"
        )
        wrong: list[tuple[str, str]] = []
        mapped = np.zeros(len(self.marks), bool)
        for row, node, gone in zip(rows.tolist(), nodes.tolist(), removed.tolist(), strict=True):
            mark = int(self.marks[node]) if node < len(self.marks) else 0
            mapped[node : node + 1] = True
            if not mark & _SEEN:
                wrong.append(("row_without_block", f"row {row} is node {node}, which has no intact block"))
            elif self.rows[node] != row:
                wrong.append(("row_differs", f"row {row} is node {node}, whose block is of row {self.rows[node]}"))
            elif bool(mark & _DEAD) != bool(gone):
                why = f"row {row}, node {node}: block and lookup differ about its deletion"
                wrong.append(("tombstone_differs", why))
        wrong += [
            ("row_missing", f"row {self.rows[node]}, of node {node}, is not in the lookup")
            for node in np.flatnonzero(self._alive(np.arange(len(self.marks))) & ~mapped).tolist()
        ]
        [bare] = self.store.columns(
            "SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NOT NULL AND node_id NOT IN "
            "(SELECT node_id FROM lmd_tombstoned_nodes)"
        )
        wrong += [("tombstone_missing", f"node {node} was removed and has no tombstone") for node in bare]
        live = len(rows) - int(removed.sum())
        if live != self.store.state.live:
            wrong.append(("count_differs", f"there are {live} rows; lmd_metadata has {self.store.state.live}"))
        if wrong:
            about = refusal(self.store, self._rows_of_blocks()) or ""
            for check, detail in wrong:
                self.found.add(check, [detail], about)

    def _followed(self) -> None:
        try:
            read_source(self.folder, self.store.state.followed)
            usable(self.folder, self.store.state.unusable)
        except (TableCorruptError, IndexUnusableError) as error:
            self.found.add(FOLLOW_DAMAGED, [str(error)])

    def _view(self) -> None:
        try:
            check_commits(self.folder, self.parameters, self.store)
        except TableCorruptError as error:
            self.found.add("commits_missing", [str(error)])
            return
        try:
            view = View(self.folder, self.parameters)
        except MemwalOpsError as error:
            self.found.add("view_damaged", [str(error)])
            return
        try:
            if view.state != self.store.state:
                self.found.add("view_behind", [
                    f"the view is at epoch {view.epoch}, the store at {self.store.state.epoch}"
                ])  # fmt: skip
            else:
                self.found.add("view_differs", self._differences(view))
        finally:
            view.close()

    def _differences(self, view: View) -> Iterator[str]:
        nodes, slots, epochs = self.store.in_graph(self.store.state.retained_from)
        for node in view.slots_that_differ(nodes, slots, epochs):
            yield f"the view has node {node} in another slot than the store"
        [dead] = self.store.columns("SELECT node_id FROM lmd_tombstoned_nodes ORDER BY node_id")
        if not np.array_equal(dead.astype(np.int64), view.dead):
            yield "the view has other tombstones than the store"
        [entries] = self.store.columns("SELECT node_id FROM lmd_entry_points WHERE removed_epoch IS NULL ORDER BY 1")
        if not np.array_equal(entries.astype(np.int64), np.sort(view.entries(view.epoch))):
            yield "the view has other entry points than the store"
        rows, nodes = self.store.columns("SELECT row_id, node_id FROM lmd_lookup")
        # If the store's are wrong, the view has the right ones.
        if not self.found.findings.counts.keys() & CHECKS and not view.has_rows(rows, nodes):
            yield "the view lacks rows of the store"


@dataclass(frozen=True)
class Blocks:
    """The contents of the blocks, by node id.

    Attributes:
        seen: which nodes have a block.
        dead: which of them are deleted.
        rows: their row ids.
        damaged: whether there are blocks that cannot be read.
    """

    seen: NDArray[np.bool_]
    dead: NDArray[np.bool_]
    rows: NDArray[np.int64]
    damaged: bool


def refusal(store: Store, blocks: Blocks) -> str | None:
    """Why the lookup cannot be computed from the blocks; None: it can."""
    if blocks.damaged:
        return "Blocks are damaged, and their rows would be lost."
    live = np.flatnonzero(blocks.seen & ~blocks.dead)
    if len(live) != store.state.live:
        return f"There are blocks of {len(live)} rows, and lmd_metadata has {store.state.live}: some may be lost."
    if len(np.unique(blocks.rows[live])) != len(live):
        return "Two nodes have the same row, and either may be the newer one."
    [tombstones] = store.columns("SELECT DISTINCT node_id FROM lmd_tombstoned_nodes ORDER BY node_id")
    if not np.array_equal(tombstones.astype(np.int64), np.flatnonzero(blocks.seen & blocks.dead)):
        return "Blocks and tombstones differ about which rows were deleted."
    return None


def changes(store: Store, blocks: Blocks) -> Changes | None:
    """The commit that makes the lookup agree with the blocks; None: it does already."""
    if not len(blocks.seen):
        return None
    rows, nodes, removed = store.columns("SELECT row_id, node_id, removed_epoch FROM lmd_lookup")
    [tombstones, deleted] = store.columns("SELECT node_id, deletion_epoch FROM lmd_tombstoned_nodes")
    epochs = np.full(len(blocks.seen), np.iinfo(U8).max, U8)
    epochs[tombstones.astype(np.int64)] = deleted
    at = np.minimum(nodes, len(blocks.seen) - 1).astype(np.int64)
    right: NDArray[Any] = (nodes < len(blocks.seen)) & blocks.seen[at] & (blocks.rows[at] == rows)
    right &= removed == epochs[at]
    _, first, count = np.unique(nodes, return_index=True, return_counts=True)
    alone = np.zeros(len(nodes), bool)
    alone[first] = count == 1
    good = np.zeros(len(blocks.seen), bool)
    good[at[right & alone]] = True
    # A node that was added and deleted by one transaction has a tombstone, and never was in the lookup.
    missing = np.flatnonzero(blocks.seen & ~blocks.dead & ~good)
    wrong = np.unique(np.concatenate([nodes[~(right & alone)].astype(np.int64), missing]))
    if not len(wrong):
        return None
    added = wrong[np.isin(wrong, np.flatnonzero(blocks.seen))]
    state = replace(store.state, epoch=store.state.epoch + 1)
    return Changes(state, unmapped=wrong.astype(U8), row_ids=blocks.rows[added].astype(I8), row_nodes=added.astype(U8))
