"""Draw queries for an index: from rows of every fragment, and for all rows of those that the budget lets be read."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from lance.query import FullTextOperator, MatchQuery, MinHashQuery, PhraseQuery

from memwal_ops.formats.lance.files.datasets import literal, plain
from memwal_ops.formats.lance.indexes.index_faults import FIRST_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lance.query import FullTextQuery

    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned


_EXTENSION = b"ARROW:extension:name"
_WKB, _WKT = b"geoarrow.wkb", b"geoarrow.wkt"
_NATIVE = frozenset(
    b"geoarrow." + kind
    for kind in (b"point", b"linestring", b"polygon", b"multipoint", b"multilinestring", b"multipolygon", b"box")
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_FAR = 1e30
_SPATIAL_CUTS = 16
_PAIR = 16


def spatial_conditions(
    column: str, field: pa.Field, values: pa.ChunkedArray, samples: int
) -> Iterator[tuple[str, str]]:
    """What each condition is, and the condition; none for a column that is not known to have geometries."""
    kind = (field.metadata or {}).get(_EXTENSION) or str(getattr(field.type, "extension_name", "")).encode()
    if kind not in _NATIVE | {_WKB, _WKT}:
        return
    places = [at for value in values.to_pylist() if (at := _place(value, kind)) is not None]
    yield "null", f"{column} IS NULL"
    if not places:
        return
    ascending = np.unique([x for x, _ in places])
    cuts = np.unique(np.linspace(0, len(ascending) - 1, min(_SPATIAL_CUTS, samples, len(ascending))).astype(int))
    for low, high in pairwise([-_FAR, *ascending[cuts].tolist(), _FAR]):
        corners = [(low, -_FAR), (high, -_FAR), (high, _FAR), (low, _FAR), (low, -_FAR)]
        text = ", ".join(f"{x!r} {y!r}" for x, y in corners)
        yield "range", f"st_intersects({column}, ST_GeomFromText('POLYGON(({text}))'))"
    for x, y in places[: max(4, samples // 2)]:
        yield "equal", f"st_intersects({column}, ST_GeomFromText('POINT({x!r} {y!r})'))"


def _place(value: Any, kind: bytes) -> tuple[float, float] | None:
    """Coordinates near a geometry, if not of it (where it has more than two); None: it has none."""
    if kind == _WKB:
        order = "<" if value and value[0] else ">"
        numbers = struct.unpack(f"{order}2d", value[-_PAIR:]) if value and len(value) > _PAIR else ()
    elif kind == _WKT:
        numbers = tuple(float(number) for number in _NUMBER.findall(value or "")[:2])
    else:
        numbers = _first_pair(value)
    return (numbers[0], numbers[1]) if len(numbers) > 1 and np.isfinite(numbers[:2]).all() else None


def _first_pair(value: Any) -> tuple[float, ...]:
    while isinstance(value, list):
        value = value[0] if value else None
    return tuple(value.values())[:2] if isinstance(value, dict) and None not in value.values() else ()


SAMPLES = 64
MAX_BYTES = 256 << 20
_ORDERED = frozenset({"BTree", "Bitmap", "ZoneMap"})
_EQUAL = frozenset({"BloomFilter"})
_SAMPLED_FRAGMENTS = 256
_CUTS = 24
_IN_LIST = 64
_GRAM = 3
_WORDS = re.compile(r"\w+")
_NO_WORD = "qzxjvkwy"
_MAX_WIDTH = 64 << 10
# Queries that read little of an index; and how much.
_POINTS = frozenset({"equal", "label", "part", "word", "words", "phrase", "similar"})
_PAGE = 64 << 10
_FEW = 4


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """One query: an SQL condition, or words to look for in a column. It can be pickled; pylance's own cannot."""

    what: str
    condition: str = ""
    words: str | None = None
    column: str = ""

    @property
    def text(self) -> FullTextQuery | MinHashQuery:
        """The query for words, as pylance takes it."""
        assert self.words is not None  # noqa: S101 - the caller asked
        if self.what == "similar":
            return MinHashQuery(self.words, self.column)
        if self.what == "phrase":
            return PhraseQuery(self.words, self.column)
        every = FullTextOperator.AND if self.what == "words" else FullTextOperator.OR
        return MatchQuery(self.words, self.column, operator=every)


@dataclass(frozen=True)
class Queries:
    """What an index is asked.

    Attributes:
        queries: for scalar and text indexes; empty: see ``skipped``.
        rows: the rows that were drawn: their value and address.
        fragments: of these, each answer is compared row by row.
        others: fragments of which only the drawn rows are looked up.
        seed: with which they were drawn; the same seed and version draw the same.
        bytes_at_most: an upper bound of what asking them reads.
        skipped: why the index is not asked.
    """

    queries: Sequence[SampledQuery] = ()
    rows: pa.Table | None = None
    fragments: Sequence[int] = ()
    others: Sequence[int] = ()
    seed: int = 0
    bytes_at_most: int = 0
    skipped: str = ""


def sample_queries(
    pinned: Pinned, index: AskedIndex, samples: int = SAMPLES, seed: int = 0, max_bytes: int = MAX_BYTES
) -> Queries:
    """Draw about ``samples`` queries for an index.

    Values come from the first, the last and random rows of each fragment that it claims (of more than 256, or four for
    each of ``samples``, of the oldest, the newest, those with deletions, and random ones). Ranges between drawn values
    cover all values, so that every row of ``fragments`` is in some answer.

    ``samples``: how many rows are drawn at least, if there are so many, and about how many queries there are. ``seed``:
    draws the same again. ``max_bytes``: about how much asking them may read.
    """
    if any("`" in field.name for field in index.fields) or not index.fields:
        return Queries(skipped="its column has a name that no condition can have, or is within lists")
    if pinned.dataset.data_storage_version == FIRST_FORMAT:  # it fails, panics, or does not name the index
        return Queries(skipped="pylance has no row addresses for answers from data files of Lance's first format")
    random = np.random.default_rng([seed, _hash(index.name)])
    covered = [fragment for fragment in pinned.fragments if fragment in index.covered and pinned.live[fragment]]
    if not covered:
        return Queries(skipped="it covers no rows")
    order = _by_interest(pinned, covered, random)
    sampled = order[: min(_SAMPLED_FRAGMENTS, 4 * samples)]
    rows = drawn_rows(pinned, index, sampled, samples, random)
    width = max(1, -(-rows.nbytes // max(1, rows.num_rows)))
    if width > _MAX_WIDTH:
        return Queries(skipped=f"its values have {width:,} bytes on average")
    left = max_bytes - rows.nbytes
    sized = index.size * 2 if not index.is_vector else 0
    chosen, cost = [], rows.nbytes + sized
    for fragment in order if sized <= left else ():
        needed = pinned.physical(fragment) * width
        if cost + needed <= left:
            chosen.append(fragment)
            cost += needed
    fragments = sorted(chosen)
    others = sorted(set(sampled) - set(chosen))
    if index.is_vector:
        return Queries((), rows, fragments, others, seed, cost)
    queries = tuple(_queries(index, rows, samples, random))
    if fragments and {"range", "in"} <= {query.what for query in queries}:  # IN looks for each drawn value, too
        spared = [query for query in queries if query.what == "equal"][2:]
        queries = tuple(query for query in queries if query not in spared)
    if not fragments:  # only drawn rows are looked up: each by a page or two of the index
        queries = tuple(query for query in queries if query.what in _POINTS)[: max(_FEW, left // _PAGE)]
        cost = rows.nbytes + len(queries) * _PAGE
    why = "" if queries else f"no condition on {index.arrow} is known that pylance answers by it"
    return Queries(queries, rows, fragments, others, seed, cost, why)


def drawn_rows(
    pinned: Pinned, index: AskedIndex, fragments: Sequence[int], samples: int, random: np.random.Generator
) -> pa.Table:
    """Values and addresses of live rows: the first, the last and random ones of each fragment, in order."""
    each = max(1, -(-samples // len(fragments)))
    positions: set[int] = set()
    for fragment in fragments:
        rows, start = pinned.live[fragment], pinned.starts[fragment]
        inside = random.integers(0, rows, size=each)
        positions.update(start + int(at) for at in (0, rows - 1, *inside))
    return pinned.take(sorted(positions), index)


def _by_interest(pinned: Pinned, covered: list[int], random: np.random.Generator) -> list[int]:
    """The newest fragment, the oldest, those with deletions, then the others in random order."""
    ends = [covered[-1], covered[0]]
    deleted = [fragment for fragment in covered if pinned.live[fragment] < pinned.physical(fragment)]
    shuffled = [*random.permutation(deleted).tolist(), *random.permutation(covered).tolist()]
    return list(dict.fromkeys([*ends, *shuffled]))


def _queries(index: AskedIndex, rows: pa.Table, samples: int, random: np.random.Generator) -> Iterator[SampledQuery]:
    column, values = index.expression, rows[index.column]
    kind = index.arrow
    if index.type == "Json":
        yield from _json(index, column, values, samples)
    elif index.type == "LabelList":
        yield from _labels(column, values, samples, random)
    elif index.type == "NGram":
        yield from _grams(column, values, samples, random)
    elif index.type == "Inverted":
        yield from text_queries(index, values, samples, random)
    elif index.type == "MinHashLsh":
        texts = sorted({value for value in values.to_pylist() if value})
        chosen = sorted(random.permutation(len(texts))[:samples].tolist())
        yield from (SampledQuery("similar", words=texts[place], column=index.column) for place in chosen)
    elif index.type == "RTree":
        yield from (
            SampledQuery(*condition) for condition in spatial_conditions(column, index.fields[-1], values, samples)
        )
    elif index.type in _ORDERED | _EQUAL:
        yield from _scalars(column, values, kind, samples, random, ranges=index.type in _ORDERED)


def _scalars(
    column: str, values: pa.ChunkedArray, kind: pa.DataType, samples: int, random: np.random.Generator, *, ranges: bool
) -> Iterator[SampledQuery]:
    """Equality, IN, NULL and ranges; ranges cover all values."""
    distinct = sorted({value for value in plain(values) if value is not None and value == value})  # noqa: PLR0124 - NaN
    written = [text for value in distinct if (text := literal(value, kind)) is not None]
    if distinct and not written:
        return
    yield SampledQuery("null", f"{column} IS NULL")
    if pa.types.is_floating(kind) and not pa.types.is_float16(kind):
        nan = f"cast('NaN' as {'float' if pa.types.is_float32(kind) else 'double'})"
        yield SampledQuery("equal", f"{column} = {nan}")
    if not written:
        return
    if ranges and not pa.types.is_boolean(kind):
        at = np.unique(np.linspace(0, len(written) - 1, min(_CUTS, max(2, samples // 3), len(written))).astype(int))
        cuts = [written[place] for place in at]
        yield SampledQuery("range", f"{column} < {cuts[0]}")
        for low, high in pairwise(cuts):
            yield SampledQuery("range", f"{column} >= {low} AND {column} < {high}")
        yield SampledQuery("range", f"{column} >= {cuts[-1]}")
    some = [written[place] for place in sorted(random.permutation(len(written))[: max(4, samples // 2)].tolist())]
    yield from (
        SampledQuery("equal", f"{column} = {value}") for value in dict.fromkeys([written[0], written[-1], *some])
    )
    for start in range(0, len(written), _IN_LIST):
        listed = written[start : start + _IN_LIST]
        yield SampledQuery("in", f"{column} IN ({', '.join(listed)})")
    absent = _absent(distinct, kind)
    if absent is not None:
        yield SampledQuery("absent", f"{column} = {absent}")


def _absent(distinct: list[Any], kind: pa.DataType) -> str | None:
    """A value that probably no row has; a scan shows it."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return literal(f"{distinct[len(distinct) // 2]}~{_NO_WORD}", kind)
    if pa.types.is_floating(kind) and not pa.types.is_float16(kind):
        return literal(distinct[0] - 0.123456789, kind)
    if pa.types.is_integer(kind):
        gaps = [low + 1 for low, high in pairwise(distinct) if high - low > 1]
        return literal(gaps[len(gaps) // 2], kind) if gaps else None
    return None


def _labels(column: str, values: pa.ChunkedArray, samples: int, random: np.random.Generator) -> Iterator[SampledQuery]:
    kind = values.type.value_type
    lists = [value for value in plain(values) if value]
    labels = sorted({label for label_list in lists for label in label_list if label is not None})
    written = [text for label in labels if (text := literal(label, kind)) is not None]
    if not written:
        return
    chosen = [written[place] for place in sorted(random.permutation(len(written))[:samples].tolist())]
    yield from (SampledQuery("label", f"array_has_any({column}, [{label}])") for label in chosen)
    for start in range(0, len(written), _IN_LIST):
        yield SampledQuery("any label", f"array_has_any({column}, [{', '.join(written[start : start + _IN_LIST])}])")
    several = [label_list for label_list in lists if len(label_list) > 1 and None not in label_list][
        : max(1, samples // 8)
    ]
    for combination in several:
        both = [literal(label, kind) for label in combination[:2]]
        if None not in both:
            yield SampledQuery("all labels", f"array_has_all({column}, [{', '.join(map(str, both))}])")


def _grams(column: str, values: pa.ChunkedArray, samples: int, random: np.random.Generator) -> Iterator[SampledQuery]:
    texts = [value for value in values.to_pylist() if value and len(value) >= _GRAM]
    if not texts:
        return
    parts = set()
    for at in random.integers(0, len(texts), size=samples).tolist():
        text = texts[at]
        length = min(len(text), int(random.integers(_GRAM, 13)))
        start = int(random.integers(0, len(text) - length + 1))
        part = text[start : start + length]
        if not set(part) & set("%_\\"):
            parts.add(part)
    for part in sorted(parts):
        yield SampledQuery("part", f"contains({column}, {literal(part, pa.string())})")
    yield SampledQuery("absent", f"contains({column}, '{_NO_WORD}')")


def text_queries(
    index: AskedIndex, values: pa.ChunkedArray, samples: int, random: np.random.Generator
) -> Iterator[SampledQuery]:
    """Words, several words at once, and phrases if the index has positions."""
    texts = [" ".join(value) if isinstance(value, list) else value for value in values.to_pylist() if value]
    words = [matches for text in texts if (matches := _WORDS.findall(text))]
    if not words:
        return
    asked = set()
    for at in random.permutation(len(words))[:samples].tolist():
        document = words[at]
        asked.add(document[int(random.integers(0, len(document)))])
    yield from (SampledQuery("word", words=word, column=index.column) for word in sorted(asked))
    for at in random.permutation(len(words))[: max(2, samples // 8)].tolist():
        some = sorted(set(random.choice(words[at], size=3).tolist()))
        yield SampledQuery("words", words=" ".join(some), column=index.column)
    if index.details.get("with_position"):
        for at in random.permutation(len(words))[: max(2, samples // 8)].tolist():
            if len(words[at]) > 1:
                start = int(random.integers(0, len(words[at]) - 1))
                yield SampledQuery("phrase", words=" ".join(words[at][start : start + 2]), column=index.column)
    yield SampledQuery("absent", words=_NO_WORD, column=index.column)


def _json(index: AskedIndex, column: str, values: pa.ChunkedArray, samples: int) -> Iterator[SampledQuery]:
    path = str(index.details.get("path", ""))
    if "." in path:
        return  # pylance takes the whole of it for a key where it scans, and for a path in the index
    scalars = sorted({value for text in values.to_pylist() if (value := _at(text, path)) is not None}, key=repr)
    for value in scalars[: max(4, samples)]:
        key = "'" + path.replace("'", "''") + "'"
        if isinstance(value, bool):
            yield SampledQuery("equal", f"json_get_bool({column}, {key}) = {str(value).lower()}")
        elif isinstance(value, int):
            yield SampledQuery("equal", f"json_get_int({column}, {key}) = {value}")
        elif isinstance(value, float):
            yield SampledQuery("equal", f"json_get_float({column}, {key}) = {value!r}")
        else:
            yield SampledQuery("equal", f"json_get_string({column}, {key}) = {literal(value, pa.string())}")


def _at(text: Any, path: str) -> bool | int | float | str | None:
    try:
        value = json.loads(text)[path]
    except (TypeError, ValueError, KeyError, IndexError):
        return None
    return value if isinstance(value, bool | int | float | str) else None


def _hash(name: str) -> int:
    """A number of a name that does not change from process to process."""
    return int.from_bytes(name.encode()[:16].ljust(16, b"\0"), "little") % (1 << 63)
