"""Mergers race, are killed with -9 and start again, beside live writers and the owner's own maintenance."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import open_table
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.format.names import parse_version_manifest_name
from memwal_ops.format.version_manifest import decode_version_manifest
from memwal_ops.jobs import merge as job
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from uuid import UUID

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))


class Restless:
    """One process of tests.crash.restless, started again each time it was killed."""

    def __init__(self, what: str, uri: str, rng: random.Random) -> None:
        self.what, self.uri, self.rng = what, uri, rng
        self.said = Path(f"{uri}.{what}-{rng.randrange(1 << 30)}.stderr")
        self.start()

    def start(self) -> None:
        seed = str(self.rng.randrange(1 << 30))
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.restless", self.what, self.uri, seed],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        # Long enough to get past the imports, short enough to die within every kind of step.
        self.dies_at = time.monotonic() + self.rng.uniform(1.0, 3.0)

    def tend(self) -> None:
        if self.process.poll() is not None:
            text = self.said.read_text()[-3000:]
            raise AssertionError(f"{self.what} ended by itself with {self.process.returncode}:\n{text}")
        if time.monotonic() > self.dies_at:
            self.kill()
            self.start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def progress_by_version(uri: str) -> list[dict[UUID, int]]:
    """The merge progress of every version that still stands, oldest first."""
    files = Files(uri, None)
    found = {}
    for path in files.listing("_versions"):
        name = parse_version_manifest_name(path.rsplit("/", 1)[-1])
        if name is not None and not name.detached:
            indexes = decode_version_manifest(files.get(path)).indexes
            entry = None if indexes is None else find_memwal_entry(indexes)
            found[name.version] = {} if entry is None else dict(decode_memwal_index(entry).merged_generations)
    return [found[version] for version in sorted(found)]


@pytest.mark.req("S0-157", "S0-168", "S0-212")
def test_soak(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    rng = random.Random(seed)
    table = Workload(seed, regions=3, base_rows=600, max_memtable_rows=80).create(str(tmp_path / "t.lance"))
    actors = [Restless(what, table.uri, rng) for what in ("merge", "merge", "maintain")]
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            table.step(3)
            for actor in actors:
                actor.tend()
    finally:
        for actor in actors:
            actor.kill()
    table.close()
    merged = dict(wire.progress(Files(table.uri, None)))
    assert_same(read_base(table.uri), table.expected(merged), seed=seed)
    assert_same(read_lsm(table.uri), table.expected(), seed=seed)
    history = progress_by_version(table.uri)
    for earlier, later in pairwise(history):
        assert all(later.get(region, 0) >= generation for region, generation in earlier.items())
    job.apply(open_table(table.uri), job.MergeOptions())
    assert_same(read_base(table.uri), table.expected(), seed=seed)
    assert sum(merged.values()) > 0, "nothing was merged while they raced"
