"""A MemWAL index of Lance 0.31 to 1.x stops every write: its details have today's type and another first field."""

import tempfile

import lance
import pyarrow as pa
from lance.dataset import Index

table = lance.write_dataset(pa.table({"id": [1]}), tempfile.mkdtemp())
# mem_wal_list { id { region: "r", generation: 0 }, mem_table_location, wal_location, entries, state: OPEN, owner_id }
wal = b"\x0a\x05\x0a\x01r\x10\x00\x12\x0cmemory://r/0\x1a\x07wal/r/0\x22\x02\x0a\x00\x32\x05owner\x38\x01"
details = ("/lance.table.MemWalIndexDetails", b"\x0a" + bytes([len(wal)]) + wal)
index = Index("00000000-0000-4000-8000-000000000001", "__lance_mem_wal", [], 1, set(), 0, index_details=details)
lance.LanceDataset.commit(table.uri, lance.LanceOperation.CreateIndex([index], []), read_version=1)
try:
    lance.write_dataset(pa.table({"id": [2]}), table.uri, mode="append")
    print("GONE")
except Exception as error:
    print(error)
    print("FAULT")
