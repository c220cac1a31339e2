"""Tables of many rows for both engines: ``python -m benchmarks.spark --only scale --rows N``.

An int64 key and 64 floats: N rows of base, a tenth of that as backlog, half of it updates, in generations of at most
100,000 rows. Both engines work on hard links of the same files, each in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

VECTOR = 64
REGIONS = 4
_SLICE = 100_000
_ROWS_PER_FILE = 1_000_000
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("vector", pa.list_(pa.float32(), VECTOR)),
    ]
)


def make(uri: str, base: int) -> tuple[int, int]:
    """Write the table to ``uri``; how many generations it has, and how many rows they have."""
    random = np.random.default_rng(7)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, base, _SLICE):
            yield _rows(np.arange(start, min(start + _SLICE, base)), random)

    reader = pa.RecordBatchReader.from_batches(_SCHEMA, batches())
    dataset = lance.write_dataset(reader, uri, max_rows_per_file=_ROWS_PER_FILE)
    dataset.initialize_mem_wal()
    own = base // 10 // REGIONS
    generations = -(-own // _SLICE)
    each = own // generations
    for region in range(REGIONS):
        with dataset.mem_wal_writer(str(uuid.UUID(int=region + 1, version=4)), max_memtable_rows=each) as writer:
            for generation in range(generations):
                old = random.choice(base // REGIONS, each // 2, replace=False)
                new = base // REGIONS + generation * each + np.arange(each - each // 2)
                writer.put(pa.Table.from_batches([_rows(np.concatenate([old, new]) * REGIONS + region, random)]))
    return REGIONS * generations, REGIONS * generations * each


def _rows(keys: npt.NDArray[np.int64], random: np.random.Generator) -> pa.RecordBatch:
    vectors = random.random((len(keys), VECTOR), dtype=np.float32)
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), VECTOR)
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), values], schema=_SCHEMA)


def scale(at: Path, sizes: list[int], ways: dict[str, Callable[[Path], dict[str, Any]]]) -> None:
    """Each way, on each size; ``ways`` merge a table and give the figures of their processes."""
    print(f"\n## Scale: int64 key and {VECTOR} floats, a tenth of the base as backlog\n")
    print(
        "| base rows | backlog | generations | way | seconds | processor | driver, Python | driver, Java "
        "| largest worker |\n|---|---|---|---|---|---|---|---|---|"
    )
    for base in sizes:
        template = at / "t.lance"
        generations, backlog = make(str(template), base)
        os.sync()
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(dir=at) as folder:
                copy = Path(folder) / "t.lance"
                # No file of a table is written to again.
                shutil.copytree(template, copy, copy_function=os.link)
                one = way(copy)
            memory = " | ".join(
                f"{one[key]:.0f} MiB" if key in one else ""
                for key in ("driver_python_mib", "driver_java_mib", "worker_mib")
            )
            print(
                f"| {base:,} | {backlog:,} | {generations} | {name} "
                f"| {one['seconds']:.1f} s | {one['cpu']:.1f} s | {memory} |",
                flush=True,
            )
        shutil.rmtree(template)
