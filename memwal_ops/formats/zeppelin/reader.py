"""Query a namespace by the rules of the format: nearest vectors or best-matching texts, filtered (S4-008, S4-014)."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import errors
from memwal_ops.core.context import RunContext
from memwal_ops.formats.zeppelin.compaction import Inputs, dimensions_of, metric_of, read_inputs
from memwal_ops.formats.zeppelin.namespace import Namespace, load, swappable
from memwal_ops.formats.zeppelin.segments import METRICS, Rows, SegmentReader
from memwal_ops.formats.zeppelin.wire.segment import decode_text_index, text_name, words
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes

    Matrix = NDArray[np.float32]
    Hit = tuple[float, str, Attributes | None]


_BOUNDS = {"gte": operator.ge, "lte": operator.le, "gt": operator.gt, "lt": operator.lt}
_MEMBERS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("eq", "not_eq", "contains"), frozenset({"op", "field", "value"})),
    **dict.fromkeys(("in", "not_in"), frozenset({"op", "field", "values"})),
    **dict.fromkeys(("and", "or"), frozenset({"op", "filters"})),
    "not": frozenset({"op", "filter"}),
    "range": frozenset({"op", "field", *_BOUNDS}),
}


def compile_filter(wanted: Mapping[str, Any] | None) -> Callable[[Attributes | None], bool]:
    """Compile a filter to a predicate on a row's attributes, which raises nothing; without members, every row passes.

    Raises ``InvalidUsageError``: an invalid filter.
    """
    if wanted is None or wanted == {}:
        return lambda _: True
    try:
        test = _compile(wanted)
    except RecursionError:
        raise _invalid("it", "is nested too deeply") from None
    return lambda row: test(row or {})


def _compile(wanted: Any) -> Callable[[Attributes], bool]:
    if not isinstance(wanted, Mapping) or not wanted:
        raise _invalid(wanted, "is not an object with members")
    if "op" not in wanted:
        tests = [_of(name, _equals(value)) for name, value in wanted.items()]
        return lambda row: all(test(row) for test in tests)
    kind = wanted["op"]
    members = _MEMBERS.get(kind) if isinstance(kind, str) else None
    if members is None:
        raise _invalid(kind, f"is no operation; these are: {', '.join(_MEMBERS)}")
    if kind != "range" and (missing := members - wanted.keys()):
        raise _invalid(wanted, f"lacks {min(missing)!r}")
    if unknown := wanted.keys() - members:
        raise _invalid(wanted, f"has the member {min(unknown, key=str)!r}, which {kind} does not know")
    if kind in {"and", "or"}:
        parts = [_compile(part) for part in _list_of(wanted["filters"], kind)]
        joined = all if kind == "and" else any
        return lambda row: joined(part(row) for part in parts)
    if kind == "not":
        inner = _compile(wanted["filter"])
        return lambda row: not inner(row)
    field, test = wanted.get("field"), _test(kind, wanted)
    if not isinstance(field, str):
        raise _invalid(field, "is not the name of an attribute")
    if kind in {"not_eq", "not_in"}:
        return lambda row: not _of(field, test)(row)
    return _of(field, test)


def _test(kind: str, wanted: Mapping[str, Any]) -> Callable[[Any], bool]:
    if kind in {"in", "not_in"}:
        tests = [_equals(value) for value in _list_of(wanted["values"], kind)]
        return lambda value: any(test(value) for test in tests)
    if kind == "range":
        bounds = [(compare, wanted[name]) for name, compare in _BOUNDS.items() if wanted.get(name) is not None]
        if not bounds or not all(_is_number(bound) and abs(bound) < math.inf for _, bound in bounds):
            raise _invalid(wanted, f"needs numbers as bounds: {', '.join(_BOUNDS)}")
        return lambda value: _is_number(value) and all(compare(value, bound) for compare, bound in bounds)
    return _equals(wanted["value"])


def _list_of(values: Any, kind: str) -> list[Any]:
    # Of no members, "and" and "not_in" would match every row: erase would delete all of them.
    if not isinstance(values, list | tuple) or not (values or kind in {"in", "or"}):
        raise _invalid(values, "is not a list with members")
    return [*values]


def _of(name: str, test: Callable[[Any], bool]) -> Callable[[Attributes], bool]:
    def passes(row: Attributes) -> bool:
        value = row.get(name)
        return name in row and any(map(test, value if isinstance(value, list) else [value]))

    return passes


def _equals(wanted: Any) -> Callable[[Any], bool]:
    """Equality of values of one type; a boolean is not a number."""
    if wanted is not None and not isinstance(wanted, str | int | float):
        raise _invalid(wanted, "is not a string, a number, a boolean or null, as a value must be")
    return lambda value: isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(part: Any, why: str) -> errors.InvalidUsageError:
    return errors.InvalidUsageError(
        f"The filter is invalid: {part!r:.200} {why}.",
        remedy='Give for example {"color": "red"} or {"op": "range", "field": "price", "gte": 3}.',
    )


# If objects were deleted because the manifest was replaced meanwhile, a reader retries with the newest, this often.
_ATTEMPTS = 5
_K1, _B = 1.2, 0.75
_AT_ONCE = 4096


@dataclass(frozen=True)
class Query:
    """The arguments of :func:`query`."""

    vector: Sequence[float] | None = None
    text: str | None = None
    field: str | None = None
    k: int = 10
    nprobe: int = 8
    filter: Mapping[str, Any] | None = None
    metric: str | None = None
    consistency: str = "strong"

    def check(self) -> None:
        """Refuse invalid arguments. Raises ``InvalidUsageError``."""
        if (self.vector is None) == (self.text is None):
            raise errors.InvalidUsageError("Give a vector or a text, and not both.")
        if self.text is not None and not (isinstance(self.text, str) and isinstance(self.field, str)):
            raise errors.InvalidUsageError(
                "A text needs the name of the field that it is searched in, both as strings."
            )
        if any(type(number) is not int or number < 1 for number in (self.k, self.nprobe)):
            raise errors.InvalidUsageError("k and nprobe must be whole numbers of at least 1.")
        if self.consistency not in {"strong", "eventual"}:
            raise errors.InvalidUsageError(f"The consistency is strong or eventual, not {self.consistency!r}.")
        if self.metric is not None and self.metric not in METRICS:
            raise errors.InvalidUsageError(f"The metric is one of {', '.join(METRICS)}, not {self.metric!r}.")


def query(
    uri: str | os.PathLike[str],
    *,
    vector: Sequence[float] | None = None,
    text: str | None = None,
    field: str | None = None,
    k: int = 10,
    nprobe: int = 8,
    filter: Mapping[str, Any] | None = None,  # noqa: A002 - the word of the contract
    metric: str | None = None,
    consistency: str = "strong",
    storage_options: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The ``k`` rows that are nearest to a vector, or match a text best.

    Args:
        uri: the namespace.
        vector: the query vector.
        text: the query words; needs ``field``. Give one of ``vector`` and ``text``.
        field: the attribute with the text.
        k: number of rows.
        nprobe: how many clusters of a segment are searched, the nearest first; not for a text.
        filter: attributes that must be equal, or one of ``{"op": "eq" | "not_eq" | "in" | "not_in" | "range" |
            "contains" | "and" | "or" | "not", ...}``.
        metric: of a namespace without settings; cosine by default.
        consistency: ``strong`` scans every uncompacted fragment; ``eventual`` reads segments alone.
        storage_options: as ``open_table`` takes them.

    Returns:
        ``{"id", "distance", "attributes"}``, the nearest first. A distance is 1 - cosine, the square of the Euclidean
        one, the dot product times -1, or the BM25 score times -1.

    Raises:
        InvalidUsageError: neither a vector nor a text, a vector of another length, or an invalid filter.
        FragmentMissingError, FragmentCorruptError, SegmentCorruptError: an object in the manifest cannot be read.
    """
    asked = Query(vector, text, field, k, nprobe, filter, metric, consistency)
    asked.check()
    location = resolve(uri, storage_options)
    return query_namespace(load(location, swappable(open_store(location))), asked)


def query_namespace(table: Namespace, query: Query) -> list[dict[str, Any]]:
    """Query an open namespace; if objects of its manifest are gone, query the newest manifest."""
    for attempt in range(_ATTEMPTS):
        try:
            return _result(table, query)
        except (errors.FragmentMissingError, errors.SegmentCorruptError, errors.ObjectNotFoundError):
            newest = table.newest()
            if newest.data == table.data or attempt == _ATTEMPTS - 1:
                raise
            table = newest
    raise AssertionError  # pragma: no cover - the loop returns or raises


def read_log(table: Namespace, *, strong: bool = True) -> Inputs:
    """Read the log as it applies to segments; if not ``strong``, none of its fragments.

    Raises ``FragmentMissingError``, ``FragmentCorruptError``: of the first fragment that cannot be used.
    """
    log = read_inputs(table, table.manifest.fragments if strong else (), RunContext())
    if log.blocked is not None:
        raise log.blocked.error
    return log


def live_rows(table: Namespace, log: Inputs | None = None) -> Iterator[Rows]:
    """Every row that a strong query may return, once each: those of the log (read if not given), then by segment."""
    log = log or read_log(table)
    yield log.rows
    yield from _segment_rows(table, log)


def _result(table: Namespace, query: Query) -> list[dict[str, Any]]:
    log = read_log(table, strong=query.consistency == "strong")
    passes = compile_filter(query.filter)
    hits = _by_text(table, query, log, passes) if query.text is not None else _by_vector(table, query, log, passes)
    best = sorted(hits, key=lambda hit: (hit[0], hit[1]))[: query.k]
    return [{"id": name, "distance": float(far), "attributes": more or {}} for far, name, more in best]


def _by_vector(
    table: Namespace, query: Query, log: Inputs, passes: Callable[[Attributes | None], bool]
) -> Sequence[Hit]:
    metric, _ = metric_of(table, query.metric)
    try:
        with np.errstate(over="ignore"):  # what does not fit is infinite, and refused below
            wanted = np.asarray(query.vector, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise errors.InvalidUsageError(f"The vector is not a list of numbers: {error}.") from error
    dimensions = dimensions_of(table) or (log.rows.vectors.shape[1] if log.rows.ids else None)
    if wanted.ndim != 1 or not np.isfinite(wanted).all() or (dimensions is not None and len(wanted) != dimensions):
        raise errors.InvalidUsageError(f"The vector must have {dimensions} finite values.")

    return nearest_rows(table, log, [wanted], query.k, query.nprobe, metric, passes)[0]


def nearest_rows(
    table: Namespace,
    log: Inputs,
    vectors: Sequence[NDArray[np.float32]],
    k: int,
    nprobe: int,
    metric: str,
    passes: Callable[[Attributes | None], bool] = lambda _: True,
    checkpoint: Callable[[], object] = lambda: None,
) -> list[list[Hit]]:
    """Per vector what a query with it finds, nearest first. A cluster is read once for all vectors that probe it."""
    best = [_best(log.rows, wanted, k, metric, passes) for wanted in vectors]
    for reader, later in _newest_first(table):
        centroids = reader.centroids()
        orders = (np.argsort(distances(centroids, vector, metric), kind="stable") for vector in vectors)
        probed = [{*order[:nprobe].tolist()} for order in orders]
        for number in sorted(set().union(*probed)):
            checkpoint()
            rows = reader.cluster(number).without(log.superseded).without(later)
            for at, wanted in enumerate(vectors):
                if number in probed[at]:
                    hits = _best(rows, wanted, k, metric, passes)
                    best[at] = sorted([*best[at], *hits], key=lambda hit: (hit[0], hit[1]))[:k]
    return best


def _best(
    rows: Rows, wanted: NDArray[np.float32], k: int, metric: str, passes: Callable[[Attributes | None], bool]
) -> list[Hit]:
    """The nearest of these rows: at most k of them can be among the nearest of all."""
    kept = [at for at, more in enumerate(rows.attributes) if passes(more)]
    if not kept:
        return []
    far = distances(rows.vectors[kept], wanted, metric)
    best = np.argsort(far, kind="stable")[:k]
    return [(float(far[at]), rows.ids[kept[at]], rows.attributes[kept[at]]) for at in best]


def distances(vectors: Matrix, wanted: NDArray[np.float32], metric: str) -> NDArray[np.float64]:
    """Per row its distance: 1 - cosine, squared Euclidean, or the negative dot product.

    In double precision: squares of single-precision numbers overflow above 1e19, and vanish below 1e-23.
    """
    far, to = np.empty(len(vectors)), wanted.astype(np.float64)
    for begins in range(0, len(vectors), _AT_ONCE):
        part, at = vectors[begins : begins + _AT_ONCE].astype(np.float64), slice(begins, begins + _AT_ONCE)
        if metric == "dot_product":
            far[at] = -(part @ to)
            continue
        part -= to if metric == "euclidean" else 0
        squares = np.einsum("nd,nd->n", part, part)
        if metric == "euclidean":
            far[at] = squares
            continue
        lengths = np.sqrt(squares) * np.linalg.norm(to)
        far[at] = 1 - np.clip(np.divide(part @ to, lengths, out=np.zeros(len(part)), where=lengths > 0), -1, 1)
    return far


def _newest_first(table: Namespace) -> Iterator[tuple[SegmentReader, set[str]]]:
    later: set[str] = set()
    segments = table.manifest.segments
    for place, segment in enumerate(reversed(segments)):
        reader = SegmentReader(table.store, segment)
        yield reader, later
        if place < len(segments) - 1:  # an older one may have the same ids, in any cluster
            later.update(name for number in range(segment.clusters) for name in reader.vectors(number)[0])


def _segment_rows(
    table: Namespace, log: Inputs, reads: Callable[[SegmentReader, int], bool] = lambda *_: True
) -> Iterator[Rows]:
    for reader, later in _newest_first(table):
        for number in (number for number in range(reader.segment.clusters) if reads(reader, number)):
            yield reader.cluster(number).without(log.superseded).without(later)


def _by_text(table: Namespace, query: Query, log: Inputs, passes: Callable[[Attributes | None], bool]) -> Iterator[Hit]:
    """BM25 over all live texts of the field; a segment's inverted lists determine which clusters must be read."""
    field, terms = query.field or "", [*dict.fromkeys(words(query.text))]
    matches: list[tuple[str, Attributes | None, Counter[str], int]] = []
    documents = length = 0
    skipped: list[tuple[int, float]] = []
    frequencies: Counter[str] = Counter()
    for rows in _candidates(table, log, field, terms, skipped):
        for name, more in zip(rows.ids, rows.attributes, strict=True):
            text = words((more or {}).get(field))
            if not text:
                continue
            documents, length = documents + 1, length + len(text)
            counts = Counter(word for word in text if word in terms)
            frequencies.update(counts.keys())
            if counts and passes(more):
                matches.append((name, more, counts, len(text)))
    documents += sum(count for count, _ in skipped)
    average = (length + sum(count * size for count, size in skipped)) / documents if documents else 1.0
    weights = {term: math.log((documents - frequencies[term] + 0.5) / (frequencies[term] + 0.5) + 1) for term in terms}
    for name, more, counts, size in matches:
        score = sum(
            weights[term] * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * size / average))
            for term, count in counts.items()
        )
        yield -score, name, more


def _candidates(
    table: Namespace, log: Inputs, field: str, terms: Sequence[str], skipped: list[tuple[int, float]]
) -> Iterator[Rows]:
    """Rows that may have one of the terms. Of clusters without any in their inverted lists, only counts and lengths."""

    def mentions(reader: SegmentReader, number: int) -> bool:
        if field not in reader.segment.fts_fields:
            return True
        path = reader.segment.prefix_of(number) + text_name(number)
        try:
            listed = decode_text_index(reader.read(path)).get(field)
        except errors.InvalidFormatError as error:
            raise errors.SegmentCorruptError(f"{path} cannot be read: {error}") from error
        if listed is None:
            return False
        if any(term in listed["postings"] for term in terms):
            return True
        skipped.append((listed["doc_count"], listed["avg_doc_length"]))
        return False

    yield log.rows
    yield from _segment_rows(table, log, mentions)
