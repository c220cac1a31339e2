"""What a month of maintenance of a table of 10 billion rows on S3 would cost: ``python -m benchmarks.paper``.

Computed, not measured: the policies of ``compact`` and ``catchup`` as they are, and what ``optimize()`` does, decide
for each round which rows are written again. Bytes become requests, processor time and storage by the assumptions below.
Prints Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.markdown import head, row
from memwal_ops.core.cost import LIST_PRICES, money_of, monthly_storage
from memwal_ops.formats.lance.options import (
    DEFAULT_DELETED_FRACTION,
    DEFAULT_TARGET_BYTES,
    DEFAULT_TARGET_ROWS,
    CatchupOptions,
    CompactOptions,
)
from memwal_ops.formats.lance.policy import FragmentSize, Policy, SegmentPolicy, SegmentSize

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 10_000_000_000
ROW_BYTES = 400
INDEX_BYTES = 4.2  # of a BTREE for each row, as benchmarks.tiers measured it
DAYS = 30
RETENTION_DAYS = 7  # files of older versions are deleted
PART, READ = 5 << 20, 8 << 20  # bytes of a PUT, and of a GET
# Seconds of one core for each GiB that is written again; and the price of an hour of it.
DATA_SECONDS, INDEX_SECONDS, CORE_HOUR = 10.0, 160.0, 0.04
# Requests of a round beside its bytes: those of narrow rows in benchmarks/month.md, by 60 rounds.
OURS_ASKS, THEIRS_ASKS = {"get": 252, "list": 82, "put": 24}, {"get": 165, "list": 17, "put": 20}
_GIB = 1 << 30


@dataclass
class Month:
    """Bytes that maintenance wrote, in all, and how many fragments and segments are left of what was appended."""

    data: float = 0.0
    index: float = 0.0
    rounds: int = 0
    fragments: int = 0
    segments: int = 0


def ours(rounds: int, rows: int) -> Month:
    """Appends of ``rows``, each followed by a compaction and a catch-up by the policies of the jobs."""
    fragments_policy = Policy(
        DEFAULT_TARGET_ROWS, DEFAULT_TARGET_BYTES, CompactOptions().tier_factor, DEFAULT_DELETED_FRACTION
    )
    segments_policy = SegmentPolicy(CatchupOptions().max_segments, CatchupOptions().tier_factor)
    tail: list[FragmentSize] = []
    segments = [SegmentSize(ROWS, int(ROWS * INDEX_BYTES))]
    month = Month(rounds=rounds)
    for _ in range(rounds):
        tail.append(FragmentSize(max((one.id for one in tail), default=0) + 1, rows, 0, rows * ROW_BYTES))
        for groups in fragments_policy.rounds(tail):
            month.data += sum(fragment.bytes for group in groups for fragment in group)
            tail = fragments_policy.after(tail, groups)
        again = segments_policy.merged(segments, rows)
        merged = rows + sum(one.rows for one in segments[len(segments) - again :])
        segments = [*segments[: len(segments) - again], SegmentSize(merged, int(merged * INDEX_BYTES))]
        month.index += merged * INDEX_BYTES
    return replace(month, fragments=len(tail), segments=len(segments))


def theirs(rounds: int, rows: int) -> Month:
    """The same by ``optimize()``: all adjacent fragments below the target become one; a B-tree is written anew."""
    month, tail = Month(rounds=rounds, segments=1), 0
    for number in range(rounds):
        month.index += (ROWS + (number + 1) * rows) * INDEX_BYTES
        tail += rows
        month.data += tail * ROW_BYTES * (rows < DEFAULT_TARGET_ROWS)  # larger ones stay as they are
        if tail >= DEFAULT_TARGET_ROWS:
            month.fragments, tail = month.fragments + 1, tail % DEFAULT_TARGET_ROWS * (rows < DEFAULT_TARGET_ROWS)
    return replace(month, fragments=month.fragments + bool(tail))


WAYS: dict[str, tuple[Callable[[int, int], Month], dict[str, int]]] = {
    "memwal-ops": (ours, OURS_ASKS),
    "optimize()": (theirs, THEIRS_ASKS),
}


def main() -> None:
    """The table of benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--appended", type=int, default=72_000_000, help="rows in the month")
    arguments = parser.parse_args()
    prices = {"s3": replace(LIST_PRICES["s3"], cpu=CORE_HOUR)}
    head("maintained", "way", "data", "index", "fragments, segments", "requests", "processor", "old files", "a month")
    for rounds, every in ((DAYS, "daily"), (DAYS * 24, "hourly")):
        for name, (way, asks) in WAYS.items():
            month = way(rounds, arguments.appended // rounds)
            written = month.data + month.index
            requests = {kind: count * rounds for kind, count in asks.items()}
            requests["get"] += int(written / READ)
            requests["put"] += int(written / PART)
            hours = (month.data * DATA_SECONDS + month.index * INDEX_SECONDS) / _GIB / 3600
            asked = money_of({"store": "s3", "requests": requests}, prices)
            kept = monthly_storage(written * RETENTION_DAYS / DAYS, "s3", prices)
            row(
                every, name, *(f"{size / _GIB:,.0f} GiB" for size in (month.data, month.index)),
                f"{month.fragments}, {month.segments}", f"${asked:,.2f}", f"${hours * CORE_HOUR:,.2f}",
                f"${kept:,.2f}", f"**${asked + hours * CORE_HOUR + kept:,.2f}**",
            )  # fmt: skip


if __name__ == "__main__":
    main()
