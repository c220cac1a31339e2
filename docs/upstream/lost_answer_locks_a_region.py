"""A put of a WAL entry whose answer is lost is written again behind itself, and a replay counts the rows twice.

With the writer's own max_memtable_rows the region then cannot be opened any more. Expected: a replay drops what it has
read already, or flushes where the MemTable is full.
"""

import contextlib
import uuid

import lance
import pyarrow as pa
from small_s3 import SmallS3

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
store = SmallS3()
region = str(uuid.uuid4())
lance.write_dataset(SCHEMA.empty_table(), store.uri, storage_options=store.options).initialize_mem_wal()


def opened() -> lance.mem_wal.ShardWriter:
    dataset = lance.dataset(store.uri, storage_options=store.options)
    return dataset.mem_wal_writer(region, max_memtable_rows=100, max_wal_flush_interval_ms=1)


writer = opened()
store.lose = "/wal/"
with contextlib.suppress(OSError):
    writer.put(pa.table({"id": range(60), "val": [0] * 60}, schema=SCHEMA))
try:
    opened()
    print("the region opens")
    print("GONE")
except OSError as error:
    print(str(error)[:200])
    print("FAULT" if "memtable" in str(error) else "GONE")
