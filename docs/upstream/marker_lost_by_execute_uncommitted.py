"""merge_insert(...).mark_sstables_as_compacted(...).execute_uncommitted() and commit() drop the marker.

The rows land, the progress does not: the same generation can be merged again, over newer rows. Expected: the
transaction carries the marker, or execute_uncommitted refuses it.
"""

import tempfile
import uuid

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
REGION = str(uuid.uuid4())
uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": [1], "val": [0]}, schema=SCHEMA), uri).initialize_mem_wal()


def marked(val: int) -> tuple:
    builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([CompactedSsTable(REGION, 1)])
    return builder, pa.table({"id": [1], "val": [val]}, schema=SCHEMA)


builder, source = marked(1)
lance.LanceDataset.commit(uri, builder.execute_uncommitted(source)[0])
landed = lance.dataset(uri).to_table().column("val").to_pylist() == [1]
builder, source = marked(2)
try:
    builder.execute(source)
    again = True
except OSError as error:  # "Stale SSTable compaction"
    print(error)
    again = False
print(f"rows of generation 1 landed: {landed}; generation 1 can be merged again: {again}")
print("FAULT" if landed and again else "GONE")
