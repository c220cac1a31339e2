"""Heal the graph around deleted nodes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.formats.lm_diskann import healing
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.options import CatchupOptions
    from memwal_ops.formats.lm_diskann.table import Table


class Decision(enum.StrEnum):
    """The decisions of a catch-up."""

    CAUGHT_UP = "caught_up"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class Report:
    """The result of a catch-up, or its plan.

    Attributes:
        epoch: of the index afterwards.
        healed: deleted nodes that were taken out of the graph; of a plan: those that wait.
        rewired: nodes whose neighbours were searched again.
        pruned: nodes that got other links instead.
    """

    decision: Decision
    epoch: int
    healed: int = 0
    rewired: int = 0
    pruned: int = 0

    @property
    def exit_code(self) -> int:
        """0."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {
            "decision": self.decision.value,
            "epoch": self.epoch,
            "healed": self.healed,
            "rewired": self.rewired,
            "pruned": self.pruned,
        }

    def describe(self) -> str:
        """The text for people."""
        nodes = counted(self.healed, "deleted node")
        if self.decision is Decision.DRY_RUN:
            return f"{self.decision}: {nodes} would be healed; the index is at epoch {self.epoch}."
        return (
            f"{self.decision}: {nodes} healed, {counted(self.pruned, 'neighbour')} pruned and "
            f"{counted(self.rewired, 'node')} rewired; the index is at epoch {self.epoch}."
        )


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metrics, from the published view."""
    nodes = max(1, table.state.live + table.tombstones)
    waits = table.tombstones - table.state.healed
    return {"unhealed_nodes": waits, "unhealed_percent": 100 * waits / nodes}


def plan(table: Table, options: CatchupOptions, context: RunContext) -> Report:
    """The backlog, from the published view."""
    del options, context
    return Report(Decision.DRY_RUN, table.revision, table.tombstones - table.state.healed)


def apply(table: Table, options: CatchupOptions, context: RunContext) -> Report:
    """Heal the whole backlog, in batches.

    Raises:
        IndexBusyError: another writer or job has the index.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed; earlier commits are kept.
    """
    healed = rewired = pruned = 0
    with table.open(options.wait.total_seconds(), changes=True) as index:
        total, _ = healing.waiting(index.writable())
        for batch in healing.heal(index, options.batch, table.durable):
            healed, rewired, pruned = healed + batch.healed, rewired + batch.rewired, pruned + batch.pruned
            context.revisions.append(batch.epoch)
            context.figures["nodes_healed"] += batch.healed
            context.advance("healing", "nodes", batch.healed, total=total)
            context.checkpoint()
        decision = Decision.CAUGHT_UP if healed or rewired else Decision.UNCHANGED
        return Report(decision, index.writable().state.epoch, healed, rewired, pruned)
