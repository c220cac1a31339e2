"""The tables of the benchmark: their rows, indexes, and what is written to them in a round.

What is written in a round depends on its number alone, so that all ways maintain the same table.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

from benchmarks.plain import DIMENSION, rows as vector_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]

REGION = str(uuid.UUID(int=1, version=4))
_TEXT = 24
# In each day, rows of the days before are deleted, and others replaced; the shape with upserts does so in each round.
_CHANGED = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """A table and what is written to it.

    Attributes:
        name: as printed, and part of the names of charts.
        rows: rows that it begins with.
        month: rows that are appended in 30 days.
        wide: bytes of one more column; 0: none.
        vectors: whether rows have vectors and texts, with indexes of them.
        upserts: half of what is written in a round replaces rows.
        log: written by a MemWAL writer, half of it replacing rows.
    """

    name: str
    rows: int
    month: int
    wide: int = 0
    vectors: bool = False
    upserts: bool = False
    log: bool = False

    @property
    def slug(self) -> str:
        """Its name in that of a file."""
        return self.name.lower().replace(" ", "-")

    @property
    def title(self) -> str:
        """What the headings of its tables say."""
        begun = f"{self.rows:,} rows, {self.month:,} more in the month"
        return f"{self.name}: {begun}" + (", half as many replaced" if self.upserts or self.log else "")


SHAPES = (
    Shape("narrow rows", 100_000, 100_000),
    Shape("rows of 100 KB", 300, 300, wide=100_000),
    Shape("vectors and texts", 30_000, 15_000, vectors=True),
    Shape("upserts", 100_000, 50_000, upserts=True),
    Shape("MemWAL", 100_000, 50_000, log=True),
)
SHORT = (
    Shape("narrow rows", 2_000, 600),
    Shape("rows of 100 KB", 20, 20, wide=100_000),
    Shape("vectors and texts", 3_000, 600, vectors=True),
    Shape("upserts", 2_000, 600, upserts=True),
    Shape("MemWAL", 2_000, 600, log=True),
)


@dataclass(slots=True)
class Writer:
    """Writes to one table.

    Attributes:
        appended: Arrow bytes of the rows that were written since the table was made.
    """

    shape: Shape
    uri: str
    options: dict[str, str]
    rounds: int
    a_day: int
    appended: int = 0
    next_id: int = 0

    def make(self) -> None:
        """The table with its first rows and its indexes."""
        shape = self.shape
        dataset = lance.write_dataset(rows(shape, np.arange(shape.rows), 0), self.uri, storage_options=self.options)
        index(shape, dataset)
        if shape.log:
            dataset.initialize_mem_wal()
        self.next_id = shape.rows

    def write(self, number: int) -> None:
        """What is written in a round; rounds count from 0."""
        random = np.random.default_rng(number + 1)
        count = max(1, self.shape.month * (number + 1) // self.rounds - self.shape.month * number // self.rounds)
        new = np.arange(self.next_id, self.next_id + count)
        replaced = random.integers(0, self.next_id, (count + 1) // 2)
        self.next_id += count
        if self.shape.log:
            self._put(np.concatenate([np.unique(replaced), new]), number + 1)
        elif self.shape.upserts:
            self._upsert(np.concatenate([np.unique(replaced), new]), number + 1)
        else:
            self._append(new, number + 1)
        if (number + 1) % self.a_day == 0 and not self.shape.log:
            self._change(random, number + 1)

    def _change(self, random: np.random.Generator, stamp: int) -> None:
        """Some rows are deleted, some replaced."""
        share = max(2, self.next_id // _CHANGED)
        chosen = np.unique(random.integers(0, self.next_id, share))
        some, others = chosen[::2], chosen[1::2]
        if others.size:
            self._upsert(others, stamp)
        listed = ", ".join(map(str, some.tolist()))
        lance.dataset(self.uri, storage_options=self.options).delete(f"id IN ({listed})")

    def _append(self, ids: Ids, stamp: int) -> None:
        lance.write_dataset(self._counted(ids, stamp), self.uri, mode="append", storage_options=self.options)

    def _upsert(self, ids: Ids, stamp: int) -> None:
        dataset = lance.dataset(self.uri, storage_options=self.options)
        into = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        into.execute(self._counted(ids, stamp))

    def _put(self, ids: Ids, stamp: int) -> None:
        dataset = lance.dataset(self.uri, storage_options=self.options)
        with dataset.mem_wal_writer(REGION) as writer:
            writer.put(self._counted(ids, stamp))

    def _counted(self, ids: Ids, stamp: int) -> pa.Table:
        made = rows(self.shape, ids, stamp)
        self.appended += made.nbytes
        return made


def rows(shape: Shape, ids: Ids, stamp: int) -> pa.Table:
    """Rows with these ids; ``stamp`` tells writes of one id apart."""
    if shape.vectors:
        made = vector_rows(0, 1) if ids.size == 0 else vector_rows(int(ids[0]) + stamp, ids.size)
        return made.set_column(0, _key(), pa.array(ids, pa.int64()))
    random = np.random.default_rng((stamp, int(ids[0])))
    letters = random.integers(97, 123, (ids.size, _TEXT), dtype=np.uint8)
    columns: dict[str, pa.Array] = {
        "id": pa.array(ids, pa.int64()),
        "number": pa.array((ids * 7919 + stamp) % 100_000, pa.int32()),
        "text": pa.array(letters.view(f"S{_TEXT}").ravel().astype(str)),
    }
    fields = [_key(), pa.field("number", pa.int32()), pa.field("text", pa.string())]
    if shape.wide:
        columns["payload"] = pa.array([random.bytes(shape.wide) for _ in ids], pa.large_binary())
        fields.append(pa.field("payload", pa.large_binary()))
    return pa.table(columns, schema=pa.schema(fields))


def _key() -> pa.Field:
    metadata = {"lance-schema:unenforced-primary-key": "true"}
    return pa.field("id", pa.int64(), nullable=False, metadata=metadata)


def index(shape: Shape, dataset: lance.LanceDataset) -> None:
    """Build the indexes of a shape."""
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    if shape.vectors:
        dataset.create_scalar_index("text", "INVERTED", name="by_text")
        parts = max(4, shape.rows // 2_000)
        dataset.create_index("vector", "IVF_PQ", name="by_vector", num_partitions=parts, num_sub_vectors=DIMENSION // 2)
