"""The repair job of Lance tables with MemWAL: :mod:`memwal_ops.core.repair` with the fixes of these tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.repair import RepairJob
from memwal_ops.formats.lance.jobs import legacy_verify, verify
from memwal_ops.formats.lance.jobs.repair_choices import CHOICES
from memwal_ops.formats.lance.jobs.repair_fixes import fix_of
from memwal_ops.formats.lance.jobs.repair_legacy import LEGACY_CHOICES, fix_of_legacy
from memwal_ops.formats.lance.jobs.repair_places import place_of
from memwal_ops.formats.lance.options import VerifyOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.quarantine import Place
    from memwal_ops.core.repair import Fix
    from memwal_ops.core.repair_report import Choice
    from memwal_ops.core.verification import Finding, VerifyReport
    from memwal_ops.core.verification import VerifyOptions as BaseVerifyOptions
    from memwal_ops.formats.lance.table import Table


class _Repairer:
    """Tables of the region and the shard layout."""

    choices: Mapping[str, tuple[Choice, ...]] = CHOICES

    def verify(self, table: Table, options: BaseVerifyOptions, context: RunContext) -> VerifyReport:
        """See the interface."""
        return verify.plan(table, VerifyOptions(deep=options.deep, max_findings=options.max_findings), context)

    def fix_of(self, table: Table, finding: Finding) -> Fix[Table] | None:
        """See the interface."""
        return fix_of(table, finding)

    def place(self, table: Table, name: str) -> Place:
        """See the interface."""
        return place_of(table, name)


class _LegacyRepairer(_Repairer):
    """Tables with the legacy MemWAL index."""

    choices = LEGACY_CHOICES

    def verify(self, table: Table, options: BaseVerifyOptions, context: RunContext) -> VerifyReport:
        """See the interface."""
        own = VerifyOptions(deep=options.deep, max_findings=options.max_findings)
        return legacy_verify.plan(table, own, context)

    def fix_of(self, table: Table, finding: Finding) -> Fix[Table] | None:
        """See the interface."""
        return fix_of_legacy(table, finding)


JOB = RepairJob(_Repairer())
LEGACY_JOB = RepairJob(_LegacyRepairer())
