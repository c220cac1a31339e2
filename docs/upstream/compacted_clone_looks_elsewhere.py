"""After a compaction of a shallow clone or of a branch, every query that uses an index fails.

The remapped index is written into the clone or the branch, and its entry still says that it is in the source. Expected:
a query finds it.
"""

import tempfile

import lance
import pyarrow as pa

folder = tempfile.mkdtemp()
source, clone = f"{folder}/source.lance", f"{folder}/clone.lance"
lance.write_dataset(pa.table({"id": range(100)}), source, max_rows_per_file=50).create_scalar_index("id", "BTREE")
lance.dataset(source).shallow_clone(clone, lance.dataset(source).version)
lance.dataset(source).create_branch("b")
faults = []
for name, copy in (("clone", lance.dataset(clone)), ("branch", lance.dataset(f"{source}/tree/b"))):
    print(name, copy.to_table(filter="id = 7").num_rows)
    copy.optimize.compact_files()
    try:
        print(name, lance.dataset(copy.uri).to_table(filter="id = 7").num_rows)
    except Exception as error:
        print(error)
        faults.append("source.lance/_indices" in str(error))
print("FAULT" if faults == [True, True] else "GONE")
