"""LanceDataset.commit(LanceOperation.Update(...)) is rebased over an insert of the same new key: it stands twice.

Fragments that overlap are refused; keys that are new on both sides are not compared, though the table has a primary
key. Expected: a conflict where both sides insert, or a way to commit at exactly one version (max_retries=0 rebases).
"""

import tempfile

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.fragment import write_fragments

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
uri = f"{tempfile.mkdtemp()}/t.lance"
old = lance.write_dataset(pa.table({"id": range(10), "val": [0] * 10}, schema=SCHEMA), uri)
new = write_fragments(pa.table({"id": [200], "val": [5]}, schema=SCHEMA), old, mode="append")
source = pa.table({"id": [200], "val": [9]}, schema=SCHEMA)
lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(source)
try:
    lance.LanceDataset.commit(uri, LanceOperation.Update(new_fragments=new), read_version=old.version, max_retries=0)
except Exception as error:
    print(error)
found = sorted(lance.dataset(uri).to_table(filter="id = 200").column("val").to_pylist())
print("key 200:", found)
print("FAULT" if found == [5, 9] else "GONE")
