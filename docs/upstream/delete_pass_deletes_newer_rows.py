"""merge_insert(...).when_matched_delete() runs again by itself on a newer version, and takes rows that it never saw."""

import tempfile

import lance
import pyarrow as pa

stale = lance.write_dataset(pa.table({"id": range(10), "val": [0] * 10}), tempfile.mkdtemp())
newer = pa.table({"id": [5], "val": [9]})
lance.dataset(stale.uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(newer)
stale.merge_insert("id").when_matched_delete().execute(pa.table({"id": [5]}))
left = lance.dataset(stale.uri).count_rows("id = 5")
print("rows of key 5, which another writer put after the deletion was planned:", left)
print("FAULT" if left == 0 else "GONE")
