"""After a compaction of a shallow clone, every query that uses an index fails.

The remapped index is written into the clone, and its entry still says that it is in the source. Expected: a query
finds it.
"""

import tempfile

import lance
import pyarrow as pa

folder = tempfile.mkdtemp()
source, clone = f"{folder}/source.lance", f"{folder}/clone.lance"
lance.write_dataset(pa.table({"id": range(100)}), source, max_rows_per_file=50).create_scalar_index("id", "BTREE")
lance.dataset(source).shallow_clone(clone, lance.dataset(source).version)
print(lance.dataset(clone).to_table(filter="id = 7").num_rows)
lance.dataset(clone).optimize.compact_files()
try:
    print(lance.dataset(clone).to_table(filter="id = 7").num_rows)
    fault = False
except Exception as error:
    print(error)
    fault = "source.lance/_indices" in str(error)
print("FAULT" if fault else "GONE")
