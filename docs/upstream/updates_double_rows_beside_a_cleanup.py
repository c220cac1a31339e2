"""A commit is rebased over versions that a clean-up deleted, and does not see its conflicts with them."""

import tempfile
from datetime import timedelta

import lance
import pyarrow as pa

stale = lance.write_dataset(pa.table({"id": range(10), "val": [0] * 10}), tempfile.mkdtemp())
lance.dataset(stale.uri).update({"val": "val + 1"}, where="id = 5")
lance.write_dataset(pa.table({"id": [100], "val": [0]}), stale.uri, mode="append")
lance.dataset(stale.uri).cleanup_old_versions(older_than=timedelta(0))
stale.update({"val": "val + 10"}, where="id = 5")
found = lance.dataset(stale.uri).to_table(filter="id = 5").to_pylist()
print("key 5:", found)
print("FAULT" if len(found) > 1 else "GONE")
