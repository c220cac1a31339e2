"""The repair job of index folders: publish the view, map rows, link nodes, give up epochs; else list the choices.

The view is made from the store alone, and replaced atomically under the next number, so the old view need not be kept.
It is not made from a store that has findings itself: then the old view may be the better copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.core.context import RunContext
from memwal_ops.core.repair import Fix, FixAttempt, RepairJob, UnsafeError
from memwal_ops.core.verification import Findings
from memwal_ops.formats.lm_diskann import deep, healing, merging, publishing, remapping
from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.jobs import verify
from memwal_ops.formats.lm_diskann.options import VerifyOptions
from memwal_ops.formats.lm_diskann.slots import needed_from
from memwal_ops.formats.lm_diskann.verification import FOLLOW_DAMAGED, OF_VIEW, OLD_VERSION_DAMAGED, Check, Verified

if TYPE_CHECKING:
    from memwal_ops.core.repair import Keep
    from memwal_ops.core.verification import Finding, VerifyReport
    from memwal_ops.core.verification import VerifyOptions as BaseVerifyOptions
    from memwal_ops.formats.lm_diskann.table import Table

_DAMAGED_STORE = "store"
_REBUILD = "Run memwal-ops catchup URI --rebuild: it builds the graph anew."
_NEEDED = "A reader or a hold needs epochs from {} on; repair again when it has ended."


def _verified(table: Table, options: BaseVerifyOptions, context: RunContext) -> VerifyReport:
    """The findings; those about the view record whether the store has any."""
    found = verify.verified(table, VerifyOptions(deep=options.deep, max_findings=options.max_findings), context)
    if found.findings.counts.keys() - OF_VIEW - {FOLLOW_DAMAGED, OLD_VERSION_DAMAGED}:
        found.findings.kept = [
            replace(one, about=_DAMAGED_STORE) if one.check in OF_VIEW else one for one in found.findings.kept
        ]
    return found


def _fix_of(table: Table, finding: Finding) -> Fix[Table] | None:
    if finding.check == "unreachable":
        return Fix("graph:", "link unreachable nodes again", _link)
    if finding.check == OLD_VERSION_DAMAGED:
        needed = needed_from(table.location.uri, table.revision)
        if needed <= table.state.retained_from:
            raise UnsafeError(_NEEDED.format(needed))
        return Fix("epochs:", f"give up the epochs below {needed}", _give_up)
    if finding.check in remapping.CHECKS:
        if finding.about:
            raise UnsafeError(finding.about)
        return Fix("rows:", "map the rows again by the row ids in their blocks", _remap)
    if finding.check not in OF_VIEW:
        return None
    if finding.about == _DAMAGED_STORE:
        raise UnsafeError("The store has findings itself: a view made from it could lose rows that this one has.")
    return Fix("view:", "publish the view again from the store", _publish)


def _publish(table: Table, keep: Keep) -> FixAttempt:
    del keep  # the view is made from the store, which has all of it
    with table.open(VerifyOptions().wait.total_seconds()) as index:
        if not index.republished:  # opening it publishes a view that is behind, or cannot be read
            publishing.publish(table.location.uri, table.parameters, index.writable(), table.durable)
    return FixAttempt.DONE


def _remap(table: Table, keep: Keep) -> FixAttempt:
    del keep  # the replaced entries contradict the blocks, which are kept
    with table.open(VerifyOptions().wait.total_seconds()) as index:
        store, folder = index.writable(), table.location.uri
        blocks = Check(folder, table.parameters, store, Verified(Findings(1)), RunContext()).read_blocks()
        if (why := remapping.refusal(store, blocks)) is not None:
            raise UnsafeError(why)
        changes = remapping.changes(store, blocks)
        if changes is None:
            return FixAttempt.GONE
        table.durable("commit to the store", lambda: store.commit(changes))
        publishing.publish(folder, table.parameters, store, table.durable)
    return FixAttempt.DONE


def _give_up(table: Table, keep: Keep) -> FixAttempt:
    del keep  # only epochs that no reader and no hold needs are given up
    with table.open(VerifyOptions().wait.total_seconds()) as index:
        store, folder = index.writable(), table.location.uri
        needed = needed_from(folder, store.state.epoch)
        if needed > store.state.retained_from:
            merging.give_up(index, needed, table.durable)
            merging.finish(index, table.durable)  # a view without the versions that are given up
        found = Verified(Findings(1))
        Check(folder, table.parameters, store, found, RunContext()).read_blocks()
        if OLD_VERSION_DAMAGED in found.findings.counts:
            raise UnsafeError(_NEEDED.format(needed))
    return FixAttempt.DONE


def _link(table: Table, keep: Keep) -> FixAttempt:
    del keep  # links are added
    with table.open(VerifyOptions().wait.total_seconds(), changes=True) as index:
        nodes = deep.unreachable(index.view, index.writable())
        if not len(nodes):
            return FixAttempt.GONE
        with index.staged() as staged:
            healing.relink(staged, nodes)
            # With few links per node, linking one may take the last path from another one.
            left = healing.link_unreached(staged)
            staged.rewired = nodes
    if left:
        raise IndexCorruptError(
            f"{left:,} rows remain without a path: no node has a link left for them.", remedy=_REBUILD
        )
    return FixAttempt.DONE


JOB = RepairJob(_verified, _fix_of)
