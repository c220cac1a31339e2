"""Rows of IVF_SQ segments that were built apart are not found, together or merged: each has bounds of its own."""

import tempfile

import lance
import numpy as np
import pyarrow as pa

every = np.random.default_rng(1).random((4000, 16), dtype="f4") * np.repeat([[1], [3]], 2000, axis=0).astype("f4")
lists = pa.FixedSizeListArray.from_arrays(every.ravel(), 16)
table = lance.write_dataset(pa.table({"v": lists}), tempfile.mkdtemp(), max_rows_per_file=2000)
ivf = {"metric": "l2", "num_partitions": 2, "ivf_centroids": lists.take([0, 2000]), "name": "n"}
whole, *apart = (table.create_index_uncommitted("v", "IVF_SQ", fragment_ids=f, **ivf) for f in ([0, 1], [0], [1]))
recalls = []
for segments in ([whole], apart, [table.merge_existing_index_segments(apart)]):
    indexed = lance.dataset(table.uri).commit_existing_index_segments("n", "v", segments)
    hits = 0
    for query in every[::40]:
        near = indexed.to_table(nearest={"column": "v", "q": query, "k": 10, "nprobes": 2})["v"]
        least = np.sort(((every - query) ** 2).sum(axis=1))[9] + 1e-6
        hits += sum(((np.array(row) - query) ** 2).sum() <= least for row in near.to_pylist())
    recalls.append(float(hits / 1000))
print("recall of one segment, of two, of these merged:", recalls)
print("FAULT" if max(recalls[1:]) < recalls[0] - 0.2 else "GONE")
