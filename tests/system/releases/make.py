"""Make the archives of this folder, each in an environment with that release of pylance and nothing of ours:

    pip install pylance==7.0.0 pyarrow; python make.py t.lance; tar czf written-by-7.0.0.tar.gz t.lance t.lance.json

A base table that lost a column in the middle (so that its field ids have a hole), then three generations
with keys that stand several times in one batch and in several batches, and deletes where the release has
them. ``t.lance.json`` is the last write of every key.
"""

import json
import random
import shutil
import sys
import uuid

import lance
import pyarrow as pa

uri = sys.argv[1]
shutil.rmtree(uri, ignore_errors=True)
key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
before = pa.schema([key, *(pa.field(name, pa.string()) for name in "abc")])
after = pa.schema([key, *(pa.field(name, pa.string()) for name in "bc")])


def rows(keys: list[int], tag: str, schema: pa.Schema) -> pa.Table:
    """Rows whose every value tells when and for which key it was written."""
    values = {name: [f"{tag}i{at}-{name}-{k}" for at, k in enumerate(keys)] for name in schema.names if name != "id"}
    return pa.table({"id": pa.array(keys, pa.int64()), **values}, schema=schema)


expected = {}
base = rows(list(range(50)), "base", before)
lance.write_dataset(base, uri)
lance.dataset(uri).drop_columns(["a"])
lance.dataset(uri).initialize_mem_wal()
expected = {row["id"]: {"b": row["b"], "c": row["c"]} for row in base.to_pylist()}
rng = random.Random(1)
region = str(uuid.UUID(int=7, version=4))
for generation in range(3):
    writer = lance.dataset(uri).mem_wal_writer(region)
    for batch in range(4):
        put = rows([rng.randrange(80) for _ in range(12)], f"g{generation}b{batch}", after)
        writer.put(put)
        expected.update({row["id"]: {"b": row["b"], "c": row["c"]} for row in put.to_pylist()})
    if hasattr(writer, "delete"):
        gone = [rng.randrange(80) for _ in range(3)]
        writer.delete(pa.table({"id": pa.array(gone, pa.int64())}))
        for number in gone:
            expected.pop(number, None)
    writer.close()
with open(f"{uri}.json", "w") as out:
    json.dump({str(number): row for number, row in expected.items()}, out)
