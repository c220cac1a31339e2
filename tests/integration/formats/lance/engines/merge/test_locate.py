"""The base rows that a pass supersedes, by scan and by index, against a plain reading of the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.engines.merge import locate as module
from memwal_ops.formats.lance.engines.merge.collapse import Winners
from memwal_ops.formats.lance.engines.merge.locate import has_key_index, locate, lookup_keys, scan_keys
from memwal_ops.formats.lance.files.datasets import has_sql_literals

NAMES = [f"o'{number % 3}" for number in range(20)]


def base(path: Path, *, stable: bool = False, index: str | None = None) -> Any:
    """Two fragments of ten rows; the rows with ids 3 and 14 are deleted."""
    rows = pa.table({"id": list(range(20)), "name": NAMES, "payload": [0.5] * 20})
    dataset = lance.write_dataset(rows, path / "t.lance", max_rows_per_file=10, enable_stable_row_ids=stable)
    dataset.delete("id IN (3, 14)")
    if index is not None:
        dataset.create_scalar_index(index, "BTREE")
    return dataset


def winners(keys: dict[str, list[Any]], tombstones: Sequence[bool], *, first_row: int = 5) -> Winners:
    count = len(tombstones)
    rows = np.arange(first_row, first_row + 2 * count, 2, dtype=np.int64)
    table = pa.table(
        {name: pa.array(values, pa.int64() if name == "id" else pa.string()) for name, values in keys.items()}
    )
    return Winners(table, rows, np.array(tombstones, dtype=np.bool_), (), first_row + 2 * count + 3)


def located(dataset: Any, found: Winners, **options: Any) -> Any:
    table: Any = replace(open_table(dataset.uri), primary_key=tuple(found.keys.column_names))
    return locate(table, found, max_bytes=options.pop("max_bytes", 1 << 30))


KEYS: dict[str, dict[str, list[Any]]] = {
    "one": {"id": [15, 3, 99, 0, 7]},
    "text": {"name": ["o'1", "x", "o'0", "o'9", "z"]},
    "two": {"id": [15, 3, 7, 0, 8], "name": [NAMES[15], NAMES[3], "another", NAMES[0], NAMES[8]]},
}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("kind", KEYS)
def test_the_rows_of_the_keys(
    tmp_path: Path, kind: str, stable: bool, index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KEYS[kind]
    monkeypatch.setattr(module, "SCANNED_KEYS_PER_LOOKUP", 1)
    dataset = base(tmp_path, stable=stable, index=next(iter(keys)) if index else None)
    tombstones = [True, False, False, False, True]
    rows = dataset.scanner(with_row_address=True, with_row_id=True).to_table().to_pylist()
    wanted = list(zip(*keys.values(), strict=True))
    hits = [row for row in rows if tuple(row[name] for name in keys) in wanted]
    assert hits
    found_winners = winners(keys, tombstones)
    found = located(dataset, found_winners)
    assert found.addresses.tolist() == sorted(row["_rowaddr"] for row in hits)
    assert found.addresses.dtype == np.uint64
    deleted = [key for key, dead in zip(wanted, tombstones, strict=True) if dead]
    assert found.deleted == sum(tuple(row[name] for name in keys) in deleted for row in hits)
    assert found.use_index is (index and kind != "two")
    if not stable:
        assert found.row_ids is None
    elif kind != "text":  # a key that is in the base twice is refused before
        expected = [-1] * found_winners.rows_read
        for row in hits:
            at = wanted.index(tuple(row[name] for name in keys))
            expected[int(found_winners.rows[at])] = row["_rowid"]
        assert found.row_ids.tolist() == expected
        assert found.row_ids.dtype == np.int64


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("keys", [[], [98, 99]])
def test_keys_that_the_base_does_not_have(tmp_path: Path, keys: list[int], stable: bool) -> None:
    dataset = base(tmp_path, stable=stable)
    found = located(dataset, winners({"id": keys}, [False] * len(keys)))
    assert (found.addresses.tolist(), found.deleted, found.use_index) == ([], 0, False)
    assert found.addresses.dtype == np.uint64
    assert (found.row_ids.tolist() if stable else found.row_ids) == ([-1] * (8 + 2 * len(keys)) if stable else None)


@pytest.mark.parametrize("stable", [False, True])
def test_one_row(tmp_path: Path, stable: bool) -> None:
    dataset = base(tmp_path, stable=stable)
    found = located(dataset, winners({"id": [7]}, [True]))
    assert (found.addresses.tolist(), found.deleted) == ([7], 1)
    [row_id] = dataset.scanner(filter="id = 7", with_row_id=True).to_table()["_rowid"].to_pylist()
    assert (found.row_ids is None) is not stable
    assert not stable or found.row_ids.tolist()[5] == row_id


def test_no_tombstone_deletes_nothing(tmp_path: Path) -> None:
    found = located(base(tmp_path), winners({"id": [1, 2]}, [False, False]))
    assert (found.addresses.tolist(), found.deleted) == ([1, 2], 0)


@pytest.mark.parametrize(
    ("keys", "per_lookup", "most", "cheaper"),
    [(3, 5, 9, True), (3, 6, 9, False), (3, 7, 9, False), (3, 5, 3, True), (3, 5, 2, False), (0, 5, 9, False)],
)
def test_when_the_index_is_cheaper(
    tmp_path: Path, keys: int, per_lookup: int, most: int, cheaper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base has 18 rows."""
    monkeypatch.setattr(module, "SCANNED_KEYS_PER_LOOKUP", per_lookup)
    monkeypatch.setattr(module, "MAX_LOOKUPS", most)
    dataset = base(tmp_path, index="id")
    found = located(dataset, winners({"id": list(range(keys))}, [False] * keys))
    assert found.use_index is cheaper
    assert len(found.addresses) == keys


def test_which_index_is_of_use(tmp_path: Path) -> None:
    def dataset(*indexes: tuple[list[str], str]) -> Any:
        described = [SimpleNamespace(field_names=names, type_url=url) for names, url in indexes]
        return SimpleNamespace(describe_indices=lambda: described)

    btree = "/lance.table.BTreeIndexDetails"
    assert has_key_index(dataset((["x"], "/other"), (["id"], btree)), "id")
    assert not has_key_index(dataset((["x"], btree), (["id"], "/lance.table.BitmapIndexDetails")), "id")
    assert not has_key_index(dataset((["id", "x"], btree)), "id")
    assert not has_key_index(dataset((["i`d"], btree)), "i`d")


@pytest.mark.parametrize(
    ("keys", "has"),
    [
        (pa.array([-(2**63) + 1, 5]), True),
        (pa.array([-(2**63), 5]), False),
        (pa.array([0, 2**64 - 1], pa.uint64()), True),
        (pa.array(["a"]), True),
        (pa.array(["a"], pa.large_string()), True),
        (pa.array([0.5]), False),
        (pa.array([b"a"]), False),
    ],
)
def test_which_keys_sql_can_say(keys: pa.Array, has: bool) -> None:
    assert has_sql_literals(pa.chunked_array([keys])) is has


@pytest.mark.parametrize("stable", [False, True])
def test_what_is_read(tmp_path: Path, stable: bool) -> None:
    dataset = base(tmp_path, stable=stable, index="id")
    columns = {"id", "_rowaddr", *(["_rowid"] if stable else [])}
    batches = [*scan_keys(dataset, ["id"], 1 << 20, stable=stable)]
    assert {name for batch in batches for name in batch.schema.names} == columns
    assert sorted(key for batch in batches for key in batch["id"].to_pylist()) == sorted({*range(20)} - {3, 14})
    [second] = [one for one in dataset.get_fragments() if one.fragment_id == 1]
    batches = [*scan_keys(dataset, ["id"], 1 << 20, stable=stable, fragments=[second])]
    assert sorted(key for batch in batches for key in batch["id"].to_pylist()) == sorted({*range(10, 20)} - {14})
    batches = [*lookup_keys(dataset, "id", pa.chunked_array([[3, 5, 50]]), stable=stable)]
    assert {name for batch in batches for name in batch.schema.names} == columns
    assert [key for batch in batches for key in batch["id"].to_pylist()] == [5]


def test_the_budget_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the memory, but not too little to be worth a join."""
    asked: list[int] = []
    real = module.chunks_with_keys

    def chunks(*rows_and_keys: Any, chunk_bytes: int) -> Any:
        asked.append(chunk_bytes)
        return real(*rows_and_keys, chunk_bytes=chunk_bytes)

    monkeypatch.setattr(module, "chunks_with_keys", chunks)
    dataset = base(tmp_path)
    for max_bytes in (1 << 30, 1):
        located(dataset, winners({"id": [1]}, [False]), max_bytes=max_bytes)
    assert asked == [1 << 26, 4 << 20]
