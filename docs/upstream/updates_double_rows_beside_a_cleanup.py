"""A commit that is rebased passes over versions that a clean-up took: conflicts with them are not seen.

An update from a handle that is two versions old; the version in between, which changed the same row, was cleaned up
(the newest always stays). The row stands twice. Expected: a conflict, or an error that says that the history is gone.
"""

import tempfile
from datetime import timedelta

import lance
import pyarrow as pa

uri = f"{tempfile.mkdtemp()}/t.lance"
lance.write_dataset(pa.table({"id": range(10), "val": [0] * 10}), uri)
stale = lance.dataset(uri)
lance.dataset(uri).update({"val": "val + 1"}, where="id = 5")
lance.write_dataset(pa.table({"id": [100], "val": [0]}), uri, mode="append")
lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
try:
    stale.update({"val": "val + 10"}, where="id = 5")
except Exception as error:
    print(error)
found = lance.dataset(uri).to_table(filter="id = 5").to_pylist()
print("key 5:", found)
print("FAULT" if len(found) > 1 else "GONE")
