"""``memwal-ops lease``: who does which job on a table, and how to take it away from them."""

from __future__ import annotations

import getpass
import json
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.text import grid
from memwal_ops.core.leases import break_lease, list_leases
from memwal_ops.core.table import open_table
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.clock import store_clock

if TYPE_CHECKING:
    from memwal_ops.core.leases import Lease


@click.group(short_help="Show or break the leases of supervisors on a table.")
def lease() -> None:
    """Leases keep two supervisors from doing the same job on the same table at once. They save work; no
    correctness rests on them.
    """  # noqa: D205 - click makes one paragraph of it


@lease.command("list", short_help="Show who holds which lease of a table.")
@click.argument("uri")
@click.option("--job", help="Only this job's.")
@storage_options
@json_output
def show(uri: str, job: str | None, storage_options: dict[str, str], as_json: bool) -> int:
    """Show the leases of the table at URI: holder, token, when taken, when it ends.

    The state is held, expired (its holder did not renew it, and anybody may take it), released or broken.

    Exit codes: 0; any other code: see the README.
    """
    store = open_table(uri, storage_options).store
    found = [one for one in list_leases(store) if job is None or one.job == job]
    now = store_clock(store) if found else datetime.now(UTC)
    if as_json:
        click.echo(json.dumps({"leases": [{**one.to_json(), "state": state(one, now)} for one in found]}, indent=2))
    else:
        click.echo(describe(found, now))
    return 0


@lease.command("break", short_help="End a lease that somebody else holds.")
@click.argument("uri")
@click.option("--job", help="Only this job's.  [default: all that are held]")
@storage_options
@json_output
def break_(uri: str, job: str | None, storage_options: dict[str, str], as_json: bool) -> int:
    """End the leases of the table at URI at once, whoever holds them.

    Whoever works under one finds out before the next commit, or at the next renewal, and stops; what landed
    stays. There is no need to break the lease of a supervisor that died: it ends by itself.

    Exit codes: 0; 2 nobody holds such a lease; any other code: see the README.
    """
    store = open_table(uri, storage_options).store
    names = [job] if job is not None else [one.job for one in list_leases(store) if one.ended is None]
    if not names:
        raise InvalidUsageError("Nobody holds a lease of this table.", remedy="memwal-ops lease list URI shows all.")
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    broken = [break_lease(store, name, by) for name in names]
    if as_json:
        click.echo(json.dumps({"leases": [{**one.to_json(), "state": "broken"} for one in broken]}, indent=2))
    else:
        click.echo("\n".join(f"broken: the lease of {one.job}, which {one.holder.name} held." for one in broken))
    return 0


def state(one: Lease, now: datetime) -> str:
    """One word: held, expired, released or broken."""
    if one.ended is not None:
        return one.ended.split(" ", 1)[0]
    return "held" if one.stands(now) else "expired"


def describe(found: list[Lease], now: datetime) -> str:
    """The list for a person."""
    if not found:
        return "Nobody ever took a lease of this table."
    rows = [
        (
            one.job,
            state(one, now),
            one.holder.name,
            str(one.token),
            f"{one.acquired:%Y-%m-%d %H:%M:%S}",
            f"{one.expires:%Y-%m-%d %H:%M:%S}" if one.ended is None else "",
        )
        for one in found
    ]
    headings = ("job", "state", "holder", "token", "acquired (UTC)", "expires (UTC)")
    return grid(headings, rows, words=("job", "state", "holder", "acquired (UTC)", "expires (UTC)"))
