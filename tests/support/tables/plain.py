"""A plain Lance table, written by pylance alone: no MemWAL index, no primary key, and a model of its rows."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

DIMENSION = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)


class PlainTable:
    """The table and the rows that it must have, by id."""

    hour = timedelta(hours=1)

    def __init__(self, uri: str) -> None:
        """Write nothing yet."""
        self.uri = uri
        self.model: dict[int, str] = {}
        self._next = 0

    def create(self, *, fragments: int = 1, rows: int = 10, index: bool = False) -> PlainTable:
        """Write so many fragments, one version each; and a BTREE on ``id``."""
        for _ in range(fragments):
            self.append(rows)
        if index:
            self.dataset.create_scalar_index("id", "BTREE")
        return self

    def create_indexes(self, vector: str = "IVF_PQ") -> PlainTable:
        """Make one index of each kind that a table may have on these columns."""
        for kind in ("BTREE", "BITMAP", "ZONEMAP", "BLOOMFILTER"):
            self.dataset.create_scalar_index("id", kind, name=f"id_{kind.lower()}")
        for kind in ("NGRAM", "INVERTED"):
            self.dataset.create_scalar_index("text", kind, name=f"text_{kind.lower()}")
        quantizer = {"num_sub_vectors": 2, "num_bits": 8} if vector.endswith("PQ") else {}
        self.dataset.create_index("vector", vector, num_partitions=2, name="vector_index", **quantizer)
        return self

    def copy(self, uri: str) -> PlainTable:
        """The same table elsewhere, with a model of its own: nothing in its files tells where they are."""
        made = PlainTable(shutil.copytree(self.uri, uri))
        made.model, made._next = dict(self.model), self._next
        return made

    @property
    def dataset(self) -> lance.LanceDataset:
        """The newest version, opened again."""
        return lance.dataset(self.uri)

    def files(self, folder: str = "") -> set[str]:
        """Paths of all files below the table, or a folder of it."""
        root = Path(self.uri)
        return {str(path.relative_to(root)) for path in (root / folder).rglob("*") if path.is_file()}

    def append(self, rows: int = 1) -> None:
        """Append rows with new ids."""
        ids = range(self._next, self._next + rows)
        self._next += rows
        lance.write_dataset(self.batch(ids), self.uri, mode="append" if self.model else "create")
        self.model |= {number: self.text(number) for number in ids}

    def delete(self, *ids: int) -> None:
        """Delete rows."""
        self.dataset.delete(f"id IN ({', '.join(map(str, ids))})")
        for number in ids:
            del self.model[number]

    def upsert(self, *ids: int, text: str = "changed") -> None:
        """Replace rows, or add them."""
        rows = self.batch(ids).set_column(1, "text", pa.array([text] * len(ids)))
        self.dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
        self.model |= dict.fromkeys(ids, text)
        self._next = max(self._next, max(ids) + 1)

    def update(self, *ids: int, text: str) -> None:
        """Set the text of rows."""
        self.dataset.update({"text": f"'{text}'"}, where=f"id IN ({', '.join(map(str, ids))})")
        self.model |= dict.fromkeys(ids, text)

    def replace_texts(self) -> None:
        """Give each fragment another file for ``text``: rows stay where they are, and their values change."""
        dataset = self.dataset
        dataset.drop_columns(["text"])
        dataset.add_columns({"text": "concat('in place of ', cast(id as string))"})

    def mark_key(self) -> None:
        """Mark ``id`` as the primary key, without which there can be no MemWAL index."""
        self.dataset.update_field_metadata({"id": {"lance-schema:unenforced-primary-key": "true"}})

    def read(self, version: int | str | None = None) -> dict[int, str]:
        """All rows of a version; refuses an id that is there twice."""
        rows = lance.dataset(self.uri, version=version).to_table(columns=["id", "text"])
        found = dict(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))
        assert len(found) == rows.num_rows, "an id is there twice"
        return found

    @staticmethod
    def text(number: int) -> str:
        """The text of a row that was not changed since it was appended."""
        return f"word{number % 7} of {number}"

    @staticmethod
    def batch(ids: Any) -> pa.Table:
        """Rows with these ids; a vector depends on its id alone."""
        numbers = [*ids]
        vectors = np.random.default_rng(5).random((max(numbers, default=0) + 1, DIMENSION), dtype=np.float32)
        flat = pa.array(vectors[numbers].reshape(-1))
        columns = [
            pa.array(numbers, pa.int64()),
            pa.array([PlainTable.text(number) for number in numbers]),
            pa.FixedSizeListArray.from_arrays(flat, DIMENSION),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)
