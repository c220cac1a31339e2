"""A ZONEMAP index whose zone has NaN and no other number does not find these rows by a range."""

import tempfile

import lance
import pyarrow as pa

rows = pa.table({"value": [float("nan"), None]})
table = lance.write_dataset(rows, tempfile.mkdtemp())
scanned = table.to_table(filter="value > 2").num_rows
table.create_scalar_index("value", "ZONEMAP")
found = lance.dataset(table.uri).to_table(filter="value > 2").num_rows
print(f"value > 2 finds {found} of the {scanned} rows that a scan finds")
print("GONE" if found == scanned else "FAULT")
