"""Merge delta blocks into the graph, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.core.documents import document
from memwal_ops.core.report import MergeDecision, MergeOutcome
from memwal_ops.formats.lm_diskann import merging
from memwal_ops.formats.lm_diskann.errors import RESTORE
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.merging import Bad
    from memwal_ops.formats.lm_diskann.specs import IndexMergeOptions
    from memwal_ops.formats.lm_diskann.table import Table

_SHOWN = 20


@dataclass(frozen=True)
class IndexMergeReport(MergeOutcome):
    """The result of a merge, or its plan.

    Attributes:
        blocks: number of delta blocks; ``bytes``: their size.
        epoch: of the index afterwards.
        blocked: nodes that could not be merged, or have no block.
        republished: the view was damaged, or behind the store, and was published again.
    """

    decision: MergeDecision
    blocks: int
    bytes: int
    epoch: int
    blocked: tuple[Bad, ...] = field(default=())
    republished: bool = False

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self, blocked=[{"node": part.node, "reason": part.why} for part in self.blocked])

    def describe(self) -> str:
        """The text for people."""
        lines = [f"{self.decision}: {counted(self.blocks, 'delta block')}; the index is at epoch {self.epoch}."]
        if self.republished:
            lines.append("The published view was damaged, or behind the store; it was published again.")
        lines += [f"  node {part.node}: {part.why}" for part in self.blocked[:_SHOWN]]
        if self.blocked:
            lines.append(paragraph(RESTORE))
        return "\n".join(lines)


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metrics, from the published view and the sizes of the files."""
    nodes = max(1, table.state.next_node_id)
    return {
        "delta_blocks": table.delta_blocks,
        "delta_bytes": table.delta_blocks * table.parameters.layout.block_size,
        "dirty_percent": 100 * table.delta_nodes / nodes,
        "blocked_parts": len(table.faults),
    }


def plan(table: Table, options: IndexMergeOptions, context: RunContext) -> IndexMergeReport:
    """The backlog, from the published view; damaged blocks are found by a run only."""
    del options, context
    table.check_files()
    size = table.parameters.layout.block_size
    return IndexMergeReport(MergeDecision.DRY_RUN, table.delta_blocks, table.delta_blocks * size, table.revision)


def apply(table: Table, options: IndexMergeOptions, context: RunContext) -> IndexMergeReport:
    """Merge the whole backlog.

    Raises:
        IndexBusyError: another writer or job has the index.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed; earlier commits are kept.
    """
    bad: dict[int, Bad] = {}
    blocks = size = 0
    with table.open(options.wait.total_seconds()) as index:
        missing = merging.missing_blocks(index.writable())
        for batch in merging.merge(index, options.max_bytes, table.durable, bad):
            blocks, size = blocks + batch.versions, size + batch.bytes
            context.revisions.append(batch.epoch)
            context.figures["blocks_merged"] += batch.versions
            context.figures["bytes_merged"] += batch.bytes
            context.advance("merging", "blocks", batch.versions, total=table.delta_blocks)
            context.checkpoint()
        if blocks:
            merging.finish(index, table.durable)
        blocked = (*bad.values(), *missing)
        done = MergeDecision.MERGED if blocks else MergeDecision.NOTHING_TO_MERGE
        decision = MergeDecision.BLOCKED if blocked else done
        return IndexMergeReport(decision, blocks, size, index.writable().state.epoch, blocked, index.republished)
