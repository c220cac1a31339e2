"""``memwal-ops lease``: show the leases of a table, and break them."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from memwal_ops.cli.options import TABLE, branch_option, json_output, storage_options
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.holds import user_at_host
from memwal_ops.core.leases import Lease, break_lease, list_leases
from memwal_ops.core.registry import locate
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.clock import store_clock
from memwal_ops.text import grid, printable


@click.group(short_help="Show or break the leases of supervisors on a table.")
def lease() -> None:
    """Leases keep two supervisors from doing the same job on the same table at once. They save work;
    correctness does not depend on them.
    """  # noqa: D205 - click makes one paragraph of it


@lease.command("list", short_help="Show the leases of a table and their holders.")
@click.argument("uri", type=TABLE)
@click.option("--job", help="Only this job's.")
@branch_option
@storage_options
@json_output
def show(uri: str, job: str | None, storage_options: dict[str, str], as_json: bool) -> int:
    """Show the leases of the table at URI: holder, token, when acquired, when it expires.

    The state is held, expired (not renewed, so any supervisor may acquire it), released or broken.

    \b
    Examples:
      memwal-ops lease list s3://bucket/orders.lance
      memwal-ops lease list orders.lance --job merge --json

    Exit codes: 0; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    store = locate(uri, storage_options)[2]
    leases = [lease for lease in list_leases(store) if job is None or lease.job == job]
    now = store_clock(store) if leases else datetime.now(UTC)
    document = {"leases": [{**lease.to_json(), "state": state(lease, now)} for lease in leases]}
    echo_result(document, describe(leases, now), as_json=as_json)
    return 0


@lease.command("break", short_help="End a lease that another supervisor holds.")
@click.argument("uri", type=TABLE)
@click.option("--job", help="Only this job's.  [default: all that are held]")
@branch_option
@storage_options
@json_output
def break_(uri: str, job: str | None, storage_options: dict[str, str], as_json: bool) -> int:
    """End the leases of the table at URI at once, whichever supervisor holds them.

    A run with such a lease notices before its next commit, or at the next renewal, and stops; its commits stay. There
    is no need to break the lease of a supervisor that died: it expires.

    \b
    Examples:
      memwal-ops lease break s3://bucket/orders.lance --job merge
      memwal-ops lease break orders.lance

    Exit codes: 0; 2 there is no such lease; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    store = locate(uri, storage_options)[2]
    names = [job] if job is not None else [lease.job for lease in list_leases(store) if lease.ended is None]
    if not names:
        raise InvalidUsageError("No lease of this table is held.", remedy="memwal-ops lease list URI shows all.")
    broken = [break_lease(store, name, user_at_host()) for name in names]
    document = {"leases": [{**lease.to_json(), "state": "broken"} for lease in broken]}
    lines = (f"broken: the lease of {lease.job}, which {printable(lease.holder.name)} held." for lease in broken)
    echo_result(document, "\n".join(lines), as_json=as_json)
    return 0


def state(one: Lease, now: datetime) -> str:
    """Return the state of a lease: held, expired, released or broken."""
    if one.ended is not None:
        return one.ended.split(" ", 1)[0]
    return "held" if one.in_force(now) else "expired"


def describe(found: list[Lease], now: datetime) -> str:
    """Return the list as human-readable text."""
    if not found:
        return "No lease of this table was ever taken."
    rows = [
        (
            lease.job,
            state(lease, now),
            lease.holder.name,
            str(lease.token),
            f"{lease.acquired:%Y-%m-%d %H:%M:%S}",
            f"{lease.expires:%Y-%m-%d %H:%M:%S}" if lease.ended is None else "",
        )
        for lease in found
    ]
    headings = ("job", "state", "holder", "token", "acquired (UTC)", "expires (UTC)")
    return grid(headings, rows, words=("job", "state", "holder", "acquired (UTC)", "expires (UTC)"))
