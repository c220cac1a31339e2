"""A put of a region manifest whose answer is lost lists its generation twice in every later manifest."""

import re

import lance
import pyarrow as pa
from small_s3 import SmallS3

KEY = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
store, schema = SmallS3(), pa.schema([KEY])
lance.write_dataset(schema.empty_table(), store.uri, storage_options=store.options).initialize_mem_wal()
for key, lose in ((1, r"/manifest/.*binpb"), (2, "")):
    table = lance.dataset(store.uri, storage_options=store.options)
    with table.mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        writer.put(pa.table({"id": [key]}, schema=schema))
        store.lose = lose
manifests = [content for name, content in store.objects.items() if re.search(r"/manifest/.*binpb$", name)]
listed = max((re.findall(rb"[0-9a-f]{8}_gen_\d+", content) for content in manifests), key=len)
print("generations in the longest region manifest:", listed)
print("FAULT" if len(listed) > len(set(listed)) else "GONE")
