"""Check the files that memwal-ops itself stores with a table of any format: leases and holds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.export import exported_store
from memwal_ops.core.holds import holds
from memwal_ops.core.leases import list_leases
from memwal_ops.core.verification import Finding, Severity, finding_of
from memwal_ops.errors import MemwalOpsError, runbook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.protocols import Table


def check_own_files(table: Table) -> Iterator[Finding]:
    """Find leases that expired without being released, and holds of revisions that do not exist any more."""
    export = exported_store(table)
    now = datetime.now(UTC) if export is None else export.taken
    try:
        for lease in list_leases(table.store):
            if lease.ended is None and not lease.in_force(now):
                yield Finding(
                    Severity.INFO, "lease_expired", f"the lease of {lease.job}",
                    f"{lease.holder.name} acquired it at {lease.acquired:%Y-%m-%d %H:%M:%S} and did not release it.",
                    "None: the next supervisor acquires it.", "None; check whether that process still runs.",
                    about=lease.job,
                )  # fmt: skip
    except MemwalOpsError as error:
        yield finding_of(error, "lease", "_mem_wal_ops/leases", "No supervised job can begin.", Severity.WARNING)
    try:
        for hold in holds(table):
            gone = [one for one in hold.versions if hold.in_force(now) and not table.has_revision(one)]
            if gone:
                yield Finding(
                    Severity.WARNING, "hold", f"hold {hold.number} of {hold.by}",
                    f"It keeps revision {gone[0]}, which does not exist.", "Its holder cannot read that revision.",
                    f"memwal-ops hold URI --release {hold.number}; ask {hold.by}.", runbook(26) or "",
                )  # fmt: skip
    except MemwalOpsError as error:
        yield finding_of(error, "hold", "_mem_wal_ops/holds", "gc and expire delete nothing.", Severity.WARNING)
