"""Rows that ``optimize_indices()`` adds to an IVF_PQ index with the metric dot hide all rows that were there.

Expected: a search finds about as many of the true neighbours as before, as it does with the metric l2.
"""

import tempfile

import lance
import numpy as np
import pyarrow as pa

DIMENSION, ROWS, ADDED = 32, 6_000, 1_000
rng = np.random.default_rng(3)
centers = rng.normal(size=(20, DIMENSION))
every = (centers[rng.integers(0, 20, ROWS + ADDED)] + 0.5 * rng.normal(size=(ROWS + ADDED, DIMENSION))).astype("f4")


def rows(first: int, last: int) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(every[first:last].reshape(-1)), DIMENSION)
    return pa.table({"id": range(first, last), "vector": vectors})


def recall(uri: str, count: int) -> float:
    """The share of the 10 true neighbours, over 50 queries."""
    hits = 0
    for query in every[:50]:
        near = {"column": "vector", "q": query, "k": 10, "nprobes": 4}
        found = lance.dataset(uri).to_table(columns=["id", "_distance"], nearest=near)["id"].to_pylist()
        hits += len({*np.argsort(-(every[:count] @ query))[:10].tolist()} & {*found})
    return hits / 500


uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(rows(0, ROWS), uri)
lance.dataset(uri).create_index("vector", "IVF_PQ", metric="dot", num_partitions=4, num_sub_vectors=8)
before = recall(uri, ROWS)
lance.write_dataset(rows(ROWS, ROWS + ADDED), uri, mode="append")
lance.dataset(uri).optimize.optimize_indices(num_indices_to_merge=0)
after = recall(uri, ROWS + ADDED)
print(f"recall: {before:.2f} before, {after:.2f} after")
print("FAULT" if after < before / 2 else "GONE")
