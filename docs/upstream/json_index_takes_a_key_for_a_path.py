"""A condition on a JSON key that has a dot is true for other rows with an index on that path than without it.

Expected: ``json_get_string(document, 'y.z')`` is the value of the key ``y.z``, as a scan computes it, whatever indexes
there are; or the path in both.
"""

import tempfile

import lance
import pyarrow as pa
from lance.indices import IndexConfig

CONDITION = "json_get_string(document, 'y.z') = 's3'"

with tempfile.TemporaryDirectory() as folder:
    documents = pa.array([f'{{"y": {{"z": "s{n % 5}"}}}}' for n in range(1000)], pa.json_())
    dataset = lance.write_dataset(pa.table({"document": documents}), f"{folder}/t.lance")
    without = dataset.count_rows(CONDITION)
    config = IndexConfig("json", {"target_index_type": "bitmap", "path": "y.z"})
    dataset.create_scalar_index("document", config, name="by_path")
    with_index = dataset.count_rows(CONDITION)

print(f"rows that match: {without} by a scan, {with_index} by the index")
print("FAULT" if without != with_index else "GONE")
