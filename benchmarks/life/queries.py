"""What queries cost on a table after its month, beside the same rows in a table that was built anew."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np

from benchmarks.life.shapes import index
from benchmarks.plain import nearest, rows as vector_rows
from benchmarks.vectors import K, recall_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.life.shapes import Shape
    from benchmarks.life.store import CountingStore

    Query = Callable[[lance.LanceDataset], object]

_QUERIES = 50
_ROUNDS = 7


def queries(shape: Shape) -> dict[str, Query]:
    """The queries of a shape, by name."""
    rows = shape.rows
    keys = np.linspace(0, rows - 1, 5, dtype=int).tolist()

    def look_up(dataset: lance.LanceDataset) -> object:
        return [dataset.to_table(filter=f"id = {key}") for key in keys]

    listed = ", ".join(map(str, np.linspace(1, rows - 2, 40, dtype=int).tolist()))
    found: dict[str, Query] = {
        "scan": lambda dataset: dataset.to_table(columns=["id", "text"]),
        "key": look_up,
        "filter": lambda dataset: dataset.to_table(columns=["text"], filter=f"id IN ({listed})"),
    }
    if shape.vectors:
        query = vector_rows(7, 1)["vector"].combine_chunks().flatten().to_numpy()
        found["vector"] = lambda dataset: dataset.to_table(
            columns=["id"], nearest={"column": "vector", "q": query, "k": K, "nprobes": 4, "refine_factor": 4}
        )
        found["text"] = lambda dataset: dataset.to_table(columns=["id"], full_text_query="word7 word99", limit=K)
    return found


def fresh(shape: Shape, uri: str, source: str, options: Mapping[str, str]) -> str:
    """Write the rows of a table to a new one, with new indexes; returns a digest of the rows."""
    rows = lance.dataset(source).to_table().sort_by("id")
    index(shape, lance.write_dataset(rows, uri, storage_options=dict(options)))
    found = hashlib.sha256()
    for name in sorted(rows.column_names):
        for value in rows[name].to_pylist():
            found.update(repr(value).encode())
    return found.hexdigest()


def processor_ratios(asked: dict[str, Query], uri: str, built: str) -> dict[str, float]:
    """Processor seconds of each query of a table over those of the table that was built anew; the least of some."""
    found = {}
    for name, query in asked.items():
        least = [float("inf"), float("inf")]
        datasets = [lance.dataset(uri), lance.dataset(built)]
        for _ in range(_ROUNDS):
            for at, dataset in enumerate(datasets):
                began = time.process_time()
                query(dataset)
                least[at] = min(least[at], time.process_time() - began)
        found[name] = least[0] / least[1]
    return found


def requests_of(store: CountingStore, asked: dict[str, Query], uri: str, options: dict[str, str]) -> dict[str, int]:
    """Requests of each query to a table that was just opened; opening it is counted, too."""
    found = {}
    for name, query in asked.items():
        store.taken()
        query(lance.dataset(uri, storage_options=options))
        found[name] = store.taken().requests.total()
    return found


def recall(uri: str) -> float:
    """The share of the ten nearest rows that the vector index finds."""
    asked = vector_rows(11, _QUERIES)["vector"].combine_chunks().flatten().to_numpy().reshape(_QUERIES, -1)
    truth = np.stack([nearest(uri, query, use_index=False) for query in asked])
    return recall_of((nearest(uri, query, use_index=True) for query in asked), truth)


def size(uri: str) -> tuple[int, int]:
    """Fragments, and segments of all indexes."""
    dataset = lance.dataset(uri)
    return len(dataset.get_fragments()), sum(len(one.segments) for one in _indexes(dataset))


def needed(uri: str) -> int:
    """Bytes of the data files, deletion files and indexes of the newest version."""
    dataset, root = lance.dataset(uri), Path(uri)
    files = {root / "data" / file.path for one in dataset.get_fragments() for file in one.data_files()}
    files |= {root / path for one in dataset.get_fragments() if (path := one.deletion_file())}
    found = sum(path.stat().st_size for path in files)
    for one in _indexes(dataset):
        for segment in one.segments:
            found += sum(path.stat().st_size for path in (root / "_indices" / str(segment.uuid)).glob("*"))
    return found


def _indexes(dataset: lance.LanceDataset) -> list[Any]:
    return [one for one in dataset.describe_indices() if not one.name.startswith("__lance")]
