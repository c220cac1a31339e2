"""A commit of LanceOperation.Update is rebased over an insert of the same new key, by max_retries=0 too."""

import tempfile

import lance
import pyarrow as pa
from lance.fragment import write_fragments

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
old = lance.write_dataset(pa.table({"id": [1]}, schema=pa.schema([KEY])), tempfile.mkdtemp())
rows = pa.table({"id": [200]}, schema=pa.schema([KEY]))
new = write_fragments(rows, old, mode="append")
lance.dataset(old.uri).merge_insert("id").when_not_matched_insert_all().execute(rows)
update = lance.LanceOperation.Update(new_fragments=new)
lance.LanceDataset.commit(old.uri, update, read_version=old.version, max_retries=0)
found = lance.dataset(old.uri).count_rows("id = 200")
print("rows with key 200:", found)
print("FAULT" if found == 2 else "GONE")
