"""Use a table as its owner would, with whatever release of pylance runs this, and say what worked.

Nothing of the project is imported: ``python use.py TABLE.lance EXPECTED.json`` runs in an
environment with pylance alone. EXPECTED.json is ``{"rows": {key: val}, "versions": {version: rows}}``;
the document on stdout has a step's name and ``ok``, or what went wrong.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from datetime import timedelta

import lance
import pyarrow as pa

uri = sys.argv[1]
with open(sys.argv[2]) as said:
    expected = json.load(said)
rows: dict[int, float] = {int(key): value for key, value in expected["rows"].items()}
said_by: dict[str, str] = {}


def step(action: Callable[[], None]) -> None:
    """Run a step, then read the whole table."""
    try:
        action()
        found = lance.dataset(uri).to_table(columns=["id", "val"]).to_pydict()
        assert len(found["id"]) == len(rows), f"{len(found['id'])} rows for {len(rows)}"
        assert dict(zip(found["id"], found["val"], strict=True)) == rows, "other values"
    except BaseException as error:
        said_by[action.__name__] = f"{type(error).__name__}: {error}"
    else:
        said_by[action.__name__] = "ok"


def scan() -> None:
    """Nothing beyond what every step does."""


def query() -> None:
    """By the index on the key."""
    for key in [*rows][:20]:
        assert lance.dataset(uri).count_rows(f"id = {key}") == 1


def time_travel() -> None:
    """Every version reads."""
    for version, count in expected["versions"].items():
        assert lance.dataset(uri, version=int(version)).count_rows() == count


def _marked(builder: object, generation: int) -> None:
    region = str(uuid.UUID(int=99, version=4))
    import lance.mem_wal as names

    if hasattr(builder, "mark_sstables_as_compacted"):
        builder.mark_sstables_as_compacted([names.CompactedSsTable(region, generation)])
    else:
        builder.mark_generations_as_merged([names.MergedGeneration(region, generation)])  # type: ignore[attr-defined]


def merge() -> None:
    """An upsert that carries merge progress."""
    schema = lance.dataset(uri).schema
    key = min(rows)
    for generation, new in ((1, {key: -1.0, 10**15: -2.0}), (2, {10**15: -3.0})):
        table = pa.Table.from_pylist([{"id": one, "val": value} for one, value in new.items()], schema=schema)
        builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        _marked(builder, generation)
        builder.execute(table)
        rows.update(new)


def a_stale_merge_is_refused() -> None:
    """The release's own conflict check sees the progress."""
    builder = lance.dataset(uri).merge_insert("id").when_matched_update_all()
    _marked(builder, 2)
    table = lance.dataset(uri).to_table(limit=1)
    try:
        builder.execute(table)
    except OSError:
        return
    raise AssertionError("it was accepted")


def append() -> None:
    """A plain commit."""
    row = {"id": 10**15 + 1, "val": -4.0}
    lance.write_dataset(pa.Table.from_pylist([row], schema=lance.dataset(uri).schema), uri, mode="append")
    rows[row["id"]] = row["val"]


def create_index() -> None:
    """A new one beside ours."""
    lance.dataset(uri).create_scalar_index("val", "BTREE", replace=True)


def optimize_indices() -> None:
    """Bring all of them up to date."""
    lance.dataset(uri).optimize.optimize_indices()


def delete() -> None:
    """Rows by a filter."""
    lance.dataset(uri).delete(f"id = {10**15 + 1}")
    del rows[10**15 + 1]


def compact() -> None:
    """Rewrite the fragments."""
    lance.dataset(uri).optimize.compact_files()


def write_through_mem_wal() -> None:
    """A writer opens a region, and what it wrote is flushed beside the base."""
    with lance.dataset(uri).mem_wal_writer(str(uuid.UUID(int=98, version=4))) as writer:
        writer.put(pa.Table.from_pylist([{"id": 5, "val": 1.0}], schema=lance.dataset(uri).schema))


def clean_up() -> None:
    """Remove old versions."""
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))


for action in (
    *(scan, query, time_travel, merge, a_stale_merge_is_refused, append, create_index, optimize_indices, query),
    *(delete, compact, write_through_mem_wal, clean_up, query),
):
    step(action)
sys.stdout.write(json.dumps({"release": lance.__version__, "steps": said_by}) + "\n")
