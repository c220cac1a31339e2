"""optimize_indices() replaces the centroids of a vector index, without being asked to train it again."""

import tempfile

import lance
import numpy as np
import pyarrow as pa

uri, rng, centroids = tempfile.mkdtemp(), np.random.default_rng(1), []
for count, shift in ((1000, 0), *((12_000, 3 * at) for at in range(1, 6))):  # partitions are split at random
    flat = pa.array((rng.standard_normal(count * 8) + shift).astype("f4"))
    table = lance.write_dataset(pa.table({"v": pa.FixedSizeListArray.from_arrays(flat, 8)}), uri, mode="append")
    if shift:
        table.optimize.optimize_indices()
    else:
        table.create_index("v", "IVF_FLAT", num_partitions=4)
    indices = lance.dataset(uri).stats.index_stats("v_idx")["indices"]
    centroids.append({str(center) for index in indices for center in index["centroids"]})
print(
    f"{len(centroids[0])} centroids before, {len(centroids[-1])} after, {len(centroids[0] & centroids[-1])} as before"
)
print("FAULT" if not centroids[-1] <= centroids[0] else "GONE")
