"""merge_insert(...).mark_sstables_as_compacted(...).execute_uncommitted() and commit() drop the marker of progress."""

import tempfile

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
ROWS, REGION = pa.table({"id": [1]}, schema=pa.schema([KEY])), "00000000-0000-4000-8000-000000000001"
dataset = lance.write_dataset(ROWS, tempfile.mkdtemp())
dataset.initialize_mem_wal()
for committed in (False, True):
    merge = lance.dataset(dataset.uri).merge_insert("id").when_matched_update_all()
    merge.mark_sstables_as_compacted([CompactedSsTable(REGION, 1)])
    if committed:
        merge.execute(ROWS)  # must fail: generation 1 is merged
    else:
        lance.LanceDataset.commit(dataset.uri, merge.execute_uncommitted(ROWS)[0])
print("FAULT")
