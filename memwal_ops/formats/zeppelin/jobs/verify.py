"""Check all objects of a namespace for consistency. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.context import RunContext
from memwal_ops.core.verification import Findings, VerifyReport
from memwal_ops.formats.zeppelin.verification import Checked, check_namespace

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import VerifyOptions


def plan(table: Namespace, options: VerifyOptions, context: RunContext | None = None) -> VerifyReport:
    """Check all objects. Raises ``StorageError`` if the store fails."""
    checked, findings = Checked(), Findings(options.max_findings)
    findings.extend(check_namespace(table, options, context or RunContext(), checked))
    return VerifyReport(table.revision, findings, vars(checked))


apply = plan
