"""A put of a WAL entry whose answer is lost is replayed twice: the region may no longer open."""

import contextlib

import lance
import pyarrow as pa
from small_s3 import SmallS3

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
store, schema = SmallS3(), pa.schema([KEY])
lance.write_dataset(schema.empty_table(), store.uri, storage_options=store.options).initialize_mem_wal()
table = lance.dataset(store.uri, storage_options=store.options)
options = {"max_memtable_rows": 100, "max_wal_flush_interval_ms": 1}
writer, store.lose = table.mem_wal_writer("00000000-0000-4000-8000-000000000001", **options), "/wal/"
with contextlib.suppress(OSError):
    writer.put(pa.table({"id": range(60)}, schema=schema))
try:
    table.mem_wal_writer("00000000-0000-4000-8000-000000000001", **options)
    print("GONE")
except OSError as error:
    print(str(error)[:200])
    print("FAULT")
