"""After a compaction of a table with stable row ids, dropped rows take places in results of searches."""

import tempfile

import lance
import pyarrow as pa

vectors = pa.FixedSizeListArray.from_arrays(pa.array([float(i // 4) for i in range(400)], pa.float32()), 4)
rows = pa.table({"id": range(100), "text": ["word"] * 100, "vector": vectors})
table = lance.write_dataset(rows, tempfile.mkdtemp(), enable_stable_row_ids=True)
table.create_index("vector", "IVF_FLAT", num_partitions=1)
table.create_scalar_index("text", "INVERTED")
table.delete("id < 20")
table.optimize.compact_files()
table = lance.dataset(table.uri)
near = table.to_table(nearest={"column": "vector", "q": [0.0] * 4, "k": 10}, columns=["id", "_distance"]).num_rows
text = table.to_table(full_text_query="word", limit=10, columns=["id", "_score"]).num_rows
print(f"of 10 rows that were asked for: {near} by vector, {text} by text")
print("FAULT" if near < 10 or text < 10 else "GONE")
