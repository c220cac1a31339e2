"""merge_insert with an SSTable marker is rebased over merges that it never saw: keys stand twice, deleted keys return.

Expected: a conflict, as each of the two was computed from a base that the other one changed.
"""

import tempfile
import uuid

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.int64())])
REGION = str(uuid.uuid4())


def rows(first: int, end: int, val: int) -> pa.Table:
    return pa.table({"id": range(first, end), "val": [val] * (end - first)}, schema=SCHEMA)


def make() -> str:
    uri = f"{tempfile.mkdtemp()}/t.lance"
    dataset = lance.write_dataset(rows(0, 100, 0), uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.initialize_mem_wal(unsharded=True)
    return uri


def merge(dataset: lance.LanceDataset, source: pa.Table, generation: int, *, use_index: bool = True) -> None:
    builder = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([CompactedSsTable(REGION, generation)])
    builder.use_index(use_index).execute(source)


def values(uri: str, key: int) -> list[int]:
    found: list[int] = lance.dataset(uri).to_table(filter=f"id = {key}").column("val").to_pylist()
    return sorted(found)


# Two mergers that insert the same new key, through the key index.
uri = make()
stale = lance.dataset(uri)
merge(lance.dataset(uri), rows(200, 201, 1), 3)
merge(stale, rows(200, 201, 2), 5)
twice = values(uri, 200)
print("key 200 after merges of generations 3 and 5:", twice)

# Merger A reads generations 1 to 5, of which 2 has a put of key 200 and 4 its deletion: it has nothing to do for
# that key. Meanwhile B merges 1 to 3. A's merge, of another key, lands all the same, and says that 5 is merged.
uri = make()
stale = lance.dataset(uri)
merge(lance.dataset(uri), rows(200, 201, 1), 3, use_index=False)
merge(stale, rows(300, 301, 2), 5, use_index=False)
returned = values(uri, 200)
print("key 200, deleted in generation 4, after generation 5 was merged:", returned)
print("FAULT" if twice == [1, 2] and returned == [1] else "GONE")
