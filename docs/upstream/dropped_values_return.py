"""Values of a dropped column return from unmerged generations: a column of its name that is added gets its field id."""

import tempfile

import lance
import pyarrow as pa

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
SCHEMA, REGION, uri = pa.schema([KEY, ("val", pa.string())]), "00000000-0000-4000-8000-000000000001", tempfile.mkdtemp()
lance.write_dataset(SCHEMA.empty_table(), uri).initialize_mem_wal()
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    writer.put(pa.table({"id": [2], "val": ["of the dropped column"]}, schema=SCHEMA))
lance.dataset(uri).drop_columns(["val"])
lance.dataset(uri).add_columns(pa.field("val", pa.string()))
with lance.dataset(uri).mem_wal_writer(REGION) as writer:
    (row,) = writer.lsm_scanner().to_table().to_pylist()
print(row)
print("FAULT" if row["val"] is not None else "GONE")
