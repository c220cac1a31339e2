"""The transaction of a compaction that rewrote an index cannot be read.

``RewrittenIndex`` has five fields, and is made of two. Expected: the transaction.
"""

import tempfile

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
for _ in range(2):
    table = lance.write_dataset(pa.table({"id": range(100)}), uri, mode="append")
table.create_scalar_index("id", "BTREE")
table.optimize.compact_files()
try:
    print(table.read_transaction(table.version))
    fault = False
except TypeError as error:
    print(error)
    fault = "RewrittenIndex" in str(error)
print("FAULT" if fault else "GONE")
