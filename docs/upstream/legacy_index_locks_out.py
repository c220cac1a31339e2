"""A MemWAL index of Lance 0.31 to 1.x stops every write: append, merge_insert, update, delete, indexes.

Its details have the same type URL as today's, and another meaning of field 1, so that no commit decodes them. Expected:
commits that have nothing to do with the index keep it as it is; or a message that says which index to drop.
"""

import tempfile
import uuid

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import Index

uri = f"{tempfile.mkdtemp()}/t.lance"
rows = pa.table({"id": [1], "val": [0]})
dataset = lance.write_dataset(rows, uri)
# MemWalIndexDetails of then: mem_wal_list { id { region: "r", generation: 0 }, locations, entries, state: OPEN, owner }
mem_wal = b"\x0a\x05\x0a\x01r\x10\x00\x12\x0cmemory://r/0\x1a\x07wal/r/0\x22\x02\x0a\x00\x32\x05owner\x38\x01"
details = b"\x0a" + bytes([len(mem_wal)]) + mem_wal
index = Index(
    uuid=str(uuid.uuid4()), name="__lance_mem_wal", fields=[], dataset_version=dataset.version, fragment_ids=set(),
    index_version=0, index_details=("/lance.table.MemWalIndexDetails", details),
)  # fmt: skip
lance.LanceDataset.commit(uri, LanceOperation.CreateIndex([index], []), read_version=dataset.version)
refused = 0
for name, write in {
    "append": lambda: lance.write_dataset(rows, uri, mode="append"),
    "merge_insert": lambda: lance.dataset(uri).merge_insert("id").when_not_matched_insert_all().execute(rows),
    "delete": lambda: lance.dataset(uri).delete("id = 1"),
    "update": lambda: lance.dataset(uri).update({"val": "1"}),
    "create_scalar_index": lambda: lance.dataset(uri).create_scalar_index("id", "BTREE"),
}.items():
    try:
        write()
        print(f"{name}: goes through")
    except Exception as error:
        refused += 1
        print(f"{name}: {str(error).splitlines()[0][:160]}")
print("FAULT" if refused == 5 else "GONE")
