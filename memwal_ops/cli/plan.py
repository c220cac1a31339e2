"""``memwal-ops plan`` and ``cost``: what a supervisor would run at what cost, and what maintenance cost so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import click

from memwal_ops import errors
from memwal_ops.cli import options
from memwal_ops.cli.printing import echo_result
from memwal_ops.cli.status import running_service
from memwal_ops.core import fleet_budget
from memwal_ops.core.cost import describe_cost, money_text
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.membership.reading import read_others
from memwal_ops.supervisor.observe import spending
from memwal_ops.supervisor.observe.status import FleetStatus
from memwal_ops.supervisor.observe.status_document import budget_notes
from memwal_ops.supervisor.scheduling.discovery import FoundTable, discover
from memwal_ops.supervisor.scheduling.forecast import Forecast, forecast
from memwal_ops.supervisor.scheduling.ranking import budget_document, new_budget
from memwal_ops.supervisor.state import directory
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.outcomes import charged_runs
from memwal_ops.supervisor.state.pauses import Pauses
from memwal_ops.text import counted, duration_text, grid, paragraph, size_text, time_text

_SHOWN = 40


@click.command(short_help="Show what maintenance cost, and what it achieved.")
@options.config_option
@click.option(
    "--by", type=click.Choice(spending.BY), default="table", show_default=True, help="One line for each of these."
)
@click.option(
    "--since", type=options.Duration(), default="30d", show_default=True, help="Only runs of that long ago, or less."
)
@options.json_output
def cost(file: str, by: str, since: timedelta, as_json: bool) -> int:
    """Show what the runs of a service cost, the dearest first: requests, bytes, processor time, money; and what they
    achieved. Reads the run history, whether the service runs or not. Runs by hand on this machine are in it, too.

    Money is by list prices, unless the configuration has prices: docs/configuration.md. Polls are in it by whole days.
    What is measured and what is estimated: docs/operations.md.

    \b
    Examples:
      memwal-ops cost --config memwal.yaml --since 7d
      memwal-ops cost --config memwal.yaml --by day --json

    Exit codes: 0; 50 the configuration is invalid; 56 there is no history, or it cannot be read.
    """  # noqa: D205, D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    config = settings.config
    begin = datetime.now(UTC) - since
    history = History.open_to_read(directory.history_path(config))
    try:
        runs = history.ledger(begin)
        prices, polls = config.prices, history.polls(begin)
        document = spending.ledger_document(
            runs, prices.by_store(), prices.currency, cast("spending.By", by), begin, polls
        )
        now, budget = datetime.now(UTC), None
        if config.budget is not None:
            budget = budget_document(
                config.budget, budget_now(settings, history, now), fleet_budget.NOTHING, now, prices.currency
            )
    finally:
        history.close()
    document["fleet"] = None if config.fleet is None else config.fleet.name
    document["budget"] = budget
    document["history_keeps"] = duration_text(config.history.keep)
    echo_result(document, describe_costs(document, since, config.history.keep), as_json=as_json)
    return 0


def describe_costs(document: Mapping[str, Any], since: timedelta, keep: timedelta) -> str:
    """The document as text for people."""
    total, currency = document["total"], document["currency"]
    span = duration_text(since)
    whole = [*_part(document.get("fleet")), *map(paragraph, budget_notes(document.get("budget")))]
    if not total["runs"] and not total["polls"]:
        return "\n".join([f"No run ended in the last {span}.", *whole])
    parts = [paragraph(f"{counted(total['runs'], 'run')} in the last {span}: {_spent(total, currency)}.")]
    if achieved := _achieved(total, currency):
        parts.append(paragraph(f"They {achieved}."))
    parts += ["", _table_of_costs(document)]
    hidden = len(document["groups"]) - _SHOWN
    parts += [f"and {hidden:,} more (--json shows all)."] if hidden > 0 else []
    parts += ["", *(paragraph(note) for note in _notes(document, since, keep)), *whole]
    return "\n".join(parts).rstrip()


def _part(member: str | None) -> list[str]:
    if member is None:
        return []
    text = f"These are the runs of the member {member} alone: each keeps the history of its own. For all, run it where"
    return [paragraph(f"{text} each of them runs, or sum the metric memwal_ops_cost_total of all.")]


def _spent(sums: Mapping[str, Any], currency: str) -> str:
    requests = f"{sum(sums['requests'].values()):,} requests"
    moved = f"{size_text(sums['bytes_read'])} read, {size_text(sums['bytes_written'])} written"
    return f"{money_text(sums['money'], currency)} ({requests}, {moved}, {time_text(sums['cpu_seconds'])} of processor)"


def _achieved(sums: Mapping[str, Any], currency: str) -> str:
    done = sums["achieved"]
    texts = []
    for name, text in (
        ("rows_merged", "merged {:,} rows"),
        ("rows_indexed", "indexed {:,} rows"),
        ("fragments", "left {:,} fragments fewer"),
        ("versions", "deleted {:,} versions"),
    ):
        texts += [text.format(done[name])] if done[name] > 0 else []
    if done["bytes_freed"]:
        saves = f", which saves {money_text(sums['saves_monthly'], currency)} a month" if sums["saves_monthly"] else ""
        texts.append(f"freed {size_text(done['bytes_freed'])}{saves}")
    return ", ".join(texts)


def _table_of_costs(document: Mapping[str, Any]) -> str:
    by, currency = document["by"], document["currency"]
    rows = [
        (
            str(one[by]),
            f"{one['runs']:,}",
            money_text(one["money"], currency),
            f"{sum(one['requests'].values()):,}",
            size_text(one["bytes_read"]),
            size_text(one["bytes_written"]),
            time_text(one["cpu_seconds"]),
            f"{one['achieved']['rows_merged'] + one['achieved']['rows_indexed']:,}",
            f"{one['achieved']['fragments']:,}",
            size_text(one["achieved"]["bytes_freed"]),
        )
        for one in document["groups"][:_SHOWN]
    ]
    headings = (by, "runs", "money", "requests", "read", "written", "processor", "rows", "fragments fewer", "freed")
    return grid(headings, rows, words=(by,))


def _notes(document: Mapping[str, Any], since: timedelta, keep: timedelta) -> list[str]:
    total, estimates, polls, shadow = (document[name] for name in ("total", "estimates", "polls", "shadow"))
    notes, currency = [], document["currency"]
    if polls["polls"]:
        money = money_text(polls["money"], currency)
        notes.append(f"Of that, {counted(polls['polls'], 'poll')}: {money}, {polls['requests']:,} requests.")
    if shadow["held"] or shadow["others"]:
        held = f"held back {counted(shadow['held'], 'run')} ({money_text(shadow['money'], currency)})"
        notes.append(
            f"The budget, which is a shadow, would have {held}, and begun another in place of {shadow['others']:,}."
        )
    if total["unmeasured"]:
        runs = counted(total["unmeasured"], "run")
        notes.append(f"{runs} recorded nothing: killed, not started, or of an earlier release.")
    if estimates["runs"]:
        error = f"{estimates['error']:.0%}"
        notes.append(f"The estimates of {counted(estimates['runs'], 'run')} were wrong by {error} in the median.")
    if since > keep:
        notes.append(f"The history keeps runs for {duration_text(keep)} (history.keep).")
    listed = sorted({one["date"] for one in document["prices"].values() if one["date"]})
    if listed:
        notes.append(f"Prices are list prices of {' and '.join(listed)}, as far as the configuration has none.")
    return notes


def budget_now(settings: Settings, history: History | None, now: datetime) -> fleet_budget.FleetBudget:
    """The budget, with what the history and the other members of the fleet have used of it."""
    config, fleet = settings.config.budget, settings.config.fleet
    runs = () if config is None or history is None else history.ledger(now - fleet_budget.CHARGED * config.per)
    budget = new_budget(settings, charged_runs(runs, settings.config.prices.by_store()))
    if config is not None and fleet is not None:
        at, folder = now.timestamp(), directory.state_dir(settings.config)
        try:
            others = read_others(fleet, directory.instance_of(folder), at, budget.per)
        except errors.MemwalOpsError:
            others = fleet_budget.Others(living=max(1, directory.members_of(folder) - 1), until=0.0)
        budget.meet(others, at)
    return budget


_READ = timedelta(seconds=60)


@click.command(short_help="Show what the service would run next, and at what cost.")
@options.config_option
@click.option(
    "--for", "span", type=options.Duration(), default="24h", show_default=True, help="Of that time from now on."
)
@click.option("--explain", metavar="TABLE", help="Only this table, by its name or URI: why each job runs, or does not.")
@options.json_output
def plan(file: str, span: timedelta, explain: str | None, as_json: bool) -> int:
    """Show what a supervisor of FILE would run, in which order, at what cost, and what stays undone and why.

    It is the scheduler of the service, run on a virtual clock: from what a service that runs knows, else from the
    tables and the state folder. Changes nothing. What writers add makes more runs. A run is taken to end as the last
    one of its job did, and to cost as much as the past ones: docs/operations.md.

    \b
    Examples:
      memwal-ops plan --config memwal.yaml --for 1h
      memwal-ops plan --config memwal.yaml --explain orders

    Exit codes: 0; 2 there is no such table; 50 the configuration is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    discovered = discover(settings.tables)
    if explain is not None and not any(explain in {table.name, table.uri} for table in discovered.tables):
        names = ", ".join(sorted(table.name for table in discovered.tables)) or "none"
        raise errors.InvalidUsageError(
            f"There is no table {explain!r}.", remedy=redact(f"The tables of {file}: {names}.")
        )
    now = datetime.now(UTC)
    planned, service = _forecast(settings, discovered.tables, now, span)
    shown = {None, *(table.name for table in discovered.tables if explain in {table.name, table.uri})}
    jobs = [job for job in planned.jobs if explain is None or job.table in shown]
    document: dict[str, Any] = {
        "from": now.isoformat(timespec="seconds"),
        "until": (now + span).isoformat(timespec="seconds"),
        "currency": settings.config.prices.currency,
        "service": service,
        "runs": [job.to_json() for job in jobs if job.at is not None],
        "undone": [job.to_json() for job in jobs if job.at is None],
        "budget": planned.budget,
        "discovery_faults": [{"pattern": fault.pattern, "error": fault.why} for fault in discovered.faults],
    }
    document["total"] = _total(document["runs"])
    text = _explained(document) if explain is not None else describe(document, span, now)
    echo_result(document, redact(text), as_json=as_json)
    return 0


def _forecast(
    settings: Settings, tables: Sequence[FoundTable], now: datetime, span: timedelta
) -> tuple[Forecast, bool]:
    """What is forecast, and whether a service that runs was asked for what it knows."""
    status, _ = running_service(settings)
    fleet, history = FleetStatus(settings, status), None
    try:
        with suppress(errors.HistoryError):
            history = History.open_to_read(directory.history_path(settings.config))
        known = {} if status is None else {table["name"]: table for table in status["tables"]}
        if status is not None and settings.config.fleet is not None:
            tables = [table for table in tables if table.name in known]  # the others are those of other members
        documents = [known[table.name] for table in tables if _is_read(known.get(table.name))]
        unread = [table for table in tables if not _is_read(known.get(table.name))]
        documents += fleet.tables(unread, _READ)
        pauses = Pauses(directory.state_dir(settings.config)) if status is None else Pauses.of_status(status)
        pools = {} if status is None else status["pools"]
        owed = {name: pool.get("credit", 0.0) for name, pool in pools.items()}
        others = None if settings.config.budget is None else budget_now(settings, None, now).others
        return forecast(settings, tables, documents, pauses, history, now, span, others=others, owed=owed), bool(status)
    finally:
        fleet.close()
        if history is not None:
            history.close()


def _is_read(table: Mapping[str, Any] | None) -> bool:
    """Whether the service has read a table, or could not; a service of an earlier release tells too little."""
    return table is not None and "scheduling" in table and (table["looked_at"] or table["look_error"]) is not None


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
        costs = _sum_text(total, document["currency"], all_unknown=total["unknown"] == len(runs))
        head = f"{counted(total['runs'], 'run')} of {counted(len(runs), 'job')} {within}"
        parts = [paragraph(f"{head}: {costs}."), "", _table(runs, document, now)]
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


def _sum_text(total: Mapping[str, Any], currency: str, *, all_unknown: bool) -> str:
    unknown = counted(total["unknown"], "job")
    if total["runs"] and all_unknown:
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
        if worth["saves_daily"] is None:
            parts.append("  What a run saves is not known: the last look at the table could not count it.")
        elif worth["saves_daily"]:
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
