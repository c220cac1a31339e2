"""cleanup_old_versions() deletes through directory links: files of whatever a folder below data/ or _indices/ links to.

Expected: what lies behind a link is not the table's.
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa

folder = Path(tempfile.mkdtemp())
uri = str(folder / "t.lance")
other = folder / "other.lance"
lance.write_dataset(pa.table({"id": [1]}), other)
(kept,) = (other / "data").glob("*.lance")
old = time.time() - 30 * 86400
os.utime(kept, (old, old))
lance.write_dataset(pa.table({"id": [1]}), uri)
os.symlink(other / "data", f"{uri}/data/sub")
lance.write_dataset(pa.table({"id": [2]}), uri, mode="overwrite")
lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
print(f"the data file of another table is there: {kept.exists()}")
print("FAULT" if not kept.exists() else "GONE")
