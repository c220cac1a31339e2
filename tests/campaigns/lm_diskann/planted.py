"""Faults of the order of steps, planted one by one as patches of the merge and of commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memwal_ops.formats.lm_diskann import merging, publishing, transaction
from memwal_ops.formats.lm_diskann.jobs import compact
from memwal_ops.formats.lm_diskann.store import Store
from tests.campaigns.lm_diskann.lives import Life

if TYPE_CHECKING:
    import pytest


def no_fsync(patch: pytest.MonkeyPatch) -> None:
    """The graph is written, and not synced before the store's commit says where its blocks are."""
    for module in (merging, transaction):
        patch.setattr(module, "sync", lambda _: None)


def slot_reused_too_early(patch: pytest.MonkeyPatch) -> None:
    """Slots are written again under a registered reader."""
    for module in ("merging", "files"):
        patch.setattr(f"memwal_ops.formats.lm_diskann.{module}.needed_from", lambda _, epoch: epoch)


def newer_delta_deleted(patch: pytest.MonkeyPatch) -> None:
    """A batch deletes every delta there is, also those that it did not merge."""
    commit = Store.commit

    def greedy(self: Store, changes: Any) -> None:
        if len(changes.merged_nodes):
            nodes, versions = self.columns("SELECT node_id, version FROM lmd_delta_blocks")
            changes = replace(changes, merged_nodes=nodes, merged_versions=versions)
        commit(self, changes)

    patch.setattr(Store, "commit", greedy)


def view_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Readers are told of a commit before the store has it."""
    carry_out, once = Life.step, Life.once
    late: list[tuple[str, Callable[[], Any]]] = []

    def step(self: Life, name: str, act: Callable[[], Any]) -> Any:
        if name in {"commit to the store", "commit the merge to the store"}:
            late.append((name, act))
            return None
        done = carry_out(self, name, act)
        while name == "append the commit to the view" and late:
            carry_out(self, *late.pop())
        return done

    def forgotten(self: Life) -> None:
        late.clear()  # what a killed process did not commit
        once(self)

    patch.setattr(Life, "step", step)
    patch.setattr(Life, "once", forgotten)


def view_never_republished(patch: pytest.MonkeyPatch) -> None:
    """A view that lacks a commit is taken as it is."""
    patch.setattr(publishing, "recover", lambda *_: False)


def blocks_moved_out_of_order(patch: pytest.MonkeyPatch) -> None:
    """compact writes each block into the slot of another one."""
    read = compact._read
    patch.setattr(compact, "_read", lambda *of: read(*of)[::-1].copy())


PLANTED = {
    no_fsync: r"graph\.lmd in .* has .* bytes; the store has|checksum|has no block",
    slot_reused_too_early: r"Epoch \d+ of .* cannot be read|used again too early",
    newer_delta_deleted: r"has no block",
    view_before_the_commit: r"lacks commits|what a reader saw is not taken back|a whole, or not at all",
    blocks_moved_out_of_order: r"has no block|checksum|damaged",
    view_never_republished: r"view_behind|was published|has no block|a whole, or not at all",
}
"""Each, and what is said of it."""
