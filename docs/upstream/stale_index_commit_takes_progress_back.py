"""A CreateIndex commit with MemWAL details from before a merge is rebased over the merge: its progress is taken back.

Whoever changes the details (snapshots, settings) beside a merger makes merged generations count as not merged, after
which their old rows are merged over newer ones. Expected: a conflict, as between two CreateIndex commits.
"""

import tempfile
import uuid

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import Index
from lance.mem_wal import CompactedSsTable

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
REGION = str(uuid.uuid4())
uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": [1], "val": [0]}, schema=SCHEMA), uri).initialize_mem_wal()


def merge(generation: int) -> None:
    builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([CompactedSsTable(REGION, generation)])
    builder.execute(pa.table({"id": [1], "val": [generation]}, schema=SCHEMA))


stale = lance.dataset(uri)
(entry,) = stale.read_transaction(stale.version).operation.new_indices
merge(1)
try:
    merge(1)
    raise SystemExit("GONE: a generation can be merged twice anyway")
except OSError as error:
    print("before:", str(error).split(",")[0])
new = Index(
    uuid=str(uuid.uuid4()), name=entry.name, fields=[], dataset_version=stale.version, fragment_ids=set(),
    index_version=0, index_details=entry.index_details,
)  # fmt: skip
try:
    operation = LanceOperation.CreateIndex([new], [entry])
    lance.LanceDataset.commit(uri, operation, read_version=stale.version, max_retries=0)
    merge(1)
    print("after a CreateIndex commit of older details: generation 1 is merged again")
    print("FAULT")
except OSError as error:
    print(error)
    print("GONE")
