"""Values of a dropped column return from unmerged generations when a column of that name is added again.

Lance gives the new column the id of the old one. Expected: a field id is never given twice, or readers ask when the
column was made.
"""

import tempfile
import uuid

import lance
import pyarrow as pa

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.string())])
uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(SCHEMA.empty_table(), uri).initialize_mem_wal()  # or: none of its fragments has the column any more
region = str(uuid.uuid4())
with lance.dataset(uri).mem_wal_writer(region) as writer:
    writer.put(pa.table({"id": [2], "val": ["of the dropped column"]}, schema=SCHEMA))
lance.dataset(uri).drop_columns(["val"])
lance.dataset(uri).add_columns(pa.field("val", pa.string()))
with lance.dataset(uri).mem_wal_writer(region) as writer:
    (row,) = writer.lsm_scanner().to_table().to_pylist()
print(row)
print("FAULT" if row["val"] is not None else "GONE")
