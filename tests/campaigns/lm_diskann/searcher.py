"""A process that searches until it is killed, and judges each answer: ``... FOLDER LEDGER SEED``.

The ledger has a line before each operation of a writer, and "done" after it. What was done before a search began must
show in its answer, unless an operation that began before the search ended touched the row, or one was killed at it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from memwal_ops.formats import lm_diskann
from tests.campaigns.lm_diskann.churn import vector

_GONE, _UNKNOWN = -1, -2


class Ledger:
    """What the writers said so far: per row the stamp of its vector, gone, or unknown."""

    def __init__(self, path: str, rows: int) -> None:
        self._path, self._at = Path(path), 0
        self.rows = {row: row for row in range(rows)}
        self._open: tuple[str, int, list[int]] | None = None

    def read(self) -> set[int]:
        """Read on; rows that new lines touch."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        touched: set[int] = set()
        for line in data.decode().splitlines():
            if line == "done":
                assert self._open is not None
                verb, stamp, rows = self._open
                self.rows |= {row: stamp + row if verb == "insert" else _GONE for row in rows}
            else:
                verb, stamp, *rest = line.split()
                self._open = verb, int(stamp), [*map(int, rest)]
                self.rows |= dict.fromkeys(self._open[2], _UNKNOWN)
                touched |= {*self._open[2]}
        return touched


def main(folder: str, path: str, seed: int, rows: int) -> None:
    random, ledger = np.random.default_rng(seed), Ledger(path, rows)
    parent, searches = os.getppid(), 0
    with lm_diskann.open(folder, read_only=True) as index:
        while os.getppid() == parent:
            ledger.read()
            before = dict(ledger.rows)
            live = [row for row, stamp in before.items() if stamp >= 0]
            asked = random.choice(live, min(8, len(live)), replace=False).tolist()
            queries = np.stack([vector(before[row]) for row in asked])
            found, distances = index.search(queries, k=3, L=200)
            touched = ledger.read()
            for query, row, near, far in zip(queries, asked, found.tolist(), distances.tolist(), strict=True):
                assert row in touched or (row in near and far[near.index(row)] == 0), f"row {row} is missed: {near}"
                for one, distance in zip(near, far, strict=True):
                    if one in touched or (stamp := before.get(one, _GONE)) == _UNKNOWN:
                        continue
                    assert stamp != _GONE, f"row {one} was deleted"
                    assert np.isclose(((vector(stamp) - query) ** 2).sum(), distance, atol=1e-4), (
                        f"row {one} was changed"
                    )
            searches += len(asked)
            if searches % 80 == 0:
                sys.stdout.write(f"{searches}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
