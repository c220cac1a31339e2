"""After a compaction of a shallow clone or of a branch, every query that uses an index fails."""

import tempfile

import lance
import pyarrow as pa

source, clone = tempfile.mkdtemp(), tempfile.mkdtemp()
table = lance.write_dataset(pa.table({"id": range(100)}), source, max_rows_per_file=50)
table.create_scalar_index("id", "BTREE")
table.shallow_clone(clone, table.version)
table.create_branch("b")
faults = 0
for copy in (clone, f"{source}/tree/b"):
    lance.dataset(copy).optimize.compact_files()
    try:
        print(lance.dataset(copy).to_table(filter="id = 7").num_rows, "row")
    except Exception as error:
        print(error)
        faults += 1
print("FAULT" if faults == 2 else "GONE")
