"""write_dataset(mode="overwrite") drops the MemWAL index and leaves its regions, which a new index takes up again.

The rows of the table that was overwritten stand in the new one as soon as initialize_mem_wal() is called. Expected:
overwrite clears the regions, or initialize_mem_wal() refuses them.
"""

import tempfile
import uuid

import lance
import pyarrow as pa

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
REGION = str(uuid.uuid4())


def rows(key: int) -> pa.Table:
    return pa.table({"id": [key], "val": [0]}, schema=SCHEMA)


uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(rows(1), uri).initialize_mem_wal()
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    writer.put(rows(2))
lance.write_dataset(rows(3), uri, mode="overwrite").initialize_mem_wal()
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    found = sorted(writer.lsm_scanner().to_table().column("id").to_pylist())
print("keys of a table that was overwritten with key 3 alone:", found)
print("FAULT" if found == [2, 3] else "GONE")
