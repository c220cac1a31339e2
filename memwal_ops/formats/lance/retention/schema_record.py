"""Values and stored form of a schema record: which fields the versions of a table had.

A span of successive versions with the same fields takes some bytes for each field, however many versions it has.
:mod:`memwal_ops.formats.lance.retention.schema_recorder` has why it is kept, and when it is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_MAX_SPANS = 64


class Field(NamedTuple):
    """A field as it stands in a manifest."""

    id: int
    name: str
    logical_type: str
    parent_id: int


@dataclass(frozen=True, slots=True)
class Span:
    """Successive versions with the same fields. Each of them changed the one before it.

    Attributes:
        first, last: their numbers.
        written: the earliest timestamp in their manifests, in ns.
        stored: the earliest time of their files, in ns, by the store's clock.
        parent: what the first is based on, see :func:`parent_version`.
        has_transaction: whether the first one's transaction is known.
        fields: in their order.
        files: the field ids in their files.
        keeps_fields: whether the first one's operation changes no field.
    """

    first: int
    last: int
    written: int
    stored: int
    parent: int | None
    has_transaction: bool
    fields: tuple[Field, ...]
    files: FileIds
    keeps_fields: bool

    @property
    def ids(self) -> frozenset[int]:
        """Of all fields."""
        return frozenset(field.id for field in self.fields)

    @property
    def follows(self) -> bool:
        """Whether the first one changed the version before it."""
        return self.has_transaction and self.parent == self.first - 1

    def joined(self, later: Span) -> Span:
        """With the span that follows on it and has the same fields."""
        return replace(
            self,
            last=later.last,
            written=min(self.written, later.written),
            stored=min(self.stored, later.stored),
            files=self.files.joined(later.files),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Successive versions, all of which were read.

    Attributes:
        spans: of them, ascending.
        complete: whether no earlier version existed then, so that none can be restored later.
        index: the uuid of the MemWAL index in the first and in the last of them.
        mark: identifies the manifest of the last.
    """

    spans: tuple[Span, ...]
    complete: bool
    index: tuple[str, str]
    mark: str

    @property
    def first(self) -> int:
        """The first version."""
        return self.spans[0].first

    @property
    def last(self) -> int:
        """The last version."""
        return self.spans[-1].last

    def start_of(self, field_id: int) -> Span | None:
        """The span since which the last version's field with that id exists; None: it has none."""
        start = None
        for span in reversed(self.spans):
            if field_id not in span.ids:
                break
            start = span
            if not span.follows:
                break
        return start

    def files(self) -> FileIds:
        """The field ids in the files of all versions."""
        return reduce(FileIds.joined, (span.files for span in self.spans))


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The schema record of a table. Parts ascend; versions between them are missing."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> SchemaRecord:
        """A record of ascending parts: successive ones are joined, and the oldest spans left out if there are many."""
        return cls(_bounded(_joined(parts)))

    @property
    def last(self) -> int:
        """The last version; 0: none."""
        return self.parts[-1].last if self.parts else 0

    def spans(self) -> Iterator[Span]:
        """All spans, ascending."""
        for part in self.parts:
            yield from part.spans

    def span_of(self, version: int) -> Span | None:
        """The span of a version; None: it is not recorded."""
        return next((span for span in self.spans() if span.first <= version <= span.last), None)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """With successive parts as one, and successive spans of the same fields."""
    made = [*parts[:1]]
    for one, later in pairwise(parts):
        if later.first != one.last + 1:
            made.append(later)
            continue
        before = made[-1]
        last, first = before.spans[-1], later.spans[0]
        same = first.follows and first.fields == last.fields
        spans = (*before.spans[:-1], last.joined(first)) if same else (*before.spans, first)
        made[-1] = Part((*spans, *later.spans[1:]), before.complete, (before.index[0], later.index[1]), later.mark)
    return made


def _bounded(parts: list[Part]) -> tuple[Part, ...]:
    """Without the oldest spans, if there are many."""
    room = _MAX_SPANS
    kept: list[Part] = []
    for part in reversed(parts):
        spans = part.spans[-room:] if room > 0 else ()
        if not spans:
            break
        kept.append(replace(part, spans=spans, complete=part.complete and len(spans) == len(part.spans)))
        room -= len(spans)
    return tuple(reversed(kept))


def encode_schema_record(record: SchemaRecord) -> bytes:
    """The stored form."""
    return encode_record(
        {
            "parts": [
                {
                    "complete": part.complete,
                    "index": [*part.index],
                    "mark": part.mark,
                    "spans": [_span_document(span) for span in part.spans],
                }
                for part in record.parts
            ]
        }
    )


def _span_document(span: Span) -> dict[str, object]:
    return {
        "versions": [span.first, span.last],
        "written": span.written,
        "stored": span.stored,
        "parent": span.parent,
        "has_transaction": span.has_transaction,
        "fields": [[*field] for field in span.fields],
        "with_key": span.files.with_key,
        "highest": sorted(span.files.highest),
        "keeps_fields": span.keeps_fields,
    }


def decode_schema_record(data: bytes, path: str) -> SchemaRecord:
    """Decode the stored form.

    Raises:
        UnsupportedFeatureError: a later release wrote it.
        ValueError: it is damaged.
    """
    try:
        record = SchemaRecord(tuple(map(_part, decode_record(data, path)["parts"])))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"it is no schema record: {error!r:.100}") from error
    spans = [*record.spans()]
    if not spans or any(one.last >= later.first for one, later in pairwise(spans)):
        raise ValueError("its versions are not in order")
    return record


def _part(document: Any) -> Part:
    first, last = document["index"]
    spans = tuple(map(_span, document["spans"]))
    if any(one.last + 1 != later.first for one, later in pairwise(spans)):
        raise ValueError("versions of a part are not successive")
    return Part(spans, document["complete"] is True, (str(first), str(last)), str(document["mark"]))


def _span(document: Any) -> Span:
    first, last = map(_number, document["versions"])
    if not 0 < first <= last:
        raise ValueError(f"there are no versions {first} to {last}")
    parent = document["parent"]
    return Span(
        first,
        last,
        _number(document["written"]),
        _number(document["stored"]),
        None if parent is None else _number(parent),
        document["has_transaction"] is True,
        tuple(map(_field, document["fields"])),
        FileIds(_number(document["with_key"]), frozenset(map(_number, document["highest"]))),
        document["keeps_fields"] is True,
    )


def _field(document: Any) -> Field:
    number, name, kind, above = document
    return Field(_number(number), str(name), str(kind), _number(above))


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


_DROP_AND_ADD = 2


@dataclass(frozen=True, slots=True)
class FileIds:
    """The field ids in the data files of some versions.

    Attributes:
        with_key: the highest id in a file that has the key column too, of the version in which it is lowest; -1: none.
        highest: the highest id of each file.
    """

    with_key: int
    highest: frozenset[int]

    def joined(self, other: FileIds) -> FileIds:
        """Of the versions of both."""
        return FileIds(min(self.with_key, other.with_key), self.highest | other.highest)


def fewest_versions(field_id: int, before: FileIds, now: Collection[int]) -> int:
    """The number of versions that it takes at least until another column has a field id.

    Args:
        before: the files before the missing versions.
        now: all field ids after them.
    """
    return min(_versions(first, before, now) for first in range(field_id + 1))


def _versions(first: int, before: FileIds, now: Collection[int]) -> int:
    """The same if ``first`` is the lowest id that is given away again."""
    rewritten = before.with_key >= first
    # Ids are successive: one that is missing was given to a column that was dropped, or replaced, since.
    given = set(range(first, max(now) + 1))
    follows = first == 0 or first - 1 in now or first - 1 in before.highest
    # A change of type gives a column another id, and takes away the one that it had, in one version.
    cast = len(set(range(first)) - set(now)) >= len(given)
    return _DROP_AND_ADD + rewritten + (not (given <= set(now) and (follows or cast)))
