"""The status of a service with many tables, some in trouble, and its run history, without a service."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from memwal_ops.core.table_history import IndexRecord, LogRecord, RevisionRecord, StorageRecord, TableHistory
from memwal_ops.supervisor.config.model import PricesConfig
from memwal_ops.supervisor.observe.pages import Pages
from memwal_ops.supervisor.observe.spending import Spending

JOBS = ("merge", "catchup", "compact", "snapshot", "expire", "gc")
BLOCKED = {
    "region_id": "8b064fec-aec3-4903-a579-f8c5e0d0373c",
    "generation": 7,
    "reason": "generation_missing",
    "detail": "Generation 7 is listed, and its directory does not exist.",
}


def _ago(**span: float) -> str:
    return (datetime.now(UTC) - timedelta(**span)).isoformat(timespec="milliseconds")


def job(**changes: Any) -> dict[str, Any]:
    free = {"state": "free", "holder": None, "token": None, "expires": None, "elsewhere_seconds": 0.0}
    return {
        "state": "idle", "waiting_for": None, "why": "schedule", "apply": True, "schedule": "every 5m",
        "schedule_seconds": 300.0, "next_due": _ago(minutes=-2), "when": None, "last_started": _ago(minutes=3),
        "last_finished": _ago(minutes=3), "last_success": _ago(minutes=3), "last_outcome": "succeeded",
        "seconds_since_success": 180.0, "consecutive_failures": 0, "waiting_seconds": 0.0, "running_seconds": 0.0,
        "asked": None, "progress": None,
        "backoff_seconds": 0.0, "applies": True, "pid": None, "lease": free, **changes,
    }  # fmt: skip


def table(name: str, *, waiting: float = 2, blocked: float = 0, **changes: Any) -> dict[str, Any]:
    backlog = {
        "generations": waiting, "rows": 1000.0 * waiting, "bytes": 2e6 * waiting, "oldest_age": 40.0 * waiting,
        "regions": min(waiting, 2.0), "blocked_regions": blocked, "fragments": 40.0, "small_fragments": 12.0,
        "table_rows": 2.6e6, "table_bytes": 8.4e8, "versions": 41.0, "indexes": 2.0, "uncovered_rows": 1000.0 * waiting,
    }  # fmt: skip
    return {
        "name": name, "uri": f"s3://lake/{name}.lance", "format": "lance", "version": 41,
        "state": "read", "backlog": backlog, "looked_at": _ago(seconds=4),
        "seconds_since_look": 4.0, "look_error": None, "clock_skew_seconds": 0.0, "answers": [],
        "jobs": {name: job() for name in JOBS}, **changes,
    }  # fmt: skip


def fleet(count: int) -> list[dict[str, Any]]:
    """Tables of which one is blocked, one behind, one failing, one is merged elsewhere, and the others are well."""
    tables = [table(f"orders-{number:03}", waiting=number % 5) for number in range(count)]
    tables[3] = table("payments", waiting=9, blocked=1)
    tables[5] = table("clicks", waiting=140)
    failing = job(consecutive_failures=4, last_outcome="failed", last_success=_ago(hours=9))
    tables[7] = table("sessions", jobs={**tables[7]["jobs"], "gc": failing})
    holder = {"instance": "b", "name": "ops@vm-2 pid 71"}
    lease = {"state": "elsewhere", "holder": holder, "token": 3, "expires": _ago(minutes=-4), "elsewhere_seconds": 9.0}
    tables[9]["jobs"]["merge"] = job(lease=lease)
    return tables


def run(**changes: Any) -> dict[str, Any]:
    return {
        "id": 1, "table": "payments", "uri": "s3://lake/payments.lance", "job": "merge", "supervisor": "ops@vm-1",
        "why": "when: generations >= 8", "started": _ago(minutes=3), "finished": _ago(minutes=3), "seconds": 1.52,
        "outcome": "succeeded", "exit_code": 0, "decision": "merged", "error": None, "plan": {},
        "figures": {"rows_merged": 5200, "bytes_merged": 9_400_000}, "versions": [40, 41],
        "phases": {"open": 0.2, "collapse": 0.31, "locate": 0.12, "rewrite": 0.71, "commit": 0.18},
        "report": {"decision": "merged"}, **changes,
    }  # fmt: skip


_REVISIONS = tuple(
    RevisionRecord(
        41 - at, datetime.now(UTC) - timedelta(minutes=5 * at), "memwal-ops merge" if at % 3 else "lance 14.0.2",
        "update" if at % 3 else "append", 90_000 - 800 * at, 9_000_000 - 90_000 * at, at % 3, 2600 * (at % 3),
        4_700_000 * (at % 3),
    )
    for at in range(12)
)  # fmt: skip
HISTORY = TableHistory(
    _REVISIONS,
    (
        LogRecord("8b064fec/8", 2600, 4_700_000, datetime.now(UTC), None, None, None, "waiting"),
        LogRecord("8b064fec/6", 2600, 4_700_000, datetime.now(UTC), datetime.now(UTC), 41, None, "merged"),
    ),
    (IndexRecord("id_idx", "BTree", 5, 7, 12_000),),
    (StorageRecord("data files", 7, 9_000_000, "version 41, the newest"),),
).to_json()


class FakeHistory:
    """Answers as the run history does, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def runs(
        self, *, table: str, job: str | None = None, failed: bool = False, limit: int = 50
    ) -> list[dict[str, Any]]:
        self.asked += 1
        table = table.rsplit("/", 1)[-1].removesuffix(".lance")  # by name or URI
        if table == "payments":
            left = run(outcome="partial", exit_code=10, decision="blocked", report={"blocked": [BLOCKED]})
            return [left, *(run(started=_ago(minutes=8 * ago)) for ago in range(1, 6))][:limit]
        if failed and table == "sessions":
            error = {
                "reason": "storage_credentials",
                "message": "The store refused to delete: AccessDenied.",
                "remedy": "Give the role s3:DeleteObject on the prefix.",
            }
            return [run(table=table, job="gc", outcome="failed", exit_code=21, error=error)]
        return [] if failed else [run(table=table)]


def status(tables: list[dict[str, Any]], **service: Any) -> dict[str, Any]:
    config = {"file": "/etc/memwal-ops/config.yaml", "loaded": _ago(hours=2), "error": None}
    return {
        "service": {
            "version": "0", "pid": 1, "instance": "a", "holder": "ops@vm-1 pid 12", "started": _ago(hours=5),
            "ready": True, "stopping": False, "leases": True, "state_dir": "/state", "state_error": None,
            "config": config, "budget": None, "discovery_faults": [], "fleet": None, "events": None, **service,
        },
        "pools": {},
        "tables": tables,
    }  # fmt: skip


class FakeTables:
    """The tables of a status document; ``later``: what expire reported; ``costs``: of the last week."""

    def __init__(
        self,
        document: Mapping[str, Any],
        later: Mapping[str, Mapping[str, Any]] | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        self._document = document
        self._later, self._costs = later or {}, costs or {}
        self.asked = 0

    def stamps(self, names: Iterable[str] | None = None) -> Mapping[str, object]:
        tables = self._document["tables"]
        wanted = None if names is None else {*names}
        return {one["name"]: json.dumps(one["jobs"]) for one in tables if wanted is None or one["name"] in wanted}

    def status(self, names: Iterable[str]) -> list[Any]:
        known = {one["name"]: one for one in self._document["tables"]}
        found = [known[name] for name in names if name in known]
        self.asked += len(found)
        return found

    def deletable_later(self) -> Mapping[str, Mapping[str, Any]]:
        return self._later

    def costs(self) -> Mapping[str, float]:
        return self._costs

    def read_costs(self) -> None:
        pass


def samples_of(name: str, since: datetime) -> list[tuple[int, dict[str, float]]]:
    """Figures of every table over the last 30 days, hourly, and over the last day every ten minutes."""
    now = int(datetime.now(UTC).timestamp())
    times = [*range(now - 30 * 86_400, now - 86_400, 3600), *range(now - 86_400, now, 600)]
    top = 140 if name == "clicks" else 9
    return [
        (
            at,
            {
                "backlog": float(at // 600 % (top + 1)), "age": 40.0 * (at // 600 % (top + 1)),
                "table_rows": 2.6e6 - 0.5 * (now - at), "table_bytes": 8.4e8 - 160.0 * (now - at),
                "parts": float(30 + at // 600 % 12), "versions": float(20 + at // 3600 % 24), "uncovered": 0.0,
            },
        )
        for at in times
        if at >= since.timestamp()
    ]  # fmt: skip


class FakeLedger:
    """Two runs an hour on each table over the last 30 days."""

    def first_run(self, since: datetime) -> int:
        return 0

    def used_by(self, after: int, running: Any, limit: int) -> list[Any]:
        return []

    def ledger(self, since: datetime, table: str | None = None) -> list[dict[str, Any]]:
        now = datetime.now(UTC).timestamp()
        return [_ledger_run(table, now - 1800.0 * at, at) for at in range(1, int((now - since.timestamp()) / 1800))]


def _ledger_run(table: str | None, ended: float, at: int) -> dict[str, Any]:
    requests = {"get": 900 + 40 * (at % 48), "put": 60, "list": 3, "delete": 0}
    used = {
        "store": "s3", "requests": requests, "bytes_read": 9e7, "bytes_written": 2e7, "cpu_seconds": 1.5,
        "peak_memory": 3e8,
    }  # fmt: skip
    achieved = {"rows_merged": 2600, "bytes_freed": 7 << 20}
    job = "compact" if at % 6 == 0 else "merge"
    return {
        "table": table, "job": job, "started": ended - 4, "finished": ended, "outcome": "succeeded", "plan": {},
        "used": used, "achieved": achieved,
    }  # fmt: skip


def pages_of(document: Mapping[str, Any], run_history: FakeHistory | None = None, **changes: Any) -> Pages:
    """The pages of a service with that status."""
    asked = run_history or FakeHistory()
    given: dict[str, Any] = {
        "service": lambda: document["service"], "tables": FakeTables(document), "runs": asked.runs,
        "run": lambda number: run(id=number) if number < 100 else None, "samples": samples_of,
        "spending": Spending(FakeLedger(), PricesConfig), "faults": lambda: (),
        "history": lambda _: HISTORY,
        "format_of": lambda _: "lance", "file": "/etc/memwal-ops/config.yaml", **changes,
    }  # fmt: skip
    return Pages(**given)
