"""Move blocks from the end of the graph into its free slots, so that gc can truncate the file."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.formats.lm_diskann import compacting, merging
from memwal_ops.formats.lm_diskann.publishing import locked_store
from memwal_ops.formats.lm_diskann.slots import needed_from
from memwal_ops.text import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import CompactOptions
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.table import Table

_BUDGET_USED = "The run has used its --max-bytes; the next run continues."


class Decision(enum.StrEnum):
    """The decisions of a compaction."""

    COMPACTED = "compacted"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class Report:
    """The result of a compaction, or its plan.

    Attributes:
        blocks: moved blocks (approximate in a plan); ``bytes``: their size.
        bytes_reclaimable: by how much gc can truncate the graph afterwards; None in a plan.
        epoch: of the index afterwards.
        why: why nothing was moved, or no more; else None.
    """

    decision: Decision
    blocks: int
    bytes: int
    bytes_reclaimable: int | None
    epoch: int
    why: str | None = None

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self)

    def needs(self) -> Iterator[Need]:
        """What a run would move."""
        if self.blocks:
            yield Need("compact", f"move {counted(self.blocks, 'block')}")

    def describe(self) -> str:
        """The text for people."""
        what = f"{counted(self.blocks, 'block')} ({size_text(self.bytes)})"
        if self.decision is Decision.DRY_RUN:
            done = f"would move about {what}" if self.blocks else "would move nothing"
        else:
            done = f"{what} moved; the index is at epoch {self.epoch}"
        lines = [f"{self.decision}: {done}."]
        if self.why is not None:
            lines.append(self.why)
        if self.bytes_reclaimable:
            lines.append(f"memwal-ops gc --apply can truncate the graph by {size_text(self.bytes_reclaimable)}.")
        return "\n".join(lines)


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metric, from the published view."""
    state = table.state
    spare = state.slot_count - state.live - table.tombstones + state.healed
    return {"free_percent": 100 * max(0, spare) / max(1, state.slot_count)}


def plan(table: Table, options: CompactOptions, context: RunContext) -> Report:
    """Report what a run would move. Reads only.

    Raises:
        IndexBusyError: another writer or job has the index.
    """
    del context
    table.check_files()
    folder, parameters = table.location.uri, table.parameters
    with locked_store(folder, parameters, options.wait.total_seconds()) as store:
        # A run first stops retaining the epochs that no reader and no hold needs.
        found = compacting.blocks(store, needed_from(folder, store.state.epoch))
        why = _why(store, found)
        count = 0 if why is not None else found.misplaced
        size = parameters.layout.block_size
        if options.max_bytes is not None:
            count = min(count, max(1, options.max_bytes // size))
        return Report(Decision.DRY_RUN, count, count * size, None, store.state.epoch, why)


def apply(table: Table, options: CompactOptions, context: RunContext) -> Report:
    """Move blocks, a bounded number per commit.

    Raises:
        IndexBusyError: another writer or job has the index.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed; earlier commits are kept.
        TableCorruptError: a block that would be moved is damaged; earlier commits are kept.
    """
    blocks = moved = 0
    with table.open(options.wait.total_seconds()) as index:
        store = index.writable()
        for batch in compacting.compact(index, options.max_bytes, table.durable):
            blocks, moved = blocks + batch.blocks, moved + batch.bytes
            context.revisions.append(batch.epoch)
            context.figures["bytes_compacted"] += batch.bytes
            context.advance("moving", "blocks", batch.blocks)
            context.checkpoint()
        why = None if blocks else _why(store, compacting.blocks(store, store.state.retained_from))
        if blocks:
            merging.finish(index, table.durable)
            if options.max_bytes is not None and moved >= options.max_bytes:
                why = _BUDGET_USED
        freed = compacting.reclaimable(store, index.folder, index.parameters.layout.block_size)
        decision = Decision.COMPACTED if blocks else Decision.UNCHANGED
        return Report(decision, blocks, moved, freed, store.state.epoch, why)


def _why(store: Store, found: compacting.Blocks) -> str | None:
    """The reason why nothing is moved; None: something is."""
    spare, count = compacting.spare(store), store.state.slot_count
    if spare < compacting.MIN_FREE_SHARE * count:
        return (
            f"{max(0, spare):,} of {count:,} slots can be spared, less than {compacting.MIN_FREE_SHARE:.0%}: "
            "the next merges use them."
        )
    if len(found.moves()[0]):
        return None
    if not found.misplaced:
        return "All blocks are in the first slots already."
    return "No slot at the front is free: readers or holds need those blocks, or they await merge or catchup."
