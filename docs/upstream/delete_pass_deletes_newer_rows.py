"""merge_insert(...).when_matched_delete() runs again by itself on a version that it was not made for.

A key is deleted by a handle that is one version old; another writer has just put that key anew. With its default
retries the deletion takes the new row. Expected: a conflict for the caller, who alone knows which of the two is newer.
"""

import tempfile

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": range(10), "val": [0] * 10}), uri)
stale = lance.dataset(uri)
newer = pa.table({"id": [5], "val": [9]})
lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(newer)
stale.merge_insert("id").when_matched_delete().execute(pa.table({"id": [5]}))
left = lance.dataset(uri).to_table(filter="id = 5").column("val").to_pylist()
print("key 5, which another writer put after the deletion was planned:", left)
print("FAULT" if left == [] else "GONE")
