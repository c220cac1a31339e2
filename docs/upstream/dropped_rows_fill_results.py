"""After a compaction of a table with stable row ids, searches return fewer rows than asked for, or none.

The indexes still have the rows that the compaction dropped, which take the places of others among the best k.
Expected: as before the compaction, and as without stable row ids.
"""

import tempfile

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
vectors = pa.FixedSizeListArray.from_arrays(pa.array([float(i // 4) for i in range(400)], pa.float32()), 4)
rows = pa.table({"id": range(100), "text": ["word"] * 100, "vector": vectors})
lance.write_dataset(rows, uri, enable_stable_row_ids=True)
lance.dataset(uri).create_index("vector", "IVF_FLAT", num_partitions=1)
lance.dataset(uri).create_scalar_index("text", "INVERTED")
lance.dataset(uri).delete("id < 20")


def found() -> tuple[int, int]:
    """Rows that both searches return."""
    table = lance.dataset(uri)
    near = table.to_table(nearest={"column": "vector", "q": [0.0] * 4, "k": 10}, columns=["id", "_distance"])
    return near.num_rows, table.to_table(full_text_query="word", limit=10, columns=["id", "_score"]).num_rows


before = found()
lance.dataset(uri).optimize.compact_files()
after = found()
print(f"found by vector and by text, of 10 each: {before} before, {after} after")
print("FAULT" if before == (10, 10) != after else "GONE")
