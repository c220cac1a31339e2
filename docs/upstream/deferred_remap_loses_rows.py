"""A compaction after one with ``defer_index_remap`` makes indexes lose rows, if rows were deleted in between.

Expected: a filter finds the same rows before and after it, and without the index.
"""

import tempfile

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": range(400)}), uri, max_rows_per_file=200)
lance.dataset(uri).create_scalar_index("id", "BTREE")
lance.dataset(uri).optimize.compact_files(defer_index_remap=True)
lance.dataset(uri).delete("id % 7 = 0")
before = lance.dataset(uri).to_table(filter="id < 100").num_rows
lance.dataset(uri).optimize.compact_files()
after = lance.dataset(uri).to_table(filter="id < 100").num_rows
scanned = lance.dataset(uri).scanner(filter="id < 100", use_scalar_index=False).to_table().num_rows
print(f"rows found: {before} before, {after} after, {scanned} after without the index")
print("FAULT" if before == scanned != after else "GONE")
