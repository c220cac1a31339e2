"""Rows of merged segments of an IVF_SQ (or IVF_HNSW_SQ) index are not found, and nothing fails.

Each segment is quantized by the bounds of its own rows, as `create_index_uncommitted` takes none. A search of both
segments, and `merge_existing_index_segments`, read the codes of all by the bounds of one. Expected: an error, or codes
made anew, or a way to give the bounds, as there is for centroids and codebooks.
"""

import tempfile

import lance
import numpy as np
import pyarrow as pa

ROWS, DIMENSION, NEAREST = 2000, 16, 10
uri = f"{tempfile.mkdtemp()}/t.lance"
random = np.random.default_rng(1)
parts = [scale * random.random((ROWS, DIMENSION), dtype=np.float32) for scale in (1, 3)]
for vectors in parts:
    column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), DIMENSION)
    lance.write_dataset(pa.table({"vector": column}), uri, mode="append")
dataset = lance.dataset(uri)
every = np.concatenate(parts)
centroids = pa.FixedSizeListArray.from_arrays(every[:: ROWS // 2].ravel(), DIMENSION)
options = {"metric": "l2", "num_partitions": len(centroids), "ivf_centroids": centroids}


def built(*fragments: int) -> lance.Index:
    return dataset.create_index_uncommitted("vector", "IVF_SQ", name="v", fragment_ids=[*fragments], **options)


def recall(committed: list) -> float:
    """The share of the nearest rows that a search of all partitions finds."""
    indexed = lance.dataset(uri).commit_existing_index_segments("v", "vector", committed)
    found = 0
    asked = range(0, len(every), 40)
    for at in asked:
        nearest = np.argsort(((every - every[at]) ** 2).sum(axis=1))[:NEAREST]
        query = {"column": "vector", "q": every[at], "k": NEAREST, "nprobes": len(centroids)}
        hits = indexed.to_table(columns=[], nearest=query, with_row_id=True, disable_scoring_autoprojection=True)[
            "_rowid"
        ].to_numpy()
        found += len(np.intersect1d((hits >> 32) * ROWS + (hits & 0xFFFFFFFF), nearest))
    return found / (len(asked) * NEAREST)


segments = [built(0), built(1)]
whole, apart = recall([built(0, 1)]), recall(segments)
merged = recall([dataset.merge_existing_index_segments(segments)])
print(f"recall of one segment {whole:.3f}, of two {apart:.3f}, of these merged {merged:.3f}")
print("FAULT" if min(apart, merged) < whole - 0.2 else "GONE")
