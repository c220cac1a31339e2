"""write_dataset(mode="overwrite") drops the MemWAL index and leaves its regions, which a new index takes up again."""

import tempfile

import lance
import pyarrow as pa

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
REGION, uri, found = "00000000-0000-4000-8000-000000000001", tempfile.mkdtemp(), []
rows = {key: pa.table({"id": [key]}, schema=pa.schema([KEY])) for key in (1, 2, 3)}
lance.write_dataset(rows[1], uri).initialize_mem_wal()
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    writer.put(rows[2])
lance.write_dataset(rows[3], uri, mode="overwrite").initialize_mem_wal()
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    found = sorted(writer.lsm_scanner().to_table()["id"].to_pylist())
print("keys of a table that was overwritten with key 3 alone:", found)
print("FAULT" if found == [2, 3] else "GONE")
