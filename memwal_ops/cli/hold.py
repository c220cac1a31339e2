"""``memwal-ops hold``: keep a base version for a long-running reader."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import click

from memwal_ops.cli.options import TABLE, Duration, IntRange, branch_option, json_output, storage_options
from memwal_ops.cli.printing import echo_result
from memwal_ops.cli.process import open_table
from memwal_ops.core.holds import Hold, holds, release_hold, take_hold
from memwal_ops.errors import InvalidUsageError, StorageError
from memwal_ops.storage.api import Store
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import duration_text, grid


@click.command(short_help="Keep a base version for a long-running reader.")
@click.argument("uri", type=TABLE)
@click.option("--version", "version", type=IntRange(min=1), help="The version to keep.  [default: the newest]")
@click.option(
    "--ttl",
    type=Duration(),
    default=duration_text(timedelta(hours=2)),
    show_default=True,
    help="How long to keep it, from now on, for example 90m or 3d; then the hold ends by itself.",
)
@click.option("--note", default="", help="The reason, which --list shows.")
@click.option("--list", "show", is_flag=True, help="Show all holds instead.")
@click.option("--release", type=IntRange(min=1), metavar="HOLD", help="End a hold before its time instead.")
@branch_option
@storage_options
@json_output
def hold(
    uri: str,
    version: int | None,
    ttl: timedelta,
    note: str,
    show: bool,
    release: int | None,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Keep a base version of the table at URI, and all generations that it needs, until the hold ends by itself.

    expire and gc respect holds. pylance's own cleanup_old_versions does not: to keep a version from it, tag the
    version.

    \b
    Examples:
      memwal-ops hold s3://bucket/orders.lance --ttl 6h --note "training run"
      memwal-ops hold orders.lance --release 1

    Exit codes: 0; 2 there is no such hold; 26 the version does not exist; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    if show and release is not None:
        raise InvalidUsageError("--list and --release are two different commands; give one of them.")
    table = open_table(uri, storage_options)
    if show:
        known = holds(table)
        now, clock = _now(table.store, known)
        document = {"holds": [_entry(hold, now) for hold in known]} | ({"clock": "local"} if clock else {})
        echo_result(document, f"{describe(known, now)}{clock}", as_json=as_json)
        return 0
    if release is not None:
        done = release_hold(table, release)
        echo_result(_entry(done, done.until), f"released: hold {done.number}.", as_json=as_json)
        return 0
    probe_conditional_writes(table.store)
    taken = take_hold(table, version or table.revision, ttl, note=note)
    message = f"held: version {taken.versions[0]} until {taken.until:%Y-%m-%d %H:%M:%S} UTC, as hold {taken.number}."
    echo_result(_entry(taken, taken.until - ttl), message, as_json=as_json)
    return 0


def _now(store: Store, found: Sequence[Hold]) -> tuple[datetime, str]:
    """The time by which jobs judge holds, and a note if the store could not be asked for its own."""
    if not all(hold.released for hold in found):
        try:
            return store_time(store), ""
        except StorageError:
            return datetime.now(UTC), "\nThe states are by this machine's clock: the store cannot be written."
    return datetime.now(UTC), ""


def _state(one: Hold, now: datetime) -> str:
    if one.released:
        return "released"
    return "standing" if one.in_force(now) else "ended"


def _entry(one: Hold, now: datetime) -> dict[str, object]:
    return {**one.to_json(), "state": _state(one, now)}


def describe(found: Sequence[Hold], now: datetime) -> str:
    """Return the list as human-readable text; ``now``: by which a hold stands or has ended."""
    if not found:
        return "There is no hold."
    rows = [
        (
            str(hold.number),
            str(hold.versions[0]),
            _state(hold, now),
            f"{hold.until:%Y-%m-%d %H:%M:%S}",
            hold.by,
            hold.note,
        )
        for hold in found
    ]
    return grid(
        ("hold", "version", "state", "until (UTC)", "by", "note"), rows, words=("state", "until (UTC)", "by", "note")
    )
