"""The transaction of a compaction that rewrote an index cannot be read: three of five fields are missing."""

import tempfile

import lance
import pyarrow as pa

uri = tempfile.mkdtemp()
for _ in range(2):
    table = lance.write_dataset(pa.table({"id": range(100)}), uri, mode="append")
table.create_scalar_index("id", "BTREE")
table.optimize.compact_files()
try:
    print(table.read_transaction(table.version))
    print("GONE")
except TypeError as error:
    print(error)
    print("FAULT")
