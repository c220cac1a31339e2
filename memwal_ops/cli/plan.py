"""``memwal-ops plan``: what a supervisor would run, in which order, at what cost, and what stays undone and why."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from memwal_ops.cli.budget_now import budget_now
from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import Duration, json_output
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.cost import MAX_RUNS, describe_cost, spent_by
from memwal_ops.core.fleet_budget import NOTHING, FleetBudget
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.prices import money_text
from memwal_ops.errors import HistoryError, InvalidUsageError
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.observe.forecast import forecast
from memwal_ops.supervisor.observe.status import FleetStatus
from memwal_ops.supervisor.observe.status_document import budget_notes
from memwal_ops.supervisor.scheduling.discovery import discover
from memwal_ops.supervisor.scheduling.ranking import budget_status
from memwal_ops.supervisor.state.directory import history_path
from memwal_ops.supervisor.state.history import History
from memwal_ops.text import counted, grid, paragraph, size_text, time_text
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memwal_ops.core.cost import Spent
    from memwal_ops.supervisor.config.effective import Settings
    from memwal_ops.supervisor.observe.forecast import Forecast
    from memwal_ops.supervisor.observe.status_document import BudgetStatus
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

_SHOWN = 40
_READ = timedelta(seconds=60)


@click.command(short_help="Show what the service would run next, and at what cost.")
@config_option
@click.option("--for", "span", type=Duration(), default="24h", show_default=True, help="Of that time from now on.")
@click.option("--explain", metavar="TABLE", help="Only this table, by its name or URI: why each job runs, or does not.")
@json_output
def plan(file: str, span: timedelta, explain: str | None, as_json: bool) -> int:
    """Show what a supervisor of FILE would run, in which order, at what cost, and what stays undone and why.

    Reads the tables and the run history. Changes nothing, whether the service runs or not. It is by the state of the
    tables now: what writers add until then makes more runs. The order of those that are due at once, and the
    budget, are those of the service: docs/supervisor.md.

    \b
    Examples:
      memwal-ops plan --config memwal.yaml --for 1h
      memwal-ops plan --config memwal.yaml --explain orders

    Exit codes: 0; 2 there is no such table; 50 the configuration is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    discovered = discover(settings.tables)
    tables = [table for table in discovered.tables if explain in {None, table.name, table.uri}]
    if explain is not None and not tables:
        names = ", ".join(sorted(table.name for table in discovered.tables)) or "none"
        raise InvalidUsageError(f"There is no table {explain!r}.", remedy=redact(f"The tables of {file}: {names}."))
    now = datetime.now(UTC)
    found, budget = _forecast(settings, tables, now, now + span)
    document: dict[str, Any] = {
        "from": now.isoformat(timespec="seconds"),
        "until": (now + span).isoformat(timespec="seconds"),
        "currency": settings.config.prices.currency,
        "runs": [one.to_json() for one in found if one.at is not None],
        "undone": [one.to_json() for one in found if one.at is None],
        "budget": budget,
        "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in discovered.faults],
    }
    document["total"] = _total(document["runs"])
    text = _explained(document) if explain is not None else describe(document, span, now)
    echo_result(document, redact(text), as_json=as_json)
    return 0


def _forecast(
    settings: Settings, tables: Sequence[FoundTable], now: datetime, until: datetime
) -> tuple[list[Forecast], BudgetStatus | None]:
    """What runs, and the budget now."""
    prices = settings.config.prices
    fleet, history = FleetStatus(settings, None), None
    try:
        with suppress(HistoryError):
            history = History.open_to_read(history_path(settings.config))

        def past(table: str, uri: str, job: str) -> Sequence[Spent]:
            if history is None:
                return ()
            runs = history.spent(table, uri, job, MAX_RUNS)
            return spent_by(job, (PastRun(seconds, {}, used, achieved) for seconds, used, achieved in runs))

        config, by_store = settings.config.budget, prices.by_store()
        shadow = config is not None and config.shadow
        budget = budget_now(settings, history, now)
        shown = None if config is None else budget_status(config, budget, NOTHING, now, prices.currency)
        documents, currency = fleet.tables(tables, _READ), prices.currency
        limited = FleetBudget({}, 1.0) if shadow else budget
        found = forecast(
            tables, documents, fleet.applicable, past, limited, by_store, currency, now, until, by_age=shadow
        )
        return found, shown
    finally:
        fleet.close()
        if history is not None:
            history.close()


def _total(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of all runs whose cost is known; ``unknown``: of how many jobs it is not."""
    known = [(one["runs"], one["cost"]) for one in runs if one["cost"] is not None]
    names = ("bytes_read", "bytes_written", "cpu_seconds", "seconds", "money")
    sums = {name: round(sum(times * cost[name] for times, cost in known), 6) for name in names}
    requests = sum(times * sum(cost["requests"].values()) for times, cost in known)
    return {"runs": sum(one["runs"] for one in runs), "requests": requests, **sums, "unknown": len(runs) - len(known)}


def describe(document: Mapping[str, Any], span: timedelta, now: datetime) -> str:
    """The document as text for people."""
    runs, undone, total = document["runs"], document["undone"], document["total"]
    within = f"in the next {duration_text(span)}"
    if not runs:
        parts = [f"Nothing would run {within}."]
    else:
        head = f"{counted(total['runs'], 'run')} of {counted(len(runs), 'job')} {within}"
        parts = [paragraph(f"{head}: {_sum_text(total, document['currency'])}."), "", _table(runs, document, now)]
        parts += [f"and {len(runs) - _SHOWN:,} more (--json shows all)."] if len(runs) > _SHOWN else []
    if undone:
        parts += ["", f"{counted(len(undone), 'job')} would not run:"]
        parts += [
            paragraph(f"{one['table']} {one['job']}: {one['why']}.", indent="  ", hanging="  ")
            for one in undone[:_SHOWN]
        ]
        parts += [f"  and {len(undone) - _SHOWN:,} more (--json shows all)."] if len(undone) > _SHOWN else []
    parts += [paragraph(note) for note in budget_notes(document["budget"])]
    faults = document["discovery_faults"]
    parts += [paragraph(f"Not all tables are known: {one['pattern']}: {one['error']}") for one in faults]
    return "\n".join(parts)


def _sum_text(total: Mapping[str, Any], currency: str) -> str:
    unknown = counted(total["unknown"], "job")
    if total["runs"] and not total["seconds"]:
        return "at a cost that is not known, as the run history has no run of them"
    moved = f"{size_text(total['bytes_read'])} read, {size_text(total['bytes_written'])} written"
    money = money_text(total["money"], currency)
    text = f"about {money}, {total['requests']:,} requests, {moved}, {time_text(total['cpu_seconds'])} of processor"
    return text + (f"; the cost of {unknown} is not known" if total["unknown"] else "")


def _table(runs: Sequence[Mapping[str, Any]], document: Mapping[str, Any], now: datetime) -> str:
    rows = []
    for one in runs[:_SHOWN]:
        cost, wait = one["cost"], (datetime.fromisoformat(one["at"]) - now).total_seconds()
        money = "" if cost is None else money_text(cost["money"], document["currency"])
        requests = "" if cost is None else f"{sum(cost['requests'].values()):,}"
        seconds = "" if cost is None else time_text(max(1.0, cost["seconds"]))
        job = one["job"] if one["apply"] else f"{one['job']} (plan)"
        when = "now" if wait < 1 else f"in {time_text(wait)}"
        rows.append((when, one["table"], job, f"{one['runs']:,}", money, requests, seconds, one["why"]))
    headings = ("first", "table", "job", "runs", "money", "requests", "time", "why")
    return grid(headings, rows, words=("first", "table", "job", "why"))


def _explained(document: Mapping[str, Any]) -> str:
    """Why each job of one table runs, or does not, and what that is worth."""
    parts = []
    for one in [*document["runs"], *document["undone"]]:
        worth = one["worth"]
        when = "does not run" if "at" not in one else f"runs at {one['at'][:16].replace('T', ' ')} UTC"
        parts.append(paragraph(f"{one['table']} {one['job']} {when}: {one['why']}.", hanging="  "))
        if one.get("cost"):
            parts.append(paragraph(f"A run costs {describe_cost(one['cost'])}.", indent="  ", hanging="  "))
        elif "at" in one:
            parts.append("  What a run costs is not known: the run history has none.")
        if worth["saves_daily"]:
            money = money_text(worth["saves_daily"])
            saves = f"about {money} a day by list prices of S3, if the table is read 100 times a day"
            weight = f"by weight {worth['weight']:g}"
            costs = f"{worth['ratio']:,.2f} times what it costs, {weight}"
            if "share" in worth:
                costs = f"for {worth['share']:.2%} of the fleet's budget, {weight}"
            parts.append(paragraph(f"It saves {saves}: {costs}.", indent="  ", hanging="  "))
        if worth["missed"]:
            parts.append(f"  Objective missed: {worth['missed']['objective']}.")
    return "\n".join(parts)
