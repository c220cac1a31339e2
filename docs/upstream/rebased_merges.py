"""Merges with an SSTable marker are rebased over others that they never saw: keys stand twice, deleted keys return."""

import tempfile

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
SCHEMA, REGION, seen = pa.schema([KEY, ("val", pa.int64())]), "00000000-0000-4000-8000-000000000001", []
# Generation 3 puts key 200, 4 deletes it. A merger of 1 to 5 begins before 3 is merged: 5 puts key 200, or another one.
for key, index in ((200, True), (300, False)):
    dataset = lance.write_dataset(pa.table({"id": [1], "val": [0]}, schema=SCHEMA), tempfile.mkdtemp())
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal(unsharded=True)
    for handle, generation, put in ((lance.dataset(dataset.uri), 3, 200), (dataset, 5, key)):
        merge = handle.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(index)
        merge.mark_sstables_as_compacted([CompactedSsTable(REGION, generation)])
        merge.execute(pa.table({"id": [put], "val": [generation]}, schema=SCHEMA))
    seen.append(sorted(lance.dataset(dataset.uri).to_table(filter="id = 200")["val"].to_pylist()))
print("key 200, put twice and deleted:", seen)
print("FAULT" if seen == [[3, 5], [3]] else "GONE")
