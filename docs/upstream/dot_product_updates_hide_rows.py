"""Rows that optimize_indices() adds to an IVF_PQ index with the metric dot hide all rows that were there."""

import tempfile

import lance
import numpy as np
import pyarrow as pa

rng = np.random.default_rng(3)
every = (rng.normal(size=(20, 32))[rng.integers(0, 20, 7000)] + 0.5 * rng.normal(size=(7000, 32))).astype("f4")
uri, recalls = tempfile.mkdtemp(), []
for first, last in ((0, 6000), (6000, 7000)):
    vectors = pa.FixedSizeListArray.from_arrays(every[first:last].ravel(), 32)
    table = lance.write_dataset(pa.table({"id": range(first, last), "vector": vectors}), uri, mode="append")
    if first == 0:
        table.create_index("vector", "IVF_PQ", metric="dot", num_partitions=4, num_sub_vectors=8)
    table.optimize.optimize_indices(num_indices_to_merge=0)
    hits = 0
    for query in every[:50]:
        near = table.to_table(nearest={"column": "vector", "q": query, "k": 10, "nprobes": 4})["id"].to_pylist()
        hits += len({*near} & {*np.argsort(-(every[:last] @ query))[:10].tolist()})
    recalls.append(hits / 500)
print("recall before and after:", recalls)
print("FAULT" if recalls[1] < recalls[0] / 2 else "GONE")
