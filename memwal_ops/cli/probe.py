"""``memwal-ops probe``: test the conditional writes of a store, which every commit needs, and compare its clock."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import TABLE, branch_option, json_output, storage_options
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.registry import location_of
from memwal_ops.errors import ConditionalWriteUnsupportedError, TableNotFoundError
from memwal_ops.storage.clock import store_clock
from memwal_ops.storage.external_manifests import manifest_entries
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

# Stores report whole seconds.
_RESOLUTION = timedelta(seconds=1)
_SWAP = {
    "enforced": "Compare-and-swap is enforced.",
    "unsupported": "Compare-and-swap is not supported; Lance tables do not need it.",
}


@click.command(short_help="Test a store's conditional writes and its clock.")
@click.argument("uri", type=TABLE)
@branch_option
@storage_options
@json_output
def probe(uri: str, storage_options: dict[str, str], as_json: bool) -> int:
    """Try put-if-absent at URI, as every job does before its first commit, and compare the clocks.

    The store's clock is compared with this machine's. Jobs cache for a day that a store passed, in
    $XDG_CACHE_HOME/memwal-ops or the folder $MEMWAL_OPS_CACHE (empty: nothing is cached); this command always tries.
    Compare-and-swap is tried too; Lance tables do not need it, and local files have none. There need not be a table
    yet, but a local folder must exist: it is not created. Some small objects are written below _mem_wal_ops/ and
    deleted again.

    \b
    Examples:
      memwal-ops probe s3://bucket/orders.lance
      memwal-ops probe s3://bucket/new --storage-option aws_endpoint=http://minio:9000

    Exit codes: 0 put-if-absent is enforced; 23 it is not; others: runbooks/README.md.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    location = location_of(uri, storage_options)
    if location.scheme == "file" and not os.path.isdir(location.uri):
        raise TableNotFoundError(f"There is no folder {location.uri}.")
    store = open_store(location)
    probe_conditional_writes(store, again=True)
    if (recorded := manifest_entries(store)) is not None:
        recorded.probe_commits()
    try:
        probe_compare_and_swap(store)
        swap = "enforced"
    except ConditionalWriteUnsupportedError:
        swap = "unsupported"
    skew = clock_skew(store)
    found = {
        "uri": location.uri,
        "conditional_writes": "enforced",
        "compare_and_swap": swap,
        "clock_skew_seconds": round(skew, 3),
    }
    text = f"{location.uri}: put-if-absent is enforced. {_SWAP[swap]} {_clocks(skew)}"
    echo_result(found, text, as_json=as_json)
    return 0


def clock_skew(store: Store) -> float:
    """Return the seconds that this machine's clock is ahead of the store's; 0 if the difference is not measurable."""
    before = datetime.now(UTC)
    store_time = store_clock(store)
    after = datetime.now(UTC)
    if before - _RESOLUTION <= store_time <= after + _RESOLUTION:
        return 0.0
    return (before + (after - before) / 2 - store_time).total_seconds()


def _clocks(skew: float) -> str:
    if not skew:
        return "Its clock agrees with this machine's."
    return f"This machine's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} its clock."
