"""Check all objects of a namespace for consistency. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import RunContext
from memwal_ops.core.verification import AnswersPlan, Findings, VerifyReport, finding_of, missing_object
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.formats.zeppelin.answers import check_answers, plan_answers
from memwal_ops.formats.zeppelin.jobs.verification import Checked, check_namespace

if TYPE_CHECKING:
    from memwal_ops.core.answers import IndexAnswers
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import VerifyOptions


def plan(table: Namespace, options: VerifyOptions, context: RunContext | None = None) -> VerifyReport | AnswersPlan:
    """Verify a namespace, or tell what asking its indexes costs."""
    if options.dry_run:
        return AnswersPlan(table.revision, plan_answers(table, options), options.max_bytes)
    return verified(table, options, context)


apply = plan


def verified(table: Namespace, options: VerifyOptions, context: RunContext | None = None) -> VerifyReport:
    """Check all objects. Raises ``StorageError`` if the store fails."""
    context = context or RunContext()
    checked: dict[str, Any] = {}
    findings = Findings(options.max_findings)
    if options.checks_all:
        read = Checked()
        findings.extend(check_namespace(table, options, context, read))
        checked = vars(read)
    else:
        findings.extend(missing_object(table))
    if not options.asks or findings.counts["missing_object"]:
        return VerifyReport(table.revision, findings, checked)
    seed = options.seed_at(table.revision)
    answers: list[IndexAnswers] = []
    try:
        answers, wrong = check_answers(table, options, context, seed)
        findings.extend(wrong)
    except InvalidUsageError:
        raise
    except MemwalOpsError as error:
        findings.add(finding_of(error, "not_checked", "answers of indexes", "This part was not checked completely."))
    return VerifyReport(table.revision, findings, checked, answers=answers, seed=seed)
