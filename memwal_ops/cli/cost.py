"""``memwal-ops cost``: what maintenance cost, in requests, bytes, processor time and money, and what it achieved."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import click

from memwal_ops.cli.budget_now import budget_now
from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import Duration, json_output
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.fleet_budget import NOTHING
from memwal_ops.core.prices import money_text
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.observe.spending import BY, By, ledger_document
from memwal_ops.supervisor.observe.status_document import budget_notes
from memwal_ops.supervisor.scheduling.ranking import budget_status
from memwal_ops.supervisor.state.directory import history_path
from memwal_ops.supervisor.state.history import History
from memwal_ops.text import counted, grid, paragraph, size_text, time_text
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 40


@click.command(short_help="Show what maintenance cost, and what it achieved.")
@config_option
@click.option("--by", type=click.Choice(BY), default="table", show_default=True, help="One line for each of these.")
@click.option("--since", type=Duration(), default="30d", show_default=True, help="Only runs of that long ago, or less.")
@json_output
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
    history = History.open_to_read(history_path(config))
    try:
        runs = history.ledger(begin)
        prices, polls = config.prices, history.polls(begin)
        document = ledger_document(runs, prices.by_store(), prices.currency, cast("By", by), begin, polls)
        now, budget = datetime.now(UTC), None
        if config.budget is not None:
            budget = budget_status(config.budget, budget_now(settings, history, now), NOTHING, now, prices.currency)
    finally:
        history.close()
    document["fleet"] = None if config.fleet is None else config.fleet.name
    document["budget"] = budget
    document["history_keeps"] = duration_text(config.history.keep)
    echo_result(document, describe(document, since, config.history.keep), as_json=as_json)
    return 0


def describe(document: Mapping[str, Any], since: timedelta, keep: timedelta) -> str:
    """The document as text for people."""
    total, currency = document["total"], document["currency"]
    span = duration_text(since)
    whole = [*_part(document.get("fleet")), *map(paragraph, budget_notes(document.get("budget")))]
    if not total["runs"] and not total["polls"]:
        return "\n".join([f"No run ended in the last {span}.", *whole])
    parts = [paragraph(f"{counted(total['runs'], 'run')} in the last {span}: {_spent(total, currency)}.")]
    if achieved := _achieved(total, currency):
        parts.append(paragraph(f"They {achieved}."))
    parts += ["", _table(document)]
    hidden = len(document["groups"]) - _SHOWN
    parts += [f"and {hidden:,} more (--json shows all)."] if hidden > 0 else []
    parts += ["", *(paragraph(note) for note in _notes(document, since, keep)), *whole]
    return "\n".join(parts).rstrip()


def _part(member: str | None) -> list[str]:
    """What the history of one member of a fleet does not have."""
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


def _table(document: Mapping[str, Any]) -> str:
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
