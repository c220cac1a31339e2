"""Classify how runs ended: outcomes and error fields of the run history."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from memwal_ops.core.fleet_budget import amounts_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.prices import money_of
from memwal_ops.errors import JobHungError, LeaseLostError, WorkerDiedError, runbook
from memwal_ops.supervisor.state.history import BY_HAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memwal_ops.core.fleet_budget import Amounts
    from memwal_ops.core.prices import Prices

    Charged = tuple[float, Amounts, bool]
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.supervisor.state.tables import TableJob

LEVELS = {"failed": 30, "partial": 30, "died": 40, "hung": 40, "lost": 30}
"""Log levels by outcome; all others are INFO."""
STOPPED: Mapping[str, Any] = {"reason": "stopped", "error": "The service stopped.", "remedy": None}
CANCELLED = ("cancel", "abort")
"""Why a run ends that a user cancelled; by ``abort``, at once."""
_RESULT_COLUMNS = ("decision", "figures", "phases", "versions", "report")
_LEDGER_COLUMNS = ("used", "achieved")
_WHY = ("reason", "error", "remedy")


def classify_result(entry: TableJob, result: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return outcome and columns of a run, from its worker's result."""
    ended_by = None if entry.run is None else entry.run.ended_by
    outcome = str(result["outcome"])
    if outcome == "stopped" and ended_by in {"hung", "timeout"}:
        outcome, details = "hung", error_fields(_hung(entry, ended_by))
    elif outcome == "stopped" and ended_by in CANCELLED:
        outcome, details = "cancelled", _cancelled(entry)
    elif outcome == "stopped" and ended_by == "lost":
        outcome, details = "lost", error_fields(LeaseLostError("The lease was lost while the job ran."))
    else:
        details = {
            "exit_code": result["exit_code"],
            "reason": result["reason"],
            "error": result["message"],
            "remedy": result["remedy"],
        }
        if outcome == "partial":
            details |= _failed_part(result["report"] or {}) or _damage(result["report"] or {}) or {}
    ledger = {name: result.get(name) for name in _LEDGER_COLUMNS}
    return outcome, details | {name: result[name] for name in _RESULT_COLUMNS} | ledger


def _cancelled(entry: TableJob) -> dict[str, Any]:
    by = "" if entry.run is None else entry.run.cancelled_by
    return {"reason": "cancelled", "error": f"{by} cancelled the run; what it published stays.", "remedy": None}


def _failed_part(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of the first ``error`` in the lists of a report, of an index for example; None: none."""
    lists = [entries for entries in report.values() if isinstance(entries, list)]
    errors = (entry.get("error") for entries in lists for entry in entries if isinstance(entry, dict))
    found = next((error for error in errors if isinstance(error, dict) and error.get("reason")), None)
    return None if found is None else {"reason": str(found["reason"]), "error": str(found.get("detail"))}


def _damage(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of the worst finding of a verification; None: no error, or none but wrong answers of indexes.

    Those are shown by :func:`answers_of`.
    """
    listed, asked = report.get("findings"), report.get("answers")
    answers = [one for index in asked or () for one in index.get("findings") or ()] if isinstance(asked, list) else []
    shown = {(one["check"], one["evidence"]) for one in answers}
    errors = [one for one in listed or () if isinstance(one, dict) and one.get("severity") == "error"]
    found = next((one for one in errors if (one["check"], one["evidence"]) not in shown), None)
    if found is None:
        return None
    return {"reason": found["check"], "error": f"{found['place']}: {found['evidence']}", "remedy": found["remedy"]}


def classify_exit(entry: TableJob, pid: int, status: int | None, memory: int | None) -> tuple[str, dict[str, Any]]:
    """Return outcome and columns of a run after its worker exited without a result; ``memory``: the pool's limit."""
    ended_by = None if entry.run is None else entry.run.ended_by
    if ended_by in {"hung", "timeout"}:
        return "hung", error_fields(_hung(entry, ended_by))
    if ended_by == "stop":
        return "stopped", dict(STOPPED)
    if ended_by in CANCELLED:
        return "cancelled", _cancelled(entry)
    if ended_by == "lost":
        return "lost", error_fields(LeaseLostError("The lease was lost while the job ran."))
    why = f"was killed: it exceeded its memory limit of {memory} bytes"
    what = why if ended_by == "memory" else f"exited: {describe_exit(status)}"
    return "died", error_fields(WorkerDiedError(f"Worker {pid} {what}."))


def _hung(entry: TableJob, ended_by: str | None) -> JobHungError:
    limit = entry.settings.hung_after if ended_by == "hung" else entry.settings.timeout
    what = "made no progress for" if ended_by == "hung" else "ran longer than"
    return JobHungError(f"The job {entry.settings.name} on {entry.table.name} {what} {limit}, and was killed.")


def answers_of(report: Mapping[str, Any] | None, asked_at: str | None) -> list[Mapping[str, Any]] | None:
    """The ``answers`` in a report, with the time and the version of their run; None: it did not ask."""
    found = (report or {}).get("answers")
    if report is None or not isinstance(found, list) or report.get("decision") == "dry_run":
        return None
    asked = {"asked_at": asked_at, "asked_version": report.get("version")}
    entries: list[Mapping[str, Any]] = [{**one, **asked} for one in found if isinstance(one, dict) and "index" in one]
    return entries if entries or report.get("seed") is not None else None


def last_answers(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The answers of the newest run that asked; ``runs`` of the history, the newest first."""
    found = (answers_of(run["report"], run["finished"]) for run in runs)
    return next((answers for answers in found if answers is not None), [])


def past_runs(runs: Iterable[Mapping[str, Any]]) -> Iterator[PastRun]:
    """Those of the runs of the history that succeeded."""
    return (PastRun(run["seconds"], run["report"] or {}, run["used"]) for run in runs if run["outcome"] == "succeeded")


OVER_BUDGET = "over_budget"
"""What a job waits for while the budget of the fleet is used up."""


def is_held(plan: Mapping[str, Any]) -> bool:
    """Whether a run is one that the budget, which is only a shadow, would not have allowed."""
    return bool((plan.get("shadow") or {}).get("would") == OVER_BUDGET)


def charged_runs(runs: Iterable[Mapping[str, Any]], prices: Mapping[str, Prices]) -> list[Charged]:
    """What the fleet's budget is charged for, of :meth:`History.ledger`, the oldest first.

    Of each run: when it ended, what it used, and whether it restored an objective. Runs by hand are not the service's.
    """
    charged = [
        (float(run["finished"]), amounts_of(run["used"], money_of(run["used"], prices)), "objective" in run["plan"])
        for run in runs
        if run["used"] and run["supervisor"] != BY_HAND and not is_held(run["plan"])
    ]
    return sorted(charged)


def error_fields(error: MemwalOpsError) -> dict[str, Any]:
    """Return the columns of an error."""
    return {"exit_code": error.exit_code, "reason": error.reason, "error": str(error), "remedy": error.remedy}


def log_fields(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log line of a run has of it: the decision, the error, and why a part is blocked, with its page.

    Of several blocked parts, the first one, with its fields in the report (``region_id``, ``generation``), and their
    number.
    """
    entries = (details.get("report") or {}).get("blocked")
    blocked = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    fields = {name: details.get(name) for name in _WHY}
    if blocked:
        fields |= {name: value for name, value in blocked[0].items() if isinstance(value, str | int)}
        fields["blocked"] = len(blocked)
    fields["exit_code"] = details.get("exit_code") or None
    fields["runbook"] = runbook(details.get("exit_code") or 0, fields["reason"])
    always = {"decision": details.get("decision"), "error": details.get("error")}
    return always | {name: value for name, value in fields.items() if value is not None}


def repeated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log line of a run has of it whose :func:`log_fields` are those of the run before."""
    kept = {name: fields[name] for name in ("decision", "reason", "exit_code") if fields.get(name) is not None}
    return {**kept, "same_as_before": True}


def describe_exit(status: int | None) -> str:
    """Return as text how a process ended; ``status``: its exit code, or minus the signal that killed it."""
    if status is None:
        return "it closed its pipe"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
