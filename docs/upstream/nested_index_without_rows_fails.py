"""optimize_indices() fails for all indexes once every row under an index of a nested field was rewritten."""

import tempfile

import lance
import pyarrow as pa

outer = pa.StructArray.from_arrays([pa.array(range(100))], ["inner"])
table = lance.write_dataset(pa.table({"outer": outer, "other": range(100)}), tempfile.mkdtemp())
table.create_scalar_index("outer.inner", "BTREE", name="by_inner")
table.update({"other": "other + 1"})
try:
    table.optimize.optimize_indices()
    print("GONE")
except Exception as error:
    print(error)
    print("FAULT")
