"""A CreateIndex commit with MemWAL details from before a merge is rebased over it, and takes its progress back."""

import tempfile
from dataclasses import replace

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
ROWS, REGION = pa.table({"id": [1]}, schema=pa.schema([KEY])), "00000000-0000-4000-8000-000000000001"
stale = lance.write_dataset(ROWS, tempfile.mkdtemp())
stale.initialize_mem_wal()
(entry,) = stale.read_transaction(stale.version).operation.new_indices
change = lance.LanceOperation.CreateIndex([replace(entry, uuid=REGION)], [entry])
for begun in (False, True):
    merge = lance.dataset(stale.uri).merge_insert("id").when_matched_update_all()
    merge.mark_sstables_as_compacted([CompactedSsTable(REGION, 1)])
    merge.execute(ROWS)  # the second one must fail: generation 1 is merged
    if not begun:
        lance.LanceDataset.commit(stale.uri, change, read_version=stale.version, max_retries=0)
print("FAULT")
