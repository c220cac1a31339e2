"""The repair job of Zeppelin namespaces: release expired leases of supervisors; for other findings, list the choices.

A namespace's own objects belong to its server, so repair does not write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.repair import RepairJob
from memwal_ops.core.repair_report import Choice
from memwal_ops.formats.zeppelin.jobs import verify
from memwal_ops.formats.zeppelin.options import VerifyOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.verification import VerifyOptions as BaseVerifyOptions
    from memwal_ops.core.verification import VerifyReport
    from memwal_ops.formats.zeppelin.namespace import Namespace

_CHOICES: Mapping[str, tuple[Choice, ...]] = {
    "pending_deletes": (
        Choice("Stop the server, and remove the key from pending_deletes.", "The manifest is edited by hand."),
        Choice("Leave it as it is.", "memwal-ops keeps the object; another program's gc deletes it, and rows with it."),
    ),
    "pending_ids": (
        Choice(
            "Append a delete of the ids: zeppelin.open_writer(URI).append(deletes=[...]).",
            "The next merge removes their rows, and the entries.",
        ),
        Choice("Append the rows again.", "Queries return them, and the entries are removed."),
        Choice("Leave them as they are.", "No query returns them; their rows stay in the log."),
    ),
    "compactor_lease": (
        Choice("Correct the clock that is wrong, and wait until the lease ends.", "No compaction until then."),
        Choice(
            "Make sure that its holder has ended, and write the lease with the same token and a time in the past.",
            "A holder that still runs cannot publish, because of the fencing token, and loses its work.",
        ),
    ),
}


def _verified(table: Namespace, options: BaseVerifyOptions, context: RunContext) -> VerifyReport:
    return verify.verified(table, VerifyOptions(deep=options.deep, max_findings=options.max_findings), context)


JOB = RepairJob(_verified, choices=_CHOICES)
