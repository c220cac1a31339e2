"""A put of a region manifest whose answer is lost is sent again, finds its own file, and takes it for another writer's.

The writer then puts the same generation behind itself: every later manifest lists it twice. Expected: whoever loses the
race for a version compares what is there with what it wanted to write.
"""

import re
import uuid

import lance
import pyarrow as pa
from small_s3 import SmallS3

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
store = SmallS3()
region = str(uuid.uuid4())
lance.write_dataset(SCHEMA.empty_table(), store.uri, storage_options=store.options).initialize_mem_wal()


def write(key: int, lose: str = "") -> None:
    with lance.dataset(store.uri, storage_options=store.options).mem_wal_writer(region) as writer:
        writer.put(pa.table({"id": [key], "val": [0]}, schema=SCHEMA))
        store.lose = lose


write(1, lose=r"/manifest/.*binpb")
write(2)
manifests = [name for name in store.objects if re.search(r"/manifest/.*binpb$", name)]
# Names are the version's bits in reverse.
newest = max(manifests, key=lambda name: int(name.rsplit("/", 1)[1].removesuffix(".binpb")[::-1], 2))
listed = re.findall(rb"[0-9a-f]{8}_gen_\d+", store.objects[newest])
print("generations in the newest region manifest:", [one.decode() for one in listed])
print("FAULT" if len(listed) > len(set(listed)) else "GONE")
