"""cleanup_old_versions() deletes data before manifests, and returns as usual where the store refuses some of it."""

from datetime import timedelta

import lance
import pyarrow as pa
from small_s3 import SmallS3

store = SmallS3()
for mode in ("create", "overwrite"):
    table = lance.write_dataset(pa.table({"id": [1]}), store.uri, mode=mode, storage_options=store.options)
store.undeletable = "/_versions/"
print(table.cleanup_old_versions(older_than=timedelta(0)))
print("versions that are listed:", [version["version"] for version in table.versions()])
try:
    lance.dataset(store.uri, version=1, storage_options=store.options).to_table()
    print("GONE")
except Exception as error:
    print(error)
    print("FAULT")
