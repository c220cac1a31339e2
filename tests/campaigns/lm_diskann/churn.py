"""A process that changes an index until it is killed: prints each operation before it begins, and when it is done."""

from __future__ import annotations

import sys

import numpy as np

from memwal_ops.formats import lm_diskann


def vector(stamp: int) -> np.ndarray:
    return np.random.default_rng(stamp).normal(size=8).astype(np.float32)


def main(folder: str, seed: int, first: int) -> None:
    random = np.random.default_rng(seed)
    stamp = first
    with lm_diskann.open(folder, wait=600, delta_bytes=(None, 1 << 16)[seed % 2]) as index:
        while True:
            if random.random() < 0.2:
                index.merge(max_bytes=1 << 18)
                continue
            rows = np.unique(random.integers(0, 3000, random.integers(1, 40)))
            if random.random() < 0.4:
                print("delete", stamp, *rows, flush=True)
                index.delete(rows)
            else:
                print("insert", stamp, *rows, flush=True)
                index.insert(rows, np.stack([vector(stamp + int(row)) for row in rows]))
            print("done", flush=True)
            stamp += 3000


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
