"""Make, hold and read a table with an older release of pylance alone: ``python use_legacy.py STEP TABLE.lance``.

Each step prints one line of JSON; ``hold`` opens the table, waits for a line on stdin, and then appends with the
version that it opened.
"""

from __future__ import annotations

import json
import sys

import lance
import pyarrow as pa

step, uri = sys.argv[1:3]


def rows(values: dict[int, float]) -> pa.Table:
    """Rows by key."""
    return pa.table({"id": pa.array([*values], pa.int64()), "val": pa.array([*values.values()], pa.float64())})


def read() -> dict[str, float]:
    """All rows; a key that is there twice fails."""
    found = lance.dataset(uri).to_table().to_pydict()
    assert len({*found["id"]}) == len(found["id"])
    return {str(key): value for key, value in zip(found["id"], found["val"])}  # noqa: B905 - as the others


answer: dict[str, object] = {"release": lance.__version__}
if step == "make":
    lance.write_dataset(rows({number: float(number) for number in range(20)}), uri)
    lance.write_dataset(rows({20: 20.0}), uri, mode="append")
    lance.dataset(uri).delete("id = 5")
    lance.dataset(uri).create_scalar_index("id", "BTREE")
elif step == "hold":
    held = lance.dataset(uri)
    sys.stdout.write(json.dumps({"version": held.version}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        held.insert(rows({900: 9.0}))
        answer["appended"] = True
    except Exception as error:
        answer["refused"] = str(error)
elif step == "upsert":
    merge = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(rows({901: 9.0, 1: 7.0}))
    answer["indexes"] = [one["name"] for one in lance.dataset(uri).list_indices()]
answer["rows"] = read()
sys.stdout.write(json.dumps(answer))
