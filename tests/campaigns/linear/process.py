"""Processes that write and read single keys, and tell when: ``python -m tests.campaigns.linear.process KIND FOLDER N``.

Each writes lines of JSON below the folder, before a call and after it. The clock is the machine's, which all of its
processes share. ``writer`` claims a region again and again, so that writers of one region fence each other.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from memwal_ops import run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.memwal import read
from tests.campaigns.sim.region_planted import WRITER_BUGS
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("value", pa.int64())])
#: Keys of a region: few, so that calls meet.
KEYS = 4
_CLAIMS_AGAIN = 0.1
_FLUSHES = 0.1
#: What gc leaves to readers and stalled writers.
GC: dict[str, object] = {
    "reader_grace": "30s", "orphan_min_age": "60s", "fence_retention": "60s", "drain_after": "0s", "allow_unsafe": True,
}  # fmt: skip


class Lines:
    """The calls of one process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._count = 0

    def call(self, key: int, value: int | None, do: Callable[[], Any]) -> Any:
        """Make a call, with a line before and after it; one that fails has no second line."""
        self._count += 1
        began = {"call": self._count, "key": key, "value": value, "began": time.monotonic_ns()}
        self._file.write(f"{json.dumps(began)}\n")
        found = do()
        ended = {"call": self._count, "found": found, "ended": time.monotonic_ns()}
        self._file.write(f"{json.dumps(ended)}\n")
        return found


def write(uri: str, options: dict[str, str], region: str, number: int, lines: Lines) -> NoReturn:
    """Put keys, by turns with the region's other writers."""
    rng = random.Random(f"{region} {number} {os.getpid()}")
    first = int(region[-2:], 16) * KEYS
    value = (os.getpid() << 32) + (time.monotonic_ns() & 0xFFFF) * (1 << 16)
    while True:
        try:
            writer = RegionWriter(uri, region, storage_options=options)
            while rng.random() > _CLAIMS_AGAIN:
                value += 1
                key = first + rng.randrange(KEYS)
                rows = pa.table({"id": [key], "value": [value]}, schema=SCHEMA)
                lines.call(key, value, partial(writer.put, rows))
                if rng.random() < _FLUSHES:
                    writer.flush()
        except MemwalOpsError as error:
            sys.stderr.write(f"{error}\n")


def look_up(uri: str, options: dict[str, str], regions: list[str], number: int, lines: Lines) -> NoReturn:
    """Read keys."""
    rng = random.Random(f"reader {number} {os.getpid()}")
    while True:
        key = int(rng.choice(regions)[-2:], 16) * KEYS + rng.randrange(KEYS)

        def get(key: int = key) -> int | None:
            found = read(uri, "strong", storage_options=options).get([key])["value"].to_pylist()
            assert len(found) < 2, f"key {key} is there {len(found)} times"
            return found[0] if found else None

        try:
            lines.call(key, None, get)
        except MemwalOpsError as error:
            sys.stderr.write(f"{error}\n")


def maintain(uri: str, options: dict[str, str]) -> NoReturn:
    """Merge, and collect what is merged."""
    while True:
        for job, values in (("merge", {}), ("gc", {"apply": True, **GC})):
            try:
                run_job(uri, job, storage_options=options, **values)
            except MemwalOpsError as error:
                sys.stderr.write(f"{error}\n")


def main() -> None:
    """Go on until killed."""
    kind, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    place = json.loads((folder / "place.json").read_text())
    uri, options, regions = place["uri"], place["options"], place["regions"]
    lines = Lines(folder / f"{kind}-{number}-{os.getpid()}.calls")
    with WRITER_BUGS[place["bug"]].planted() if place["bug"] else nullcontext():
        if kind == "writer":
            write(uri, options, regions[number % len(regions)], number, lines)
        elif kind == "reader":
            look_up(uri, options, regions, number, lines)
        else:
            maintain(uri, options)


if __name__ == "__main__":
    main()
