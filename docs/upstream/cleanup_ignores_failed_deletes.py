"""cleanup_old_versions() deletes the data of a version before its manifest, and returns as if all went well.

Where the store refuses to delete manifests, versions that are listed cannot be read any more; a figure in CleanupStats
is all that says so. Expected: manifests first, and an error where a deletion failed.
"""

from datetime import timedelta

import lance
import pyarrow as pa
from small_s3 import SmallS3

store = SmallS3()
for number in range(3):
    rows = pa.table({"id": [number]})
    lance.write_dataset(rows, store.uri, mode="overwrite" if number else "create", storage_options=store.options)
store.undeletable = "/_versions/"
stats = None
try:
    stats = lance.dataset(store.uri, storage_options=store.options).cleanup_old_versions(older_than=timedelta(0))
    print(stats)
except OSError as error:
    print("cleanup_old_versions raised:", str(error)[:160])
broken = []
for one in lance.dataset(store.uri, storage_options=store.options).versions():
    try:
        lance.dataset(store.uri, version=one["version"], storage_options=store.options).to_table()
    except Exception as error:
        broken.append(one["version"])
        print(f"version {one['version']} is listed and not readable: {str(error)[:120]}")
print("FAULT" if stats is not None and broken else "GONE")
