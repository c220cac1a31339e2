"""Recall and file size of an index folder under churn: ``python -m benchmarks.lm_diskann_churn --rows 100000``.

Each round deletes a tenth of the rows and inserts as many new ones. One folder is healed, merged, compacted and
collected after each round, the other is merged only. Beside them, a folder that is built anew of the rows of that
round: after the first, the middle and the last one. Prints Markdown, and writes the charts of
benchmarks/lm-diskann.md. With ``--drift``, the rows of each round are around two new centres, and queries
are rows of that round; nothing is drawn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.line_chart import line_chart
from benchmarks.markdown import head, row
from benchmarks.vectors import K, clustered, moved, recall_of, truth
from memwal_ops import run_job
from memwal_ops.formats import lm_diskann

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARE, QUERIES = 10, 2_000
JOBS = {"healed": ("catchup", "merge", "compact", "gc"), "not healed": ("merge",)}
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def recall(
    folder: str, vectors: NDArray[np.float32], rows: NDArray[np.int64], queries: NDArray[np.float32], effort: int
) -> float:
    """Recall@10 at an effort; row i of the index has ``vectors[i]``."""
    nearest = rows[truth(vectors[rows], queries)]
    with lm_diskann.open(folder, read_only=True) as index:
        found, _ = index.search(queries, k=K, L=effort)
    return recall_of(found, nearest)


def size(folder: str) -> float:
    """MiB of the graph."""
    return os.path.getsize(f"{folder}/graph.lmd") / 2**20


def made(folder: str, vectors: NDArray[np.float32], rows: NDArray[np.int64]) -> str:
    """A folder of some of the vectors."""
    lm_diskann.create(folder, dimension=vectors.shape[1])
    with lm_diskann.open(folder) as index:
        index.insert(rows, vectors[rows])
    return folder


def churn(
    base: str, count: int, dimension: int, rounds: int, effort: int, names: list[str], share: int, *, drift: bool
) -> dict[str, dict[str, list[float]]]:
    """All rounds; recall and file size of each folder per round."""
    random = np.random.default_rng(3)
    step = count // share
    if drift:
        vectors = np.concatenate([moved(random, size, dimension) for size in (count, *[step] * rounds)])
    else:
        vectors = clustered(random, count + rounds * step, dimension)
    queries = clustered(random, QUERIES, dimension)
    rows = np.arange(count)
    folders = {name: made(f"{base}/{name}.lmd", vectors, rows) for name in names}
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in names} for what in ("recall", "size")}
    columns = [*names, "built anew"]
    head("round", *(f"recall@10, {name}" for name in columns), *(f"MiB, {name}" for name in columns),
         "deletes, inserts: CPU ms per row", "catchup, merge, compact, gc: CPU ms per deleted row")  # fmt: skip
    for number in range(1, rounds + 1):
        gone = random.choice(rows, step, replace=False)
        fresh = np.arange(count + (number - 1) * step, count + number * step)
        rows = np.sort(np.concatenate([np.setdiff1d(rows, gone), fresh]))
        if drift:
            queries = vectors[random.choice(rows, min(QUERIES, len(rows)), replace=False)]
        spent: dict[str, float] = {}
        for name, folder in folders.items():
            began = time.process_time()
            with lm_diskann.open(folder) as index:
                index.delete(gone)
                index.insert(fresh, vectors[fresh])
            changed = time.process_time()
            for job in JOBS[name]:
                run_job(folder, job, apply=True)
            if name == "healed":
                spent = {"changes": changed - began, "jobs": time.process_time() - changed}
            found["recall"][name].append(recall(folder, vectors, rows, queries, effort))
            found["size"][name].append(size(folder))
        now = {what: [one[-1] for one in found[what].values()] for what in found}
        if number in {1, (rounds + 1) // 2, rounds}:
            built = made(f"{base}/{number}.lmd", vectors, rows)
            now["recall"].append(recall(built, vectors, rows, queries, effort))
            now["size"].append(size(built))
        blank = [""] * (len(columns) - len(now["size"]))
        row(number, *(f"{one:.3f}" for one in now["recall"]), *blank, *(f"{one:.1f}" for one in now["size"]), *blank,
            f"{spent['changes'] / step / 2 * 1000:.2f}", f"{spent['jobs'] / step * 1000:.2f}")  # fmt: skip
    return found


def main() -> None:
    """Measure, print the table, and write the charts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--effort", type=int, default=50, metavar="L")
    parser.add_argument("--share", type=int, default=SHARE, metavar="N", help="replace 1/N of the rows per round")
    parser.add_argument("--drift", action="store_true", help="the rows of each round are around new centres")
    parser.add_argument("--healed", action="store_true", help="without the other folder, and without charts")
    told = parser.parse_args()
    print(f"\n## Churn: {told.rows:,} x {told.dimension}, 1/{told.share} per round, L = {told.effort}")
    with tempfile.TemporaryDirectory() as base:
        names = ["healed"] if told.healed else [*JOBS]
        found = churn(base, told.rows, told.dimension, told.rounds, told.effort, names, told.share, drift=told.drift)
    if told.healed or told.drift:
        return
    labels = [str(number) for number in range(1, told.rounds + 1)]
    IMAGES.joinpath("churn-recall.svg").write_bytes(line_chart(found["recall"], labels, "{:.3f}"))
    IMAGES.joinpath("churn-size.svg").write_bytes(line_chart(found["size"], labels, "{:,.0f}"))


if __name__ == "__main__":
    main()
