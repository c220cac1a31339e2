"""An index that is updated while its column is dropped stays, and every query with a filter fails."""

import tempfile

import lance
import pyarrow as pa

rows = pa.table({"id": range(100), "text": [f"word {number}" for number in range(100)]})
table = lance.write_dataset(rows, tempfile.mkdtemp())
table.create_scalar_index("text", "BTREE")
beside = lance.write_dataset(rows, table.uri, mode="append")
lance.dataset(table.uri).drop_columns(["text"])
beside.optimize.optimize_indices()
try:
    print(lance.dataset(table.uri).to_table(filter="id = 5").num_rows, "rows")
    print("GONE")
except Exception as error:
    print(error)
    print("FAULT")
