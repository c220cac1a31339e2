"""``memwal-ops probe``: whether a store keeps what every commit rests on, and what time it is there."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.errors import TableNotFoundError
from memwal_ops.storage.clock import store_clock
from memwal_ops.storage.locations import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

# Stores tell whole seconds.
_EQUAL = timedelta(seconds=1)


@click.command(short_help="Try a store's conditional writes, and compare its clock with ours.")
@click.argument("uri")
@storage_options
@json_output
def probe(uri: str, storage_options: dict[str, str], as_json: bool) -> int:
    """Try put-if-absent at URI, as every job does before its first commit, and compare the store's clock with ours.

    There need not be a table yet. Some small objects are written below _mem_wal_ops/ and deleted again.

    Exit codes: 0 put-if-absent is enforced; 23 it is not; any other code: see the README.
    """
    location = resolve(uri, storage_options)
    if location.scheme == "file" and not os.path.isdir(location.uri):
        raise TableNotFoundError(f"There is no folder {location.uri}.")
    store = open_store(location)
    probe_conditional_writes(store)
    skew = _skew(store)
    if as_json:
        found = {"uri": location.uri, "conditional_writes": "enforced", "clock_skew_seconds": round(skew, 3)}
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"{location.uri}: put-if-absent is enforced. {_clocks(skew)}")
    return 0


def _skew(store: Store) -> float:
    """Seconds that our clock is ahead of the store's; 0 where the difference is none that can be told."""
    before = datetime.now(UTC)
    theirs = store_clock(store)
    after = datetime.now(UTC)
    if before - _EQUAL <= theirs <= after + _EQUAL:
        return 0.0
    return (before + (after - before) / 2 - theirs).total_seconds()


def _clocks(skew: float) -> str:
    if not skew:
        return "Its clock and ours agree."
    return f"Our clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} its clock."
