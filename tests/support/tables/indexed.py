"""Tables with indexes of every kind: made, written to, queried by each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.jobs import merge
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

DIMENSION = 8
REGION = UUID("00000000-0000-4000-8000-000000000001")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("kind", pa.string()),
        pa.field("text", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
VECTOR_KINDS = ["IVF_FLAT", "IVF_SQ", "IVF_PQ", "IVF_HNSW_FLAT", "IVF_HNSW_SQ", "IVF_HNSW_PQ", "IVF_RQ"]


def rows(numbers: list[int], stamp: str) -> pa.Table:
    rng = np.random.default_rng(len(stamp) + numbers[0])
    return pa.Table.from_pylist(
        [
            {
                "id": number,
                "kind": f"{stamp}{number % 5}",
                "text": f"{stamp} number{number} word{number % 7}",
                "tags": [stamp, f"t{number % 3}"],
                "vector": (rng.random(DIMENSION, dtype=np.float32) + (3 if stamp == "new" else 0)).tolist(),
            }
            for number in numbers
        ],
        schema=SCHEMA,
    )


def create(uri: str, *, vector: str = "IVF_PQ", options: dict[str, str] | None = None, stable: bool = False) -> str:
    """400 rows and five indexes, all caught up."""
    old = rows(list(range(400)), "old")
    dataset = lance.write_dataset(old, uri, enable_stable_row_ids=stable, storage_options=options)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("kind", "BITMAP")
    dataset.create_scalar_index("tags", "LABEL_LIST")
    dataset.create_scalar_index("text", "INVERTED")
    quantizer = {"num_sub_vectors": 2, "num_bits": 8} if vector.endswith("PQ") else {}
    dataset.create_index("vector", vector, num_partitions=2, **quantizer)
    lance.dataset(uri, storage_options=options).initialize_mem_wal()
    return uri


def write(uri: str, at: int, options: dict[str, str] | None = None) -> None:
    """One generation: 40 updates, 10 new rows, 5 deletes; merged."""
    with lance.dataset(uri, storage_options=options).mem_wal_writer(str(REGION)) as writer:
        writer.put(rows([*range(at * 40, at * 40 + 40), *range(1000 + at * 10, 1010 + at * 10)], "new"))
        writer.delete(pa.table({"id": pa.array(range(at * 40, at * 40 + 5), pa.int64())}))
    merge.apply(open_table(uri, options), merge.MergeOptions())


def expected(generations: int) -> dict[int, str]:
    found = dict.fromkeys(range(400), "old")
    for at in range(generations):
        found |= dict.fromkeys([*range(at * 40, at * 40 + 40), *range(1000 + at * 10, 1010 + at * 10)], "new")
    return {n: s for n, s in found.items() if not (n < generations * 40 and n % 40 < 5)}


def check_queries(uri: str, want: dict[int, str], options: dict[str, str] | None = None) -> None:
    dataset = lance.dataset(uri, storage_options=options)
    everything = {row["id"]: row for row in dataset.to_table().to_pylist()}
    assert {number: row["tags"][0] for number, row in everything.items()} == want

    def ids(**query: Any) -> list[int]:
        return sorted(dataset.to_table(columns=["id"], **query).column("id").to_pylist())

    for number in (2, 7, 50, 120, 399, 1005, 1013, 99999):
        assert ids(filter=f"id = {number}") == ([number] if number in want else [])
    for stamp in ("old", "new"):
        assert ids(filter=f"kind = '{stamp}3'") == sorted(n for n, s in want.items() if s == stamp and n % 5 == 3)
        assert ids(filter=f"array_has(tags, '{stamp}')") == sorted(n for n, s in want.items() if s == stamp)
        assert ids(full_text_query=stamp, limit=1000) == sorted(n for n, s in want.items() if s == stamp)
    for number in (50, 399, 1005):
        if number in want:
            near = {"column": "vector", "q": everything[number]["vector"], "k": 600, "nprobes": 2, "refine_factor": 50}
            found = dataset.to_table(columns=["id"], nearest=near).column("id").to_pylist()
            assert len(set(found)) == len(found), "no row twice"
            assert set(found) <= set(want), "no row that is gone"
            assert found[0] == number


def claims(table: Table) -> dict[str, dict[UUID, int]]:
    return {name: dict(claim) for name, claim in table.index.index_catchup.items()}


def check_claims(table: Table) -> None:
    """Fully covered if and only if said to be."""
    for index in base_indexes(table).values():
        complete = coverage(index.covered, table.manifest).complete
        assert (table.index.index_catchup.get(index.name) == table.index.merged_generations) == complete, index.name
