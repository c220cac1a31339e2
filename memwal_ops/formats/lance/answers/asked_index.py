"""Describe the indexes of a dataset as far as that matters for asking them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.wire.index_entries import SYSTEM_INDEX

if TYPE_CHECKING:
    from collections.abc import Mapping

    import lance
    import pyarrow as pa

_ROWS = 1 << 21


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: its id, the fragments that the manifest says it covers, its size, the version when it was made."""

    uuid: str
    fragments: frozenset[int]
    size: int
    version: int


@dataclass(frozen=True)
class AskedIndex:
    """One index.

    Attributes:
        name: its name.
        type: as pylance shows it, for example ``BTree`` or ``IVF_PQ``.
        column: the name of its column.
        details: its parameters, as far as pylance shows them.
        segments: its segments, the oldest first.
        arrow: the type of its column; None: the schema does not have it.
    """

    name: str
    type: str
    column: str
    details: Mapping[str, Any]
    segments: tuple[Segment, ...]
    arrow: pa.DataType | None = field(compare=False)

    @property
    def is_vector(self) -> bool:
        """Whether it is asked for nearest vectors."""
        return self.type.startswith("IVF_") or self.type in {"Vector", "HNSW"}

    @property
    def covered(self) -> frozenset[int]:
        """The fragments that it claims to cover."""
        return frozenset[int]().union(*(one.fragments for one in self.segments))

    @property
    def size(self) -> int:
        """Bytes of its files, as the manifest has them; 0: it has not."""
        return sum(one.size for one in self.segments)


@dataclass(frozen=True)
class Pinned:
    """A dataset at one version, with what is read of it once.

    Attributes:
        dataset: pylance's handle.
        uri: for messages.
    """

    dataset: lance.LanceDataset
    uri: str

    @cached_property
    def indexes(self) -> Mapping[str, AskedIndex]:
        """Its indexes by name; those of Lance itself are left out."""
        with lance_errors("read the indexes of", self.uri):
            described = self.dataset.describe_indices()
        schema = self.dataset.schema
        found = {}
        for one in described:
            if one.name.startswith(SYSTEM_INDEX):
                continue
            column = one.field_names[0] if one.field_names else ""
            segments = sorted(
                (
                    Segment(
                        str(part.uuid),
                        frozenset(part.fragment_ids),
                        part.size_bytes or 0,
                        part.dataset_version_at_last_update,
                    )
                    for part in one.segments
                ),
                key=lambda part: part.version,
            )
            at = schema.get_field_index(column)
            arrow = schema.field(at).type if at >= 0 else None
            found[one.name] = AskedIndex(one.name, one.index_type, column, one.details or {}, tuple(segments), arrow)
        return found

    @cached_property
    def fragments(self) -> Mapping[int, lance.LanceFragment]:
        """Its fragments by id, in order of id."""
        return {one.fragment_id: one for one in self.dataset.get_fragments()}

    @cached_property
    def live(self) -> Mapping[int, int]:
        """By fragment, the rows that are not deleted. Requests: one for each fragment that does not record it."""
        with lance_errors("count rows of", self.uri):
            return {number: one.count_rows() for number, one in self.fragments.items()}

    @cached_property
    def starts(self) -> Mapping[int, int]:
        """By fragment, the position of its first row among all rows of the dataset."""
        return dict(zip(self.fragments, accumulate(self.live.values(), initial=0), strict=False))

    def physical(self, fragment: int) -> int:
        """Rows of a fragment, deleted ones included."""
        return max(int(self.fragments[fragment].physical_rows), self.live[fragment])

    def chunks(self, fragments: list[int], max_rows: int = _ROWS) -> list[list[int]]:
        """The fragments in groups with a bounded number of rows; a larger fragment is a group of its own."""
        groups: list[list[int]] = []
        rows = max_rows
        for one in fragments:
            if rows + self.physical(one) > max_rows:
                groups.append([])
                rows = 0
            groups[-1].append(one)
            rows += self.physical(one)
        return groups
