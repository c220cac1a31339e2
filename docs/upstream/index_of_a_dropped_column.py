"""An index that is updated while its column is dropped stays, and every query with a filter fails.

The commit of the index is rebased over the removal of the column. Expected: a conflict.
"""

import tempfile

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
rows = pa.table({"id": range(100), "text": [f"word {number}" for number in range(100)]})
lance.write_dataset(rows, uri).create_scalar_index("text", "BTREE")
lance.write_dataset(rows, uri, mode="append")
beside = lance.dataset(uri)
lance.dataset(uri).drop_columns(["text"])
try:
    beside.optimize.optimize_indices()
    print(lance.dataset(uri).to_table(filter="id = 5").num_rows)
    fault = False
except Exception as error:
    print(error)
    fault = "did not exist in the schema" in str(error)
print("FAULT" if fault else "GONE")
