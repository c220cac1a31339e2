"""What small appends make maintenance write: ``python -m benchmarks.tiers`` (``--short`` to see that it runs).

Two tables get small appends, each followed by ``memwal-ops compact`` on one copy and by pylance's ``compact_files`` on
another, each in a process of its own. Prints Markdown: bytes written per byte appended, fragments that remain, and the
peak memory of a process above that of one that found nothing to do. Then a table with indexes gets small appends, each
followed by an update of the indexes: bytes of their files, and files, over those of an index of the appended rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

from benchmarks.markdown import head, row
from benchmarks.memory import as_command, peak_mib, reset_peak
from memwal_ops import run_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A table and its appends.

    Attributes:
        name: as printed.
        width: bytes of a row.
        rows: rows of the table.
        appended: rows of an append.
        times: number of appends.
    """

    name: str
    width: int
    rows: int
    appended: int
    times: int = 12


SHAPES = (Shape("rows of 1 KiB", 1 << 10, 200_000, 1_000), Shape("rows of 1 MiB", 1 << 20, 800, 2))
SHORT = (Shape("rows of 1 KiB", 1 << 10, 4_000, 100), Shape("rows of 100 KiB", 100 << 10, 80, 2))


def rows(shape: Shape, first: int, count: int) -> pa.RecordBatchReader:
    """Rows of random bytes, which no encoding makes smaller, with ids from ``first``."""
    schema = pa.schema([("id", pa.int64()), ("payload", pa.large_binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        rng, most = np.random.default_rng(first), max(1, (8 << 20) // shape.width)
        for at in range(first, first + count, most):
            ids = range(at, min(at + most, first + count))
            payload = pa.array([rng.bytes(shape.width) for _ in ids], pa.large_binary())
            yield pa.record_batch([pa.array(ids, pa.int64()), payload], schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def ours(uri: str) -> None:
    """``memwal-ops compact``, as the command sets its process up."""
    run_job(uri, "compact")


def pylance(uri: str) -> None:
    """What users call."""
    lance.dataset(uri).optimize.compact_files()


WAYS: dict[str, Callable[[str], None]] = {"memwal-ops compact": ours, "compact_files": pylance}
UPDATES: dict[str, Callable[[str], object]] = {
    "memwal-ops catchup": lambda uri: run_job(uri, "catchup"),
    "catchup --max-segments 1": lambda uri: run_job(uri, "catchup", max_segments=1),
    "optimize_indices": lambda uri: lance.dataset(uri).optimize.optimize_indices(),
}


def main() -> None:
    """Run both ways on each shape, or one step of one way in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--step", nargs=2)
    arguments = parser.parse_args()
    if arguments.step:
        way, uri = arguments.step
        as_command()
        reset_peak()
        WAYS[way](uri)
        print(json.dumps(peak_mib()))
        return
    head("table", "way", "appended, MiB", "written, MiB", "per byte", "fragments", "memory, MiB")
    for shape in SHORT if arguments.short else SHAPES:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                print_row(shape, way, f"{folder}/t.lance")
    head("way", "index", "of the appended rows, KiB", "written, KiB", "per byte", "files", "segments")
    for way in UPDATES:
        with tempfile.TemporaryDirectory() as folder:
            print_indexes(way, f"{folder}/t.lance", *((4_000, 1_100) if arguments.short else (200_000, 1_000)))


def print_indexes(way: str, uri: str, base: int, appended: int, times: int = 8) -> None:
    """Make an indexed table, append and update the indexes, print what that wrote for each index."""
    dataset = lance.write_dataset(indexed_rows(0, base), uri)
    dataset.create_scalar_index("id", "BTREE", name="BTREE")
    dataset.create_scalar_index("text", "INVERTED", name="INVERTED")
    dataset.create_scalar_index("text", "NGRAM", name="NGRAM")
    dataset.create_index("vector", "IVF_PQ", name="IVF_PQ", num_partitions=base // 1000, num_sub_vectors=16)
    sizes, written, count = segments(uri), Counter[str](), Counter[str]()
    first = {name: sum(sum(files) for files in found.values()) for name, found in sizes.items()}
    for number in range(times):
        lance.write_dataset(indexed_rows(base + number * appended, appended), uri, mode="append")
        UPDATES[way](uri)
        before, sizes = sizes, segments(uri)
        for name, found in sizes.items():
            new = [size for folder, files in found.items() if folder not in before[name] for size in files]
            written[name] += sum(new)
            count[name] += len(new)
    for name, found in sizes.items():
        fresh = first[name] * times * appended / base
        row(way, name, f"{fresh / 1024:,.0f}", f"{written[name] / 1024:,.0f}", f"{written[name] / fresh:.1f}",
            count[name], len(found))  # fmt: skip


def indexed_rows(first: int, count: int) -> pa.Table:
    """Rows with an id, a text of eight words of 20,000, and a vector of 64 floats."""
    rng = np.random.default_rng(first)
    words = (20_000 * rng.random((count, 8)) ** 2).astype(int)
    vectors = rng.random(count * 64, dtype=np.float32)
    return pa.table(
        {
            "id": np.arange(first, first + count),
            "text": [" ".join(f"word{number}" for number in line) for line in words],
            "vector": pa.FixedSizeListArray.from_arrays(vectors, 64),
        }
    )


def segments(uri: str) -> dict[str, dict[str, list[int]]]:
    """By index and segment the sizes of its files."""
    return {
        index.name: {
            one.uuid: [path.stat().st_size for path in Path(uri, "_indices", one.uuid).iterdir()]
            for one in index.segments
        }
        for index in lance.dataset(uri).describe_indices()
    }


def print_row(shape: Shape, way: str, uri: str) -> None:
    """Make the table, append and compact, print what that took."""
    lance.write_dataset(rows(shape, 0, shape.rows), uri)
    idle, most, written = step(way, uri), 0.0, 0
    for number in range(shape.times):
        first = shape.rows + number * shape.appended
        lance.write_dataset(rows(shape, first, shape.appended), uri, mode="append")
        before = files(uri)
        most = max(most, step(way, uri))
        written += sum(size for path, size in files(uri).items() if path not in before)
    dataset = lance.dataset(uri)
    if dataset.count_rows() != shape.rows + shape.times * shape.appended:
        raise SystemExit(f"{way} lost rows")
    appended = shape.times * shape.appended * shape.width
    row(
        f"{shape.rows:,} {shape.name}, {shape.times} times {shape.appended:,}", way, f"{appended / _MIB:.0f}",
        f"{written / _MIB:,.0f}", f"{written / appended:.1f}", len(dataset.get_fragments()), f"{most - idle:,.0f}",
    )  # fmt: skip
    shutil.rmtree(uri)


def step(way: str, uri: str) -> float:
    """Run a way once in a process of its own; its peak memory in MiB."""
    command = [sys.executable, "-m", "benchmarks.tiers", "--step", way, uri]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    return float(json.loads(done.stdout.splitlines()[-1]))


def files(uri: str) -> dict[str, int]:
    """Sizes of the data files, by path."""
    return {str(path): path.stat().st_size for path in Path(uri, "data").rglob("*.lance")}


if __name__ == "__main__":
    main()
