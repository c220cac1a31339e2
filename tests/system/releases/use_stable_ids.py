"""Make and use a table with stable row ids, with whatever release of pylance runs this.

Nothing of the project is imported: ``python use_stable_ids.py STEP TABLE.lance``.
"""

from __future__ import annotations

import json
import sys
import uuid

import lance
import pyarrow as pa

step, uri = sys.argv[1:3]
REGION = str(uuid.UUID(int=99, version=4))
KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.string())])
ROWS = 8_000


def rows(start: int, end: int, val: str) -> pa.Table:
    """Rows with these ids, all of one value."""
    return pa.table({"id": range(start, end), "val": [val] * (end - start)}, schema=SCHEMA)


def put(start: int, end: int, val: str) -> None:
    """One generation."""
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(rows(start, end, val))


if step == "make":
    lance.write_dataset(rows(0, ROWS, "old"), uri, enable_stable_row_ids=True, max_rows_per_file=ROWS // 8)
    lance.dataset(uri).create_scalar_index("id", "BTREE", name="by_id")
    lance.dataset(uri).initialize_mem_wal()
    put(ROWS, ROWS + 50, "new")
elif step == "compact":
    lance.dataset(uri).delete("id = 3")
    lance.dataset(uri).optimize.compact_files()
    put(100, 120, "changed")
elif step == "optimize":
    lance.dataset(uri).optimize.optimize_indices()
sys.stdout.write(json.dumps({"release": lance.__version__}))
