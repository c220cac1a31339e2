"""Find what is wrong with a table in a status document: which level, what, what to do, and which runbook page.

``memwal-ops status``, ``check`` and the pages of the service report the same findings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypedDict

from memwal_ops import text
from memwal_ops.core import answers, figures
from memwal_ops.errors import StorageCredentialsError, StoreUnavailableError, TableCorruptError, runbook
from memwal_ops.supervisor.observe.status_document import applicable_jobs
from memwal_ops.supervisor.scheduling.discovery import Fault

OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = {OK: "ok", WARNING: "warning", CRITICAL: "critical", UNKNOWN: "unknown"}
# What is not known may be as bad as critical, and is not called so.
_BY_SEVERITY = (OK, WARNING, UNKNOWN, CRITICAL)
NOT_READ, UNREADABLE, READ = "not_read", "unreadable", "read"
"""The states of a table in a status document: not polled yet, its last poll failed, or it succeeded."""
_LATE_WARNING, _LATE_CRITICAL = 3, 10
# Shorter intervals are treated as this one: starting a run, or this command, takes seconds.
_MIN_INTERVAL = 60.0
_FAILURES_CRITICAL = 3
_ENDINGS = {"failed": "failed", "died": "died", "hung": "hung"}
_DEFERRED = frozenset({"window", "budget", "over_budget", "lease", "earlier", "paused"})
MAX_BLOCKED = 3
"""So many blocked parts of a table are findings of their own."""
_BEHIND, _MERGE_BLOCKED = "runbooks/backlog-growing.md", "runbooks/merge-blocked.md"
_ELSEWHERE, _GONE = "runbooks/errors/66-drained_elsewhere.md", "runbooks/alerts/MemwalOpsRegionsGone.md"
_UNFLUSHED, _NO_WRITES = "runbooks/alerts/MemwalOpsUnflushedRows.md", "runbooks/alerts/MemwalOpsNoWrites.md"
# A writer that is alive flushes sooner, and one that restarts replays the log first.
_LEFT_BEHIND = 3600.0
_FLEET, _EVENTS = "runbooks/split-membership.md", "runbooks/no-events.md"
# Events that are so late are behind many others, or the queue was not read for a while.
_LATE_EVENTS = 600.0
_NAMED = 3
# Of a table that cannot be read at all, jobs fail with these for the same reason, each by a request of its own.
_AWAY = {StoreUnavailableError.reason, StorageCredentialsError.reason}
_JOB_LATE, _JOB_FAILING = "runbooks/alerts/MemwalOpsJobLate.md", "runbooks/alerts/MemwalOpsJobFailing.md"


class Finding(TypedDict):
    """One finding. ``level`` is ok, warning or critical; ``do`` ends with a period, or with ``: `` and a command.

    ``jobs``: those of the service's jobs of which a run now would remedy it, or show that it is remedied.
    """

    level: str
    what: str
    do: str
    runbook: str | None
    jobs: list[str]


class RunErrors(Protocol):
    """The source of details about a table that its status document does not have."""

    def last_error(self, uri: str, job: str) -> Mapping[str, Any] | None:
        """Return the error of a job's last failure: reason, message, remedy and exit code; None if it had none."""

    def part_of(self, uri: str, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of the part of a table that a ``blocked`` entry is about, and the place in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The alert thresholds of a backlog. Its size and age in seconds, each for warning and critical."""

    waiting: tuple[int, int]
    age: tuple[float, float]

    def level(self, backlog: figures.Figures) -> int:
        """Return the level of a backlog."""
        waiting, age = backlog.amount("backlog") or 0, backlog.amount("age") or 0
        return max(level_of(waiting, self.waiting), level_of(age, self.age))


DEFAULT_LIMITS = Limits((32, 128), (1800.0, 10_800.0))
"""The defaults of ``status`` and ``check``."""


def severity(level: int) -> int:
    """Return by what levels are sorted: the worst has the highest."""
    return _BY_SEVERITY.index(level)


def worst(levels: Iterable[int]) -> int:
    """Return the worst level; of none, OK."""
    return max(levels, key=severity, default=OK)


def state_of(looked_at: object, error: object) -> str:
    """Return the state of a table, by when it was last read, if ever, and the error of the last poll."""
    return UNREADABLE if error else NOT_READ if looked_at is None else READ


def state_level(table: Mapping[str, Any]) -> int:
    """Return the level of a table by its state alone, for ``check``, ``status``, the pages and the metrics."""
    return CRITICAL if table.get("look_error") else UNKNOWN if table.get("state") == NOT_READ else OK


def poll_error(table: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the error of a table's last poll, with what to do; None: it succeeded."""
    if table["look_error"] is None:
        return None
    todo = f"See it in full: {_inspect(table)}"
    page = "runbooks/alerts/MemwalOpsPollsFail.md"
    return {"reason": "the last poll failed", "message": table["look_error"], "remedy": todo, "runbook": page}


def not_read(tables: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tables of a status document were not read yet."""
    return sum(table.get("state") == NOT_READ for table in tables)


def not_read_text(count: int, tables: int) -> str:
    """Return how many of the tables were not read yet, in words."""
    return f"not read yet: {count:,} of {text.counted(tables, 'table')}"


def is_verified(jobs: Mapping[str, Any]) -> bool:
    """Whether a verification of a table's files has ended: polls read manifests, one of answers alone the indexes."""
    ran = jobs.get(answers.ASKED_BY) or {"last_success": None, "last_outcome": None}
    return not ran.get("answers_only") and (ran["last_success"] is not None or ran["last_outcome"] == "partial")


def level_of(value: float, limits: tuple[float, float]) -> int:
    """Return the level of a figure, by its two limits."""
    warning, critical = limits
    return CRITICAL if value >= critical else WARNING if value >= warning else OK


def job_findings(name: str, state: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the faults of a job in a status document: level and text."""
    failures = state["consecutive_failures"]
    if failures:
        level = CRITICAL if failures >= _FAILURES_CRITICAL else WARNING
        yield level, f"{name} failed {text.counted(failures, 'time')} in a row"
    breaker = state.get("breaker")
    if breaker is not None and breaker["reason"] == "saves_nothing":
        until = f"{breaker['until'][:16].replace('T', ' ')} UTC"
        runs = text.counted(breaker["runs"], "run")
        yield WARNING, f"the last {runs} of {name} by trigger achieved nothing: its triggers are ignored until {until}"
    every, since = state["schedule_seconds"], state["seconds_since_success"]
    # A job that another supervisor runs, or that is deferred by a window or budget, is not late.
    late = since / max(every, _MIN_INTERVAL) if every and state["waiting_for"] not in _DEFERRED else 0.0
    idle = (state.get("next_run") or {}).get("why") is not None  # no run is recorded while nothing is due
    if late >= _LATE_WARNING and state["state"] != "running" and not idle:
        yield CRITICAL if late >= _LATE_CRITICAL else WARNING, f"{name} has not succeeded for {since:.0f} s"


def partial_fault(job: str) -> tuple[int, str]:
    """Return the fault of a job whose last run was partial: level and text."""
    return (CRITICAL, f"{job} found damage") if job == answers.ASKED_BY else (WARNING, f"{job} left a part undone")


def last_run_fault(job: str, outcome: str | None, backlog: figures.Figures) -> tuple[int, str] | None:
    """Return the fault that the last run of the job shows that reduces a backlog: level and text; None: none.

    A run opens the files that a poll only lists. With nothing left to do, its outcome does not matter any more.
    """
    if not backlog.amount("backlog"):
        return None
    if outcome == "partial":
        return CRITICAL, f"the last {job} could not process all: a part was blocked"
    return (WARNING, f"the last {job} {_ENDINGS[outcome]}") if outcome in _ENDINGS else None


def finding(level: int, what: str, do: str, page: str | None, jobs: Iterable[str] = (), *, uri: str = "URI") -> Finding:
    """Return a finding of a level. ``uri``: of the table, for a command that says ``URI``."""
    return {"level": WORDS[level], "what": what, "do": text.for_table(do, uri), "runbook": page, "jobs": [*jobs]}


def last_run_finding(table: Mapping[str, Any], fault: tuple[int, str]) -> Finding:
    """Return the finding of a fault of :func:`last_run_fault`."""
    level, what = fault
    page = _MERGE_BLOCKED if level == CRITICAL else _JOB_FAILING
    return finding(level, f"{what[:1].upper()}{what[1:]}.", f"Run it by hand; see the table: {_inspect(table)}", page)


def no_tables() -> Finding:
    """Return the finding that no pattern matches any table."""
    return finding(WARNING, "There is no table: no pattern matches any.", "Check the patterns.", None)


def _todo(remedy: str) -> str:
    """What to do about an error of a service, which tries again by itself."""
    again = "Wait for the store to recover: what failed is tried again, without a command."
    return again if remedy == StoreUnavailableError.remedy else remedy


def service_findings(service: Mapping[str, Any] | None, faults: Sequence[Fault], file: str) -> Iterator[Finding]:
    """Yield the findings about a service: patterns, its configuration file, its history; ``service``: its status."""
    for fault in faults:
        what = f"{fault.pattern}: {fault.why.removesuffix(fault.remedy).rstrip()}"
        yield finding(WARNING, what, _todo(fault.remedy), runbook(fault.exit_code))
    if pending := pending_text(service):
        todo = "Wait: its store has not answered yet. The other tables are maintained meanwhile."
        yield finding(
            UNKNOWN, f"{pending[:1].upper()}{pending[1:]}: it is not known which tables there are.", todo, None
        )
    refused = None if service is None else service["config"]["error"]
    if refused:
        what = f"The service did not apply the file, or only a part of it: {refused}"
        checked = f"memwal-ops config check {shlex.quote(file)}"
        todo = f"Fix the reported error, and reload the file with SIGHUP: {checked}"
        yield finding(WARNING, what, todo, "runbooks/alerts/MemwalOpsConfigBad.md")
    lost = None if service is None else service.get("state_error")
    if lost:
        what = f"The service cannot write its run history: {lost}"
        full = any(word in lost.lower() for word in ("disk is full", "no space left"))
        page = "runbooks/disk-full.md" if full else "runbooks/errors/56-history.md"
        yield finding(WARNING, what, "Free space." if full else "Make the state folder writable.", page)
    for fault in () if service is None else service.get("delivery_faults") or ():
        to = "Heartbeats do" if fault["target"] == "heartbeat" else f"Notifications of the target {fault['target']} do"
        todo = f"See whether its server works, and its address: memwal-ops config check {shlex.quote(file)}"
        yield finding(WARNING, f"{to} not arrive: {fault['error']}", todo, None)
    fleet = None if service is None else service.get("fleet")
    if fleet is not None:
        yield from _fleet_findings(fleet)
    yield from event_findings(service)


def pending_text(service: Mapping[str, Any] | None) -> str:
    """Return which entries of the configuration were not listed yet, in words; empty: all were."""
    pending = [] if service is None else service.get("discovery_pending") or []
    return f"not listed yet: {_some(pending)}" if pending else ""


def event_findings(service: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield the findings about events of the store: none of them keeps a table from being polled."""
    events = None if service is None else service.get("events")
    if events is None:
        return
    if events["error"] is not None:
        what = f"The queue of events cannot be read; all tables are polled as without it. {events['error']}"
        yield finding(WARNING, what, f"Make {events['queue']} readable for the service.", _EVENTS)
    if missed := events["missed"]:
        what = f"No event announced a commit to {_some(missed)}; polls found it."
        yield finding(WARNING, what, "See whether their bucket notifies the queue of each object created.", _EVENTS)
    if events["unreadable"]:
        count, why = events["unreadable"], events["unreadable_error"]
        what = f"The queue of events has messages that are not S3's ({count}): {why}."
        yield finding(WARNING, what, "Give the service a queue of its own.", _EVENTS)
    if (events["lag_seconds"] or 0.0) > _LATE_EVENTS:
        what = f"Events are {text.time_text(events['lag_seconds'])} old when they are received."
        yield finding(WARNING, what, "Let the bucket notify of manifests alone.", _EVENTS)


def _fleet_findings(fleet: Mapping[str, Any]) -> Iterator[Finding]:
    if fleet["error"] is not None:
        own = next(member for member in fleet["members"] if member["name"] == fleet["name"])
        what = f"The store of the fleet cannot be used; this member keeps its {own['tables']} tables. {fleet['error']}"
        yield finding(WARNING, what, f"Make {fleet['uri']} readable and writable for each member.", _FLEET)
    for member in fleet["members"]:
        if not member["living"]:
            what = f"The member {member['name']} ended without leaving; the others have its tables."
            yield finding(WARNING, what, "Start it again, or find out why it ended.", _FLEET)
            continue
        if not member.get("same_budget", True):
            what = f"The member {member['name']} has another budget than this one, or none, or an earlier release."
            do = "Give each member the same budget: what one without a budget uses is not counted."
            yield finding(WARNING, what, do, _FLEET)
        if refused := member.get("refused_use"):
            what = f"What the member {member['name']} says that it used is left out of the budget: {refused}."
            do = "See which program writes its records, and end it; its own service writes others."
            yield finding(WARNING, what, do, _FLEET)
        if not member["same_tables"]:
            what = f"The configuration of the member {member['name']} names other tables than this one's."
            do = "Give each member the same tables: one that its member does not know is maintained by none."
            yield finding(WARNING, what, do, _FLEET)


def findings_of(table: Mapping[str, Any], errors: RunErrors, limits: Limits, file: str) -> Iterator[Finding]:
    """Yield the findings about a table.

    ``table``: its status document, with ``error`` and ``blocked`` as those of ``memwal-ops status``. ``file``: the
    configuration file, for commands; empty if there is none.
    """
    error, backlog = table["error"], figures.backlog_of(table)
    if table.get("state") == NOT_READ:
        todo = f"Wait for the first poll, or read it by hand: {_inspect(table)}"
        yield finding(UNKNOWN, "It has not been read yet: nothing is known of it.", todo, None)
    failures = _failures(table, errors)
    if error is not None:
        yield _unreadable(table, error, failures)
    blocked = table["blocked"]
    for block in blocked[:MAX_BLOCKED]:
        part, place = errors.part_of(table["uri"], block)
        todo = block.get("remedy") or "Fix the cause; until then no job goes on with this part."
        detail = block["detail"].removesuffix(todo).rstrip()
        what = f"{part or 'It'} is blocked{f' at {place}' if place else ''}: {block['reason']}. {detail}"
        yield finding(CRITICAL, what, f"{todo} See it: {_inspect(table)}", _MERGE_BLOCKED, uri=table["uri"])
    parts = int(backlog.amount("blocked") or 0)
    if parts and len(blocked) != min(parts, MAX_BLOCKED):
        what = f"{text.counted_as(parts, backlog.noun_of('blocked'))} in total cannot be processed completely."
        yield finding(CRITICAL, what, f"See which: {_inspect(table)}", _MERGE_BLOCKED)
    for bad_answer in answers.bad_answers(table["answers"]):
        about = _causes(bad_answer.why, table["uri"]) | {f"index {bad_answer.index}"}
        if same := next((failure for failure in failures if failure.causes & about), None):
            same.jobs.append(answers.ASKED_BY)
            same.level = CRITICAL if bad_answer.wrong else same.level
            continue
        what = bad_answer.describe()
        level = CRITICAL if bad_answer.wrong else WARNING
        yield finding(level, f"{what[:1].upper()}{what[1:]}", bad_answer.remedy, answers.PAGE, uri=table["uri"])
    yield from writer_findings(table)
    for failure in failures:
        yield failure.finding(table, file)
    failing = {job for failure in failures for job in failure.jobs}
    stuck = backlog.amount("blocked")  # the reason for what jobs did only a part of, and for what waits
    if error is None:
        jobs = applicable_jobs(table).items()
        done = [name for name, job in jobs if name not in failing and not (stuck and job["last_outcome"] == "partial")]
        yield from _late(table, done, file)
    behind = 0 if stuck else limits.level(backlog)
    if behind:
        count = text.counted_as(int(backlog.amount("backlog") or 0), backlog.noun_of("backlog"))
        waits = f"{count} wait{f', the oldest for {age_text(backlog)}' if age_text(backlog) else ''}"
        why, todo = _why_behind(table, file)
        name, job = backlog_job(table)
        idle = job is not None and job["state"] != "running"
        runs = [name] if idle and name not in failing else []
        yield finding(behind, f"It is behind: {waits}. {why}".rstrip(), todo, _BEHIND, runs)


def writer_findings(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what a table's log shows of its writers: rows that none has flushed, and no write for too long."""
    backlog, expected = figures.backlog_of(table), table.get("expect_writes_seconds")
    if other := backlog.amount("merged_elsewhere"):
        what = f"Another program, of Lance {other:.0f}, merges it, too, and may put older rows over newer ones."
        yield finding(OK, what, f"Let one program merge, or give merge accept_drained: {_inspect(table)}", _ELSEWHERE)
    if gone := int(backlog.amount("gone") or 0):
        what = f"What {text.counted(gone, 'region')} had not merged is lost: the folder is gone."
        todo = "Restore it, unless it was left out of a copy: memwal-ops verify URI"
        yield finding(WARNING, what, todo, _GONE, uri=table["uri"])
    left, since = int(backlog.amount("unflushed") or 0), backlog.amount("last_write")
    if since is None:
        return
    if left and since >= _LEFT_BEHIND:
        oldest = text.time_text(backlog.amount("unflushed_age") or 0)
        what = (
            f"{text.counted(left, 'log entry', 'log entries')} with acknowledged rows: no writer has flushed them, the "
            f"oldest for {oldest}, and nothing was written for {text.time_text(since)}. They are not in the base "
            "table, and no job can merge them."
        )
        todo = f"Start the writer again: it replays the log, and flushes. See the regions: {_inspect(table)}"
        yield finding(WARNING, what, todo, _UNFLUSHED)
    if expected is not None and since >= expected:
        what = f"No writer has written for {text.time_text(since)}; it is expected within {text.time_text(expected)}."
        yield finding(WARNING, what, f"See whether its writers run: {_inspect(table)}", _NO_WRITES)


def _inspect(table: Mapping[str, Any]) -> str:
    return f"memwal-ops inspect {shlex.quote(table['uri'])}"


@dataclass(slots=True)
class _Failure:
    """Jobs of a table that failed for one reason.

    Attributes:
        what: what is wrong with the first one, as a clause.
        error: the error of its last run; None: it is not recorded.
        undone: none of them failed, but they left a part undone.
        causes: what their errors are about, see :func:`_causes`.
    """

    jobs: list[str]
    level: int
    what: str
    error: Mapping[str, Any] | None
    undone: bool = False
    causes: set[str] = field(default_factory=set)

    def finding(self, table: Mapping[str, Any], file: str) -> Finding:
        ask = _ask_history(file, table, self.jobs[0], " --failed")
        jobs = [*dict.fromkeys(self.jobs)]
        what = self.what if len(jobs) == 1 else f"{_listed(jobs)} {'left a part undone' if self.undone else 'failed'}"
        if self.error is None:
            return finding(self.level, f"{what}.", ask, _JOB_FAILING, jobs)
        reason, message = self.error["reason"], self.error["message"]
        page = runbook(self.error["exit_code"] or 0, None if self.undone else reason) or _JOB_FAILING
        told = f"{what}: {reason}. {message}" if self.undone else f"{what}, last with {reason}: {message}"
        todo = _todo(self.error["remedy"] or ask)
        return finding(self.level, told, todo, page, jobs, uri=table["uri"])


def _failures(table: Mapping[str, Any], errors: RunErrors) -> list[_Failure]:
    """Return the failures of a table's jobs, and what they left undone; those of one cause are one."""
    failures: list[_Failure] = []
    for name, job in applicable_jobs(table).items():
        undone = job["last_outcome"] == "partial"
        if not undone and not job["consecutive_failures"]:
            continue
        error = errors.last_error(table["name"] if undone else table["uri"], name)
        if undone and error is None:
            continue
        level, what = partial_fault(name) if undone else next(job_findings(name, job))
        causes = {name} if error is None else _causes(error["message"], table["uri"]) or {error["reason"]}
        failure = next((one for one in failures if one.causes & causes), None)
        if failure is None:
            failures.append(failure := _Failure([], level, what, error, undone))
        failure.jobs.append(name)
        failure.causes |= causes
        failure.undone &= undone
        damaged = error is not None and error["reason"] == TableCorruptError.reason
        failure.level = CRITICAL if damaged else max(failure.level, level)
    return failures


# A file of a table, by its path there; and the index that a message begins with, or that nothing was built for.
_FILE = re.compile(r"(?<![\w/.])((?:[\w.=%-]+/)+)[\w.=%-]+\.\w+")
_INDEX = re.compile(r"(?:^Index|nothing for index) ([\w.-]+)")


def _causes(message: str, uri: str) -> set[str]:
    """Return what an error is about: the folder of the first file that it names, and an index; empty: neither."""
    named, index = _FILE.search(message.replace(f"{uri.rstrip('/')}/", "")), _INDEX.search(message)
    return ({named[1]} if named else set()) | ({f"index {index[1]}"} if index else set())


def _unreadable(table: Mapping[str, Any], error: Mapping[str, Any], failures: list[_Failure]) -> Finding:
    """Return the finding of a table that cannot be read; failures for the same reason are removed from the list."""
    partly = bool(figures.backlog_of(table).values)
    part, away = ("cannot be read as a whole", set()) if partly else ("cannot be read", _AWAY)
    same = [
        failure
        for failure in failures
        if (of := failure.error) and (of["reason"] in ({error["reason"]} | away) or of["message"] in error["message"])
    ]
    cause = error if not same or same[0].error is None else {**same[0].error, "message": error["message"]}
    failures[:] = [failure for failure in failures if failure not in same]
    jobs = [job for failure in same for job in failure.jobs]
    more = f" {_listed(jobs)} {'fails' if len(jobs) == 1 else 'fail'} for this reason." if jobs else ""
    page = runbook(cause["exit_code"] or 0, cause["reason"]) if same else None
    what = f"It {part}: {cause['reason']}. {cause['message'].rstrip('.')}.{more}"
    todo, page = _todo(cause["remedy"] or error["remedy"]), page or error["runbook"]
    return finding(state_level(table), what, todo, page, jobs[:1], uri=table["uri"])


def _late(table: Mapping[str, Any], names: Iterable[str], file: str) -> Iterator[Finding]:
    late: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        for level, what in job_findings(name, table["jobs"][name]):
            late.setdefault(level, []).append((name, what))
    for level, jobs in late.items():
        names = [name for name, _ in jobs]
        what = f"{jobs[0][1]}." if len(jobs) == 1 else f"{_listed(names)} have not succeeded for a long time."
        yield finding(level, what, _ask_history(file, table, names[0]), _JOB_LATE, names)


def _some(names: Sequence[str]) -> str:
    return _listed([*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _ask_history(file: str, table: Mapping[str, Any], job: str, more: str = "") -> str:
    which = f"--config {shlex.quote(file)} --table {shlex.quote(table['name'])} --job {job}{more}"
    return f"See how its runs ended: memwal-ops history {which}"


def _why_behind(table: Mapping[str, Any], file: str) -> tuple[str, str]:
    name, job = backlog_job(table)
    if job is None:
        by_hand = f"memwal-ops {name} {shlex.quote(table['uri'])}"
        if not file:
            return "", f"Let a supervisor run {name}, or run it by hand: {by_hand}"
        return f"No {name} is configured for it.", f"Enable it in {file}, or {name} by hand: {by_hand}"
    ran = _ask_history(file, table, name)
    reasons = (
        (job["state"] == "running", f"A {name} has been running for {text.time_text(job['running_seconds'])}.", ran),
        (
            job["lease"]["state"] != "free",
            f"Another holder has the lease of its {name}: {holder_text(job)}.",
            f"See whether it makes progress: memwal-ops lease list {shlex.quote(table['uri'])}",
        ),
        (job["consecutive_failures"], f"Its {name}s fail.", ran),
        (job["waiting_for"], f"A {name} is due, and {waits_text(job)}.", ran),
    )
    return next(
        ((why, todo) for holds, why, todo in reasons if holds), (f"The next {name} is due: {due_text(job)}.", ran)
    )


def level_of_finding(finding: Mapping[str, Any]) -> int:
    """Return the level of a finding as a number, by which findings are sorted."""
    return next(level for level, word in WORDS.items() if word == finding["level"])


def backlog_job(table: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the name of the job that processes the backlog, and its status; None if it is not configured."""
    known = figures.jobs_of("backlog")
    jobs = applicable_jobs(table)
    name = next((job for job in known if job in jobs), known[0])
    return name, jobs.get(name)


WAITS = {
    "worker": "a worker",
    "lease": "its lease",
    "window": "its window",
    "budget": "its budget",
    "over_budget": "the fleet's budget",
    "breaker": "its circuit breaker",
    "earlier": "another job's first run",
    "paused": "the end of its pause",
}


def waits_text(job: Mapping[str, Any]) -> str:
    """Return what a due job waits for; how long it has waited, where that is not as configured."""
    if job["waiting_for"] is None:
        return "about to start"
    waits = f"has waited {text.time_text(job['waiting_seconds'])}" if job["waiting_seconds"] else "waits"
    return f"{waits} for {WAITS.get(job['waiting_for'], job['waiting_for'])}"


def next_job(jobs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the job that has waited longest to be started, or else is due first; None: there is none."""
    due = [name for name, job in jobs.items() if job["waiting_seconds"] or job["next_due"]]
    return min(due, key=lambda name: (-jobs[name]["waiting_seconds"], jobs[name]["next_due"] or ""), default=None)


def due_text(job: Mapping[str, Any]) -> str:
    """Return when a job is due next, or what it waits for."""
    if job["waiting_seconds"]:
        return waits_text(job)
    if job["backoff_seconds"]:
        return f"in {text.time_text(job['backoff_seconds'])}"
    if job["next_due"] is None:
        return f"when {job['when']}" if job["when"] else "never"
    seconds = seconds_until(job["next_due"])
    return "now" if seconds <= 0 else f"in {text.time_text(seconds)}"


def holder_text(job: Mapping[str, Any]) -> str:
    """Return the holder of a job's lease, and until when it holds it."""
    lease = job["lease"]
    if lease["state"] == "free":
        return "free"
    return f"{lease['holder']['name']}, until {lease['expires'][11:19]} UTC"


def age_text(backlog: figures.Figures) -> str:
    """Return the age of the oldest pending part; empty if there is none."""
    age = backlog.amount("age")
    return text.time_text(age) if age else ""


def seconds_until(when: str) -> float:
    """Return the seconds until an ISO 8601 time; negative if it is past."""
    return (datetime.fromisoformat(when) - datetime.now(UTC)).total_seconds()
