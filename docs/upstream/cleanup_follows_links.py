"""cleanup_old_versions() deletes through directory links: files of whatever a folder below the table links to."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa

uri, other = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
for folder in (uri, other):
    lance.write_dataset(pa.table({"id": [1]}), folder)
(kept,) = (other / "data").glob("*.lance")
os.utime(kept, (0, 0))
(uri / "data/sub").symlink_to(other / "data")
lance.write_dataset(pa.table({"id": [2]}), uri, mode="overwrite").cleanup_old_versions(older_than=timedelta(0))
print("the data file of another table is there:", kept.exists())
print("FAULT" if not kept.exists() else "GONE")
