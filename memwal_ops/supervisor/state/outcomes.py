"""How runs ended, and what they used: outcomes and error fields, recorded in the run history and read back.

The disk may be full, or another process may lock the file: a failure is logged, the maintenance of tables continues,
and a job with unreadable runs counts as one that never ran.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from memwal_ops.core import cost
from memwal_ops.core.fleet_budget import Amounts, amounts_of
from memwal_ops.core.outlook import Rate, rates_of
from memwal_ops.core.past_runs import PastRun
from memwal_ops.errors import HistoryError, JobHungError, LeaseLostError, MemwalOpsError, WorkerDiedError, runbook
from memwal_ops.log import get_logger
from memwal_ops.storage.metering import KINDS
from memwal_ops.supervisor.state.history import BY_HAND, History, LastRuns
from memwal_ops.supervisor.state.tables import Clock, TableJob

Charged = tuple[float, Amounts, bool]

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
    if found is None:
        return None
    known = {"remedy": found["remedy"]} if found.get("remedy") else {}
    what = str(found.get("detail")).removesuffix(known.get("remedy", "")).rstrip()
    return {"reason": str(found["reason"]), "error": what, **known}


def _damage(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The columns of the worst error of a verification, if any, but for wrong answers: :func:`answers_of` has those."""
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
    opened = "" if entry.run is None or not entry.run.opened else f" The last that it began: {entry.run.opened}."
    return "died", error_fields(WorkerDiedError(f"Worker {pid} {what}.{opened}"))


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


def charged_runs(runs: Iterable[Mapping[str, Any]], prices: Mapping[str, cost.Prices]) -> list[Charged]:
    """What the fleet's budget is charged for, of :meth:`History.ledger`, the oldest first.

    Of each run: when it ended, what it used, and whether it restored an objective. Runs by hand are not the service's.
    """
    charged = [
        (
            float(run["finished"]),
            amounts_of(run["used"], cost.money_of(run["used"], prices)),
            "objective" in run["plan"],
        )
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


_TICK = timedelta(milliseconds=1)
# Of these, the newest one that asked: others failed.
_WITH_REPORT = 10


class RunRecorder:
    """Wraps the history for the scheduler. ``supervisor``: the name of this supervisor, recorded with each run."""

    def __init__(self, history: History, supervisor: str, clock: Clock) -> None:
        self._history = history
        self._supervisor = supervisor
        self._clock = clock
        self._spent: dict[tuple[str, str, str], tuple[cost.Spent, ...]] = {}
        self._polls: dict[tuple[str, str, str], list[float]] = {}
        self._log = get_logger(__name__)

    def begin(self, entry: TableJob, plan: Mapping[str, Any], now: datetime) -> int | None:
        """Record the start of a run; return its number, or None if it could not be written."""
        try:
            return self._history.begin(
                table=entry.table.name,
                uri=entry.table.uri,
                job=entry.settings.name,
                supervisor=self._supervisor,
                why=entry.why,
                plan=plan,
                now=now,
            )
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
            return None

    def finish(
        self, entry: TableJob, number: int | None, now: datetime, outcome: str, details: Mapping[str, Any]
    ) -> None:
        """Record the end of a run of ``entry``."""
        del entry
        if number is None:
            return
        try:
            self._history.finish(number, now, outcome, **details)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def last(self, table: str, uri: str, job: str, now: datetime) -> LastRuns:
        """Return the last runs of a job on a table, and record when the job was first seen."""
        try:
            self._history.record_first_seen(table, job, now)
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))
        try:
            return self._history.last(table, uri, job, now).clamped(now)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return LastRuns(now, None, None, None, None, 0)

    def last_answers(self, table: str, uri: str, job: str) -> list[Mapping[str, Any]]:
        """Return how well indexes answered, by the last run of a job that asked them."""
        try:
            runs = self._history.runs(table=table, job=job, limit=_WITH_REPORT)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return []
        return last_answers(run for run in runs if run["uri"] == uri)

    def rates(self, table: str, uri: str, job: str) -> tuple[Rate, ...]:
        """Return how fast the last runs of a job wrote rows of a table."""
        try:
            runs = self._history.runs(table=table, job=job, limit=_WITH_REPORT)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return ()
        return rates_of(job, past_runs(run for run in runs if run["uri"] == uri))

    def spent(self, entry: TableJob) -> tuple[cost.Spent, ...]:
        """What the last runs of a job spent, the newest first; read from the history once."""
        key = (*entry.key, entry.table.uri)
        if key not in self._spent:
            self._spent[key] = ()
            try:
                runs = self._history.spent(entry.table.name, entry.table.uri, entry.settings.name, cost.MAX_RUNS)
                self._spent[key] = cost.spent_by(
                    entry.settings.name, (PastRun(seconds, {}, used, achieved) for seconds, used, achieved in runs)
                )
            except HistoryError as error:
                self._log.error("history_not_read", error=str(error))
        return self._spent[key]

    def add_spent(
        self, entry: TableJob, seconds: float, used: Mapping[str, Any] | None, achieved: Mapping[str, float] | None
    ) -> None:
        """Add a run that succeeded."""
        key = (*entry.key, entry.table.uri)
        newest = cost.spent_by(entry.settings.name, [PastRun(seconds, {}, used, achieved)])
        self._spent[key] = (*newest, *self.spent(entry))[: cost.MAX_RUNS]

    def add_poll(self, table: str, used: Mapping[str, Any]) -> None:
        """Count what a poll of a table used, until :meth:`write_polls`."""
        requests = used.get("requests") or {}
        amounts = [1.0, *(requests.get(kind, 0) for kind in KINDS)]
        amounts += [used.get(name) or 0 for name in ("bytes_read", "bytes_written", "cpu_seconds")]
        key = table, self._clock.now().date().isoformat(), str(used.get("store"))
        before = self._polls.get(key, [0.0] * len(amounts))
        self._polls[key] = [one + more for one, more in zip(before, amounts, strict=True)]

    def write_polls(self) -> None:
        """Write what polls used to the history; where that fails, it is written with the next."""
        try:
            self._history.add_polls([(*key, *amounts) for key, amounts in self._polls.items()])
            self._polls.clear()
        except HistoryError as error:
            self._log.error("history_not_written", error=str(error))

    def charged(self, since: datetime, prices: Mapping[str, cost.Prices]) -> list[Charged]:
        """Return what the fleet's budget is charged for since a time, see :func:`charged_runs`."""
        try:
            return charged_runs(self._history.ledger(since), prices)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return []

    def budget_frees(self, entry: TableJob) -> datetime | None:
        """When the runs of a job are within its time budget again; None: they are."""
        budget, now = entry.settings.budget, self._clock.now()
        if budget is None:
            return None
        try:
            ended = self._history.ended_since(*entry.key, now - budget.per)
        except HistoryError as error:
            self._log.error("history_not_read", error=str(error))
            return None
        per, since = budget.per.total_seconds(), (now - budget.per).timestamp()
        parts = [(max(begins, since), ends) for begins, ends in ended]
        over = sum(ends - begins for begins, ends in parts) - budget.time.total_seconds()
        if over < 0:
            return None
        for begins, ends in parts:
            if ends - begins > over:
                return datetime.fromtimestamp(begins + over + per, UTC) + _TICK
            over -= ends - begins
        return now + budget.per
