"""Ask the indexes of a namespace, and compare: clusters with exact distances, bitmaps and inverted lists with rows.

What is right is computed here, by other code than that of queries and of compactions: it would have their faults.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.answers import IndexAnswers, share_by_query
from memwal_ops.core.verification import Inconsistency, Severity, with_findings
from memwal_ops.errors import InvalidFormatError, InvalidUsageError, SegmentCorruptError
from memwal_ops.formats.zeppelin.compaction import Inputs, metric_of
from memwal_ops.formats.zeppelin.reader import live_rows, nearest_rows, read_log
from memwal_ops.formats.zeppelin.segments import SegmentReader
from memwal_ops.formats.zeppelin.wire.fragment import WIKI, Attributes
from memwal_ops.formats.zeppelin.wire.segment import bitmap_name, decode_bitmaps, decode_text_index, text_name
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.specs import ZeppelinVerifyOptions

    Matrix = NDArray[np.float32]
    # Per key of a bitmap, or word: the rows of the cluster, and how often they have it.
    Listed = Mapping[str, Mapping[int, int]]

VECTORS = "vectors"
_KINDS = {"bitmap": "Bitmap", "text": "Inverted"}
_K, _NPROBE = 10, 8
# Times that clusters are read: to draw queries, by the queries, and to find the nearest of all rows.
_READ = 3
_AT_ONCE = 4096
_TIES = 1e-5
_MOST_VALUES, _LONGEST_WORD = 10_000, 40
_PAGE = "runbooks/wrong-answers.md"
_REWRITE = "memwal-ops merge URI --retrain writes it again."


def check_answers(
    table: Namespace, options: ZeppelinVerifyOptions, context: RunContext, seed: int
) -> tuple[list[IndexAnswers], list[Inconsistency]]:
    """Ask the clusters of vectors, and each field's bitmaps and inverted lists.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
        MemwalOpsError: an object that queries need is missing or damaged.
    """
    chosen = _chosen(table, options)
    size = _size(table)
    results = []
    if VECTORS in chosen:
        results.append(_vectors(table, options, context, seed, size))
    others = [name for name in chosen if name != VECTORS]
    if others:
        results += _lists(table, others, context, size if size <= options.max_bytes else None)
    findings = [[*_findings(answers)] for answers in results]
    results = [*map(with_findings, results, findings)]
    return results, [*chain.from_iterable(findings)] if not options.deep else []


def plan_answers(table: Namespace, options: ZeppelinVerifyOptions) -> list[IndexAnswers]:
    """What asking costs at most, by index. Without requests.

    Raises ``InvalidUsageError``: there is no index of a name that was given.
    """
    size, rows = _size(table), table.manifest.segment_rows
    planned = []
    for name in _chosen(table, options):
        read = _READ * size if name == VECTORS else size
        queries = min(options.samples, rows) if name == VECTORS else 0
        fits = read <= options.max_bytes
        kind = "IVF" if name == VECTORS else _KINDS[name.partition(" ")[0]]
        skipped = "" if fits else f"it would read about {read:,} bytes: above --max-bytes"
        size_at_most = read if fits else 0
        planned.append(
            IndexAnswers(index=name, type=kind, queries=queries, bytes_at_most=size_at_most, skipped=skipped)
        )
    return planned


def _size(table: Namespace) -> int:
    return 4 * table.manifest.segment_rows * (table.meta.dimensions or 0)


def _chosen(table: Namespace, options: ZeppelinVerifyOptions) -> list[str]:
    fields = {
        f"{kind} {field}"
        for segment in table.manifest.segments
        for kind, names in (("bitmap", segment.bitmap_fields), ("text", segment.fts_fields))
        for field in names
    }
    names = [VECTORS, *sorted(fields)] if table.manifest.segments else []
    unknown = sorted(set(options.index) - {*names})
    if unknown:
        listed = ", ".join(map(repr, names)) or "none"
        raise InvalidUsageError(f"The namespace has no index {unknown[0]!r}; it has: {listed}.")
    return [name for name in names if not options.index or name in options.index]


def _vectors(
    table: Namespace, options: ZeppelinVerifyOptions, context: RunContext, seed: int, size: int
) -> IndexAnswers:
    """Recall of searches with the defaults of a query, for rows drawn from all that are live."""
    segments = len(table.manifest.segments)
    base: dict[str, Any] = {"index": VECTORS, "type": "IVF", "segments": segments}
    base["settings"] = f"k {_K}, nprobe {_NPROBE}"
    random = np.random.default_rng(seed)
    drawn: list[Any] = []
    rows = 0
    if _READ * size > options.max_bytes:
        read = f"its segments have about {size:,} bytes, read {_READ} times"
        return IndexAnswers(**base, skipped=f"{read}: above --max-bytes")
    log = read_log(table)
    for part in live_rows(table, log):
        context.checkpoint()
        for vector in part.vectors:  # a reservoir: each row has the same chance
            rows += 1
            if len(drawn) < options.samples:
                drawn.append(vector.copy())  # not a view, which would keep all of its cluster
            elif (at := int(random.integers(0, rows))) < options.samples:
                drawn[at] = vector.copy()
    if not drawn:
        return IndexAnswers(**base, skipped="it has no rows")
    metric, _ = metric_of(table, options.metric)
    answers = nearest_rows(table, log, drawn, _K, _NPROBE, metric, checkpoint=context.checkpoint)
    returned = defaultdict[str, list[int]](list)
    for number, answer in enumerate(answers):
        context.advance("asking indexes", "queries", total=len(drawn))
        for _, name, _ in answer:
            returned[name].append(number)
    hits, totals = [], []
    for returned_far, nearest_far in zip(*_scanned(table, log, drawn, returned, metric, context), strict=True):
        there = nearest_far[np.isfinite(nearest_far)]
        limit = float(there.max(initial=-np.inf))
        near = sum(far <= limit + _TIES * max(abs(limit), 1e-3) for far in returned_far)
        totals.append(int(there.size))
        hits.append(min(near, int(there.size)))
    # Where a query probes all clusters, nothing may be missing.
    whole = all(segment.clusters <= _NPROBE for segment in table.manifest.segments)
    return IndexAnswers(
        **base,
        queries=len(drawn),
        wrong=sum(hit < total for hit, total in zip(hits, totals, strict=True)) if whole else 0,
        recall=share_by_query(hits, totals, seed),
        rows_compared=rows,
        bytes_at_most=_READ * size,
    )


def _scanned(
    table: Namespace, log: Inputs, drawn: Sequence[Matrix], returned: Mapping[str, list[int]], metric: str,
    context: RunContext,
) -> tuple[list[list[float]], list[NDArray[np.float64]]]:  # fmt: skip
    """Per query the distances of the rows that were ``returned``, and those of the nearest of all rows."""
    real, nearest = [list[float]() for _ in drawn], [np.full(_K, np.inf) for _ in drawn]
    parts = ((rows, at) for rows in live_rows(table, log) for at in range(0, len(rows.ids), _AT_ONCE))
    for part, begins in parts:
        context.checkpoint()
        some = slice(begins, begins + _AT_ONCE)
        far = np.stack([_exact(part.vectors[some], vector, metric) for vector in drawn])
        for place, name in enumerate(part.ids[some]):
            for number in returned.get(name, ()):
                real[number].append(float(far[number, place]))
        for number, row in enumerate(far):
            nearest[number] = np.partition(np.concatenate([nearest[number], row]), _K - 1)[:_K]
    return real, nearest


def _exact(vectors: Matrix, wanted: Matrix, metric: str) -> NDArray[np.float64]:
    """Per row its distance, in double precision; of cosine: half the square of the chord between both directions."""
    points, to = vectors.astype(np.float64), wanted.astype(np.float64)
    far: NDArray[np.float64]
    if metric == "dot_product":
        far = -np.einsum("nd,d->n", points, to)
        return far
    if metric == "cosine":
        lengths, length = np.linalg.norm(points, axis=1), np.linalg.norm(to)
        if not length:
            return np.ones(len(points))
        points, to = points / np.where(lengths, lengths, 1)[:, None], to / length
    far = np.linalg.norm(points - to, axis=1) ** 2
    return np.where(lengths, far / 2, 1) if metric == "cosine" else far


def _lists(table: Namespace, names: list[str], context: RunContext, size: int | None) -> list[IndexAnswers]:
    """Each value of a bitmap and each word of an inverted list, compared with the rows of its cluster."""
    kinds = {name: _KINDS[name.partition(" ")[0]] for name in names}
    segments = len(table.manifest.segments)
    if table.manifest.dialect != WIKI or size is None:
        why = "its clusters do not fit into --max-bytes" if size is None else "its keys are those of another program"
        return [IndexAnswers(index=name, type=kinds[name], segments=segments, skipped=why) for name in names]
    counts: dict[str, dict[str, Any]] = {name: defaultdict(int) for name in names}
    errors: dict[str, str] = {}
    rows = 0
    for segment in table.manifest.segments:
        reader = SegmentReader(table.store, segment)
        for number in range(segment.clusters):
            context.checkpoint()
            cluster = reader.cluster(number)
            rows += len(cluster.ids)
            for kind, fields in (("bitmap", segment.bitmap_fields), ("text", segment.fts_fields)):
                wanted = [field for field in fields if f"{kind} {field}" in names]
                if not wanted:
                    continue
                path = segment.prefix_of(number) + (bitmap_name(number) if kind == "bitmap" else text_name(number))
                try:
                    listed = listed_rows(kind, reader.read(path))
                except (SegmentCorruptError, InvalidFormatError) as error:
                    errors |= {f"{kind} {field}": str(error) for field in wanted}
                    continue
                for field in wanted:
                    right, there = expected_rows(kind, cluster.attributes, field), listed.get(field, {})
                    _compare(right, there, number, counts[f"{kind} {field}"])
    for name, why in errors.items():
        counts[name] |= {"wrong": counts[name]["wrong"] or 1, "error": why}
    common: dict[str, Any] = {"segments": segments, "rows_compared": rows, "bytes_at_most": size}
    return [IndexAnswers(index=name, type=kinds[name], **common, **counts[name]) for name in names]


def _compare(right: Listed, there: Listed, cluster: int, counts: dict[str, Any]) -> None:
    for key in right.keys() | there.keys():
        lost = right.get(key, {}).keys() - there.get(key, {}).keys()
        more = there.get(key, {}).keys() - right.get(key, {}).keys()
        counts["queries"] += 1
        counts["wrong"] += bool(lost or more)
        for name, rows in (("missing", lost), ("extra", more)):
            counts[name] += len(rows)
            examples = (f"{cluster}:{row}" for row in sorted(rows))
            counts[f"examples_{name}"] = [*(counts[f"examples_{name}"] or ()), *examples][:5]


def listed_rows(kind: str, data: bytes) -> Mapping[str, Listed]:
    """By field what a bitmap object, or an object of inverted lists, has.

    Raises ``InvalidFormatError``: it cannot be read, or contradicts itself.
    """
    if kind == "bitmap":
        maps = decode_bitmaps(data)
        return {field: {key: dict.fromkeys(rows, 1) for key, rows in keys.items()} for field, keys in maps.items()}
    lists = {}
    try:
        for field, of in decode_text_index(data).items():
            words = {
                word: {int(entry["position"]): int(entry["tf"]) for entry in listed["entries"]}
                for word, listed in of["postings"].items()
            }
            documents = len({row for rows in words.values() for row in rows})
            length = sum(sum(rows.values()) for rows in words.values())
            if (
                of["doc_count"] != documents
                or abs(of["avg_doc_length"] * documents - length) > _TIES * length
                or any(listed["df"] != len(words[word]) for word, listed in of["postings"].items())
            ):
                raise InvalidFormatError(f"Its counts of {field!r} are not those of its lists.")
            lists[field] = words
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidFormatError(f"Its inverted lists cannot be read: {error!r:.120}.") from error
    return lists


def expected_rows(kind: str, rows: Sequence[Attributes | None], field: str) -> Listed:
    """What the index of a field must have of the rows of a cluster; nothing: the field has no index there."""
    listed: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for place, attributes in enumerate(rows):
        value = (attributes or {}).get(field)
        if kind == "text":
            for word in re.findall(r"\w+", value.lower()) if isinstance(value, str) else ():
                if len(word) <= _LONGEST_WORD:
                    listed[word][place] += 1
            continue
        for item in value if isinstance(value, list) else () if value is None else (value,):
            if not isinstance(item, str | int | float) or (isinstance(item, int) and abs(item) >= 2**1024):
                return {}
            listed[_key(item)][place] = 1
    return listed if kind == "text" or len(listed) <= _MOST_VALUES else {}


def _key(value: Any) -> str:
    if isinstance(value, bool):
        return "b:true" if value else "b:false"
    if isinstance(value, float):
        return f"f:{np.float64(value).view(np.uint64)}"
    return f"{'s' if isinstance(value, str) else 'i'}:{value}"


def _findings(answers: IndexAnswers) -> Iterator[Inconsistency]:
    def wrong(check: str, evidence: str, consequence: str) -> Inconsistency:
        return Inconsistency(
            Severity.ERROR, check, f"the index {answers.index!r}", evidence, consequence, _REWRITE, _PAGE
        )

    if answers.error:
        yield wrong("index_misses_rows", answers.error, "Queries by it fail.")
    if answers.index == VECTORS and answers.wrong:
        yield wrong(
            "index_recall_low",
            f"{counted(answers.wrong, 'query', 'queries')} of {answers.queries:,} miss some of the {_K} nearest rows, "
            "although all clusters are probed.",
            "Queries by it do not find the nearest rows.",
        )
    if answers.missing:
        some = ", ".join(map(str, answers.examples_missing))
        lacks = f"It lacks {counted(answers.missing, 'row')}, for example (cluster:row) {some}."
        yield wrong("index_misses_rows", lacks, "Queries by it do not find rows that exist.")
    if answers.extra:
        some = ", ".join(map(str, answers.examples_extra))
        more = f"It has {counted(answers.extra, 'row')} too many, as (cluster:row) {some}."
        yield wrong("index_returns_dead_rows", more, "Queries by it return rows that do not match.")
