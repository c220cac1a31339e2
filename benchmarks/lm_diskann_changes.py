"""What changes of an index folder cost per row: ``python -m benchmarks.lm_diskann_changes --rows 100000``.

Inserts in batches, deletes, and the jobs after them: CPU time, bytes written to all files (a row's block has 4 KiB at
128 dimensions), and blocks that were read from the graph. Each line begins with a copy of the same index, of which
each list has room for a few links, as after a build; ``settled`` begins with one to which a tenth was added since.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.markdown import head, row
from benchmarks.vectors import clustered
from memwal_ops import run_job
from memwal_ops.formats import lm_diskann

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index

BATCHES = ((1, 100), (10, 30), (1_000, 3), (10_000, 1))
DELETED, JOBS = 2_000, ("catchup", "merge", "compact", "gc")


def written() -> int:
    """Bytes that this process gave to ``write``."""
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


@dataclass
class Cost:
    """CPU time, bytes written and blocks read since it was made."""

    index: Index | None = None

    def __post_init__(self) -> None:
        """Begin."""
        self._blocks, self._bytes, self._began = self._read(), written(), time.process_time()

    def _read(self) -> int:
        return 0 if self.index is None else int(self.index.view.counts[4])

    def show(self, what: str, rows: int) -> None:
        """One row of the table."""
        took, size = time.process_time() - self._began, written() - self._bytes
        blocks = "" if self.index is None else f"{(self._read() - self._blocks) / rows:.0f}"
        row(what, f"{took / rows * 1000:.2f}", f"{size / rows / 1024:.0f}", blocks)


def copied(made: str, copy: str) -> None:
    """Copy an index, and sync it: otherwise the first commit that syncs the graph writes all of the copy."""
    shutil.copytree(made, copy)
    os.sync()


def inserts(
    folder: str, fresh: NDArray[np.float32], first: int, batch: int, times: int, what: str, **options: Any
) -> None:
    """Insert batches, and merge what they left."""
    with lm_diskann.open(folder, **options) as index:
        cost, rows = Cost(index), batch * times
        for at in range(0, rows, batch):
            index.insert(np.arange(first + at, first + at + batch), fresh[at : at + batch])
        index.merge()
        cost.show(f"insert, {batch:,} at once{what}", rows)


def deletes(folder: str, rows: int) -> None:
    """Delete rows, and run the jobs."""
    with lm_diskann.open(folder) as index:
        cost = Cost(index)
        index.delete(np.arange(0, rows, rows // DELETED)[:DELETED])
        cost.show("delete", DELETED)
    for job in JOBS:
        cost = Cost()
        run_job(folder, job, apply=True)
        cost.show(job, DELETED)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    random = np.random.default_rng(3)
    vectors, fresh = clustered(random, rows), clustered(random, max(rows // 10, BATCHES[-1][0]))
    with tempfile.TemporaryDirectory() as base:
        built, settled, copy = f"{base}/built.lmd", f"{base}/settled.lmd", f"{base}/copy.lmd"
        with lm_diskann.create(built, dimension=128) as index:
            index.insert(np.arange(rows), vectors)
        shutil.copytree(built, settled)
        with lm_diskann.open(settled) as index:
            index.insert(np.arange(rows, rows + len(fresh)), fresh)
            index.delete(np.arange(rows, rows + 1))  # compiled, not measured
        for job in JOBS:
            run_job(settled, job, apply=True)
        os.sync()
        print(f"\n## Changes: {rows:,} x 128")
        head("what", "CPU ms per row", "KiB written per row", "blocks read per row")
        for name, made, first in (("built", built, rows), ("settled", settled, 2 * rows)):
            for batch, times in BATCHES:
                copied(made, copy)
                inserts(copy, fresh[::-1], first, batch, times, f", {name}")
                shutil.rmtree(copy)
        copied(settled, copy)
        inserts(copy, fresh[::-1], 2 * rows, 10, 30, ", settled, delta_bytes 1 MiB", delta_bytes=1 << 20)
        deletes(settled, rows)


if __name__ == "__main__":
    main()
