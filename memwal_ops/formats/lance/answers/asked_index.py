"""Describe the indexes of a dataset for asking them; read the rows to compare with, here or on other machines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, lance_errors
from memwal_ops.formats.lance.wire.version_manifest import SYSTEM_INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import lance

    from memwal_ops.formats.lance.table import Table


ROWS = 1 << 21
_KEY = b"lance-schema:unenforced-primary-key"
_NAMES = re.compile(r"`([^`]+)`|([^.`]+)")


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment. ``fragments``: those that it covers by the manifest; ``version``, ``built_at``: when it was made."""

    uuid: str
    fragments: frozenset[int]
    size: int
    version: int
    built_at: str | None = None


@dataclass(frozen=True)
class AskedIndex:
    """One index.

    Attributes:
        name: its name.
        type: as pylance shows it, for example ``BTree`` or ``IVF_PQ``.
        column: the path of its column, as pylance takes it.
        details: its parameters, as far as pylance shows them.
        segments: its segments, the oldest first.
        fields: its column, the outermost field first; empty: the schema does not have it.
    """

    name: str
    type: str
    column: str
    details: Mapping[str, Any]
    segments: tuple[Segment, ...]
    fields: tuple[pa.Field, ...] = field(compare=False)

    @property
    def identified(self) -> dict[str, Any]:
        """What identifies it in a report: arguments of :class:`memwal_ops.core.answers.IndexAnswers`."""
        built = [segment.built_at for segment in self.segments]
        oldest = None if None in built else min(filter(None, built), default=None)
        return {"index": self.name, "type": self.type, "segments": len(self.segments), "built_at": oldest}

    @property
    def arrow(self) -> pa.DataType | None:
        """The type of its column; None: the schema does not have it."""
        return self.fields[-1].type if self.fields else None

    @property
    def expression(self) -> str:
        """Its column in an SQL condition."""
        return ".".join(f"`{inner.name}`" for inner in self.fields)

    def rows_of(self, values: pa.ChunkedArray) -> pa.Table:
        """A table that has nothing but these values in the column."""
        column = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
        field = _like(self.fields[-1], column)
        for outer in reversed(self.fields[:-1]):
            column = pa.StructArray.from_arrays([column], fields=[field])
            field = _like(outer, column)
        return pa.table([column], schema=pa.schema([field]))

    @property
    def is_vector(self) -> bool:
        """Whether it is asked for nearest vectors."""
        return self.type.startswith("IVF_") or self.type in {"Vector", "HNSW"}

    @property
    def covered(self) -> frozenset[int]:
        """The fragments that it claims to cover."""
        return frozenset[int]().union(*(segment.fragments for segment in self.segments))

    @property
    def size(self) -> int:
        """Bytes of its files, as the manifest has them; 0: it has not."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class Pinned:
    """A dataset at one version, with what is read of it once. ``dataset``: pylance's handle. ``uri``: for messages."""

    dataset: lance.LanceDataset
    uri: str

    @cached_property
    def indexes(self) -> Mapping[str, AskedIndex]:
        """Its indexes by name; those of Lance itself are left out."""
        with lance_errors("read the indexes of", self.uri):
            described = self.dataset.describe_indices()
        schema = self.dataset.schema
        asked = {}
        for description in described:
            if description.name.startswith(SYSTEM_INDEX):
                continue
            column = description.field_names[0] if description.field_names else ""
            parts = sorted(description.segments, key=lambda part: part.dataset_version_at_last_update)
            segments = [
                Segment(
                    str(one.uuid),
                    frozenset(one.fragment_ids),
                    one.size_bytes or 0,
                    one.dataset_version_at_last_update,
                    None if one.created_at is None else one.created_at.astimezone(UTC).isoformat(timespec="seconds"),
                )
                for one in parts
            ]
            fields = _fields(schema, column)
            asked[description.name] = AskedIndex(
                description.name, description.index_type, column, description.details or {}, tuple(segments), fields
            )
        return asked

    @cached_property
    def fragments(self) -> Mapping[int, lance.LanceFragment]:
        """Its fragments by id, in order of id."""
        return {fragment.fragment_id: fragment for fragment in self.dataset.get_fragments()}

    @cached_property
    def live(self) -> Mapping[int, int]:
        """By fragment, the rows that are not deleted. Requests: one for each fragment that does not record it."""
        with lance_errors("count rows of", self.uri):
            return {number: fragment.count_rows() for number, fragment in self.fragments.items()}

    @cached_property
    def starts(self) -> Mapping[int, int]:
        """By fragment, the position of its first row among all rows of the dataset."""
        return dict(zip(self.fragments, accumulate(self.live.values(), initial=0), strict=False))

    def take(self, positions: Sequence[int], index: AskedIndex) -> pa.Table:
        """Values of the index's column and addresses of the rows at these positions of the dataset."""
        with lance_errors("read rows of", self.uri):
            taken = self.dataset.take(positions, columns=[index.column, ROW_ADDRESS])
        values = taken[index.fields[0].name]
        for inner in index.fields[1:]:
            values = pc.struct_field(values, [values.type.get_field_index(inner.name)])
        return pa.table({index.column: values, ROW_ADDRESS: taken[ROW_ADDRESS]})

    def physical(self, fragment: int) -> int:
        """Rows of a fragment, deleted ones included."""
        return max(int(self.fragments[fragment].physical_rows), self.live[fragment])

    def chunks(self, fragments: list[int], max_rows: int = ROWS) -> list[list[int]]:
        """The fragments in groups with a bounded number of rows; a larger fragment is a group of its own."""
        groups: list[list[int]] = []
        rows = max_rows
        for fragment in fragments:
            if rows + self.physical(fragment) > max_rows:
                groups.append([])
                rows = 0
            groups[-1].append(fragment)
            rows += self.physical(fragment)
        return groups


def _fields(schema: pa.Schema, path: str) -> tuple[pa.Field, ...]:
    """The fields along a path as pylance writes it, names with a dot in backticks; empty: there is none."""
    fields = list[pa.Field]()
    inside: pa.Schema | pa.StructType = schema
    for quoted, plain in _NAMES.findall(path):
        if not isinstance(inside, pa.Schema | pa.StructType) or (at := inside.get_field_index(quoted or plain)) < 0:
            return ()
        fields.append(inside.field(at))
        inside = fields[-1].type
    return tuple(fields)


def _like(field: pa.Field, column: pa.Array) -> pa.Field:
    # Not as a key of the table: pylance refuses a key that may be null.
    metadata = {name: value for name, value in (field.metadata or {}).items() if not name.startswith(_KEY)}
    return pa.field(field.name, column.type, metadata=metadata)


_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Repeated:
    """Values of a column that should be there once.

    ``values``: how many are in several rows. ``rows``: rows that have these. ``marked``: values that are wrong by
    themselves.
    """

    values: int
    rows: int
    marked: int


class RowReader:
    """Reads rows in this process.

    ``checkpoint``: called between reads; it may raise. ``stages``: figures of what other machines did, by name.
    """

    def __init__(self, checkpoint: Callable[[], object] = lambda: None) -> None:
        self.checkpoint = checkpoint
        self.stages: dict[str, Mapping[str, float]] = {}

    def each(
        self,
        pinned: Pinned,
        fragments: Sequence[int],
        work: Callable[[Pinned, Sequence[int]], _R],
        max_rows: int = ROWS,
    ) -> Iterator[_R]:
        """What ``work`` returns for each group of fragments, in their order.

        ``fragments``: to be divided into groups. ``work``: may be sent to another process, with its result.
        ``max_rows``: in a group of several fragments.
        """
        for group in pinned.chunks([*fragments], max_rows):
            self.checkpoint()
            yield work(pinned, group)

    def repeated_keys(self, table: Table, columns: Sequence[str]) -> Repeated:
        """Keys of several rows; ``marked``: NULLs. Memory: these columns."""
        with lance_errors("read the keys of", table.location.uri):
            keys = table.dataset.to_table(columns=[*columns])
        counts = keys.group_by([*columns]).aggregate([([], "count_all")])["count_all"]
        twice = counts.filter(pc.greater(counts, 1))
        nulls = sum(column.null_count for column in keys.columns)
        return Repeated(len(twice), pc.sum(twice).as_py() or 0, nulls)

    def repeated_row_ids(self, table: Table) -> Repeated:
        """Stable row ids of several rows; ``marked``: those not assigned yet. Memory: 8 bytes for each row."""
        with lance_errors("read the row ids of", table.location.uri):
            ids = np.sort(table.dataset.to_table(columns=[], with_row_id=True)["_rowid"].to_numpy())
        above = int(np.count_nonzero(ids >= table.manifest.manifest.next_row_id))
        again = ids[1:] == ids[:-1]
        values = int(np.count_nonzero(again & ~np.concatenate([[False], again[:-1]]))) if len(again) else 0
        return Repeated(values, values + int(np.count_nonzero(again)), above)
