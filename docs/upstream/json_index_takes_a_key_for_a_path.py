"""A condition on a JSON key that has a dot is true for other rows with an index on that path than without it."""

import tempfile

import lance
import pyarrow as pa
from lance.indices import IndexConfig

documents = pa.array([f'{{"y": {{"z": "s{n % 5}"}}}}' for n in range(1000)], pa.json_())
table = lance.write_dataset(pa.table({"document": documents}), tempfile.mkdtemp())
condition = "json_get_string(document, 'y.z') = 's3'"
scanned = table.count_rows(condition)
table.create_scalar_index("document", IndexConfig("json", {"target_index_type": "bitmap", "path": "y.z"}), name="p")
indexed = table.count_rows(condition)
print(f"rows that match: {scanned} by a scan, {indexed} by the index")
print("FAULT" if scanned != indexed else "GONE")
