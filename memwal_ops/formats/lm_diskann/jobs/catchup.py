"""Bring an index to the newest version of the table that it follows, and heal its graph around deleted nodes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lm_diskann import following, healing
from memwal_ops.formats.lm_diskann.build import memory_of
from memwal_ops.formats.lm_diskann.quality import code_error_ratio, is_stale
from memwal_ops.formats.lm_diskann.source import IndexUnusableError, Unusable, read_source
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.options import CatchupOptions
    from memwal_ops.formats.lm_diskann.table import Table


_STALE = "Its codebook no longer fits its rows, and searches lose some: run it again with a larger --build-memory."


class Decision(enum.StrEnum):
    """The decisions of a catch-up."""

    CAUGHT_UP = "caught_up"
    UNUSABLE = "unusable"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class Report:
    """The result of a catch-up, or its plan.

    Attributes:
        epoch: of the index afterwards.
        healed: deleted nodes that were removed from the graph; of a plan: those to be healed.
        rewired: nodes whose neighbours were searched again.
        pruned: nodes whose links were only replaced, without a new search.
        inserted, deleted: rows of the followed table; skipped: its rows without a usable vector.
        versions: of the followed table, that the index was behind.
        rebuilt: rows whose graph was built anew, with its codebook.
        stale: the codebook no longer fits the rows, and building anew takes more than the memory allowed.
        followed: the version of the table that the index has now; None: it follows none.
        unusable: why it cannot follow any more.
    """

    decision: Decision
    epoch: int
    healed: int = 0
    rewired: int = 0
    pruned: int = 0
    inserted: int = 0
    deleted: int = 0
    skipped: int = 0
    versions: int = 0
    followed: int | None = None
    unusable: Unusable | None = None
    rebuilt: int = 0
    stale: bool = False

    @property
    def exit_code(self) -> int:
        """28 if the index has to be rebuilt."""
        return IndexUnusableError.exit_code if self.unusable is not None else 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self, unusable=None if self.unusable is None else self.unusable.text)

    def needs(self) -> Iterator[Need]:
        """What a run would follow and heal, or why it cannot follow."""
        if self.unusable is not None:
            yield Need("catchup", f"refuse to follow: {self.unusable.text}")
        elif self.versions:
            yield Need("catchup", f"follow {counted(self.versions, 'version')}")
        if self.healed:
            yield Need("catchup", f"heal {counted(self.healed, 'deleted node')}")

    def describe(self) -> str:
        """The text for people."""
        nodes = counted(self.healed, "deleted node")
        if self.decision is Decision.DRY_RUN:
            behind = "" if self.followed is None else f"{counted(self.versions, 'version')} would be followed, "
            return f"{self.decision}: {behind}{nodes} would be healed; the index is at epoch {self.epoch}."
        if self.unusable is not None:
            return f"{self.decision}: {self.unusable.text}.\n{IndexUnusableError.remedy}"
        if self.followed is not None:
            rows = f"{counted(self.inserted, 'row')} inserted, {self.deleted:,} deleted, {self.skipped:,} skipped"
            nodes = f"{rows}; the index has version {self.followed} of its table; {nodes}"
        if self.rebuilt:
            nodes = f"the graph of {counted(self.rebuilt, 'row')} was built anew, with its codebook; {nodes}"
        stale = f"\n{_STALE}" if self.stale else ""
        return (
            f"{self.decision}: {nodes} healed, {counted(self.pruned, 'neighbour')} pruned and "
            f"{counted(self.rewired, 'node')} rewired; the index is at epoch {self.epoch}.{stale}"
        )


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metrics, from the published view and the followed table."""
    behind = following.versions_behind(read_source(table.location.uri, table.state.followed), table.state.followed)
    return {**unhealed(table), "versions_behind": behind, **drift(table)}


def drift(table: Table) -> Mapping[str, float]:
    """The backlog metric of the codebook; 0 where the view cannot be read, which other figures report."""
    try:
        view = View(table.location.uri, table.parameters)
    except MemwalOpsError:
        return {"code_error_ratio": 0.0}
    try:
        return {"code_error_ratio": code_error_ratio(view)}
    finally:
        view.close()


def unhealed(table: Table) -> Mapping[str, float]:
    """The backlog metrics of the graph."""
    nodes = max(1, table.state.live + table.tombstones)
    waits = table.tombstones - table.state.healed
    return {"unhealed_nodes": waits, "unhealed_percent": 100 * waits / nodes}


def plan(table: Table, options: CatchupOptions, context: RunContext) -> Report:
    """The backlog, from the published view. An index that cannot follow its table is not healed, unless rebuilt."""
    del context
    table.check_files()
    found = read_source(table.location.uri, table.state.followed)
    followed = None if found is None else table.state.followed
    if table.state.unusable and not options.rebuild:
        return Report(Decision.UNUSABLE, table.revision, followed=followed, unusable=Unusable(table.state.unusable))
    behind = following.versions_behind(found, table.state.followed)
    waits = table.tombstones - table.state.healed
    return Report(Decision.DRY_RUN, table.revision, waits, versions=behind, followed=followed)


def apply(table: Table, options: CatchupOptions, context: RunContext) -> Report:
    """Follow the table, then heal the whole backlog, in batches.

    Raises:
        IndexBusyError: another writer or job has the index.
        InvalidUsageError: the table no longer has the columns that the index follows; earlier commits are kept.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed, or the table cannot be read; earlier commits are kept.
    """
    healed = rewired = pruned = inserted = deleted = skipped = rebuilt = 0
    found = read_source(table.location.uri, table.state.followed)
    if found is not None:
        found.announce(table.parameters.uuid, table.location.uri)
    with table.open(options.wait.total_seconds(), changes=True) as index:
        before = index.writable().state.followed
        try:
            for part in () if found is None else following.follow(
                index, found, options.max_rows, table.durable, rebuild=options.rebuild
            ):  # fmt: skip
                inserted, deleted, skipped = (
                    inserted + part.inserted, deleted + part.deleted, skipped + part.skipped
                )  # fmt: skip
                context.revisions.append(part.epoch)
                context.figures["rows_followed"] += part.inserted + part.deleted
                context.advance("following", "rows", part.inserted + part.deleted)
                context.checkpoint()
        except IndexUnusableError:
            state = index.writable().state
            return Report(
                Decision.UNUSABLE, state.epoch, followed=state.followed, unusable=Unusable(state.unusable)
            )  # fmt: skip
        stale = _builds(index, options, own=found is None)
        if stale and (options.rebuild or memory_of(index.parameters, len(index)) <= options.build_memory):
            context.advance("building", "rows", 0, total=len(index))
            done, stale = healing.build_again(index, table.durable), False
            healed, rebuilt = done.healed, done.rewired
            context.revisions.append(done.epoch)
            context.figures["nodes_healed"] += done.healed
            context.advance("building", "rows", rebuilt, total=rebuilt)
            context.checkpoint()
        total, _ = healing.pending(index.writable())
        for batch in healing.heal(index, options.batch, table.durable):
            healed, rewired, pruned = healed + batch.healed, rewired + batch.rewired, pruned + batch.pruned
            context.revisions.append(batch.epoch)
            context.figures["nodes_healed"] += batch.healed
            context.advance("healing", "nodes", batch.healed, total=total)
            context.checkpoint()
        now = index.writable().state
        changed = healed or rewired or rebuilt or now.followed != before or (options.rebuild and found is not None)
        decision = Decision.CAUGHT_UP if changed else Decision.UNCHANGED
        return Report(
            decision, now.epoch, healed, rewired, pruned, inserted, deleted,
            skipped, now.followed - before, None if found is None else now.followed, None, rebuilt, stale,
        )  # fmt: skip


def _builds(index: Index, options: CatchupOptions, *, own: bool) -> bool:
    """Whether the graph is built anew, or should be: its codebook is stale, or that was asked for."""
    store = index.writable()
    if options.rebuild and own:
        return bool(store.state.codebook_id and store.state.live)
    return is_stale(index, store)
