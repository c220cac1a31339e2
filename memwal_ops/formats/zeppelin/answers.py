"""Ask the indexes of a namespace, and compare: clusters with exact distances, bitmaps and inverted lists with rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.answers import IndexAnswers, share_by_query
from memwal_ops.core.verification import Finding, Severity, with_findings
from memwal_ops.errors import InvalidFormatError, InvalidUsageError, SegmentCorruptError
from memwal_ops.formats.zeppelin.compaction import metric_of
from memwal_ops.formats.zeppelin.reader import distances, live_rows, nearest_rows, read_log
from memwal_ops.formats.zeppelin.segments import SegmentReader
from memwal_ops.formats.zeppelin.wire.fragment import WIKI
from memwal_ops.formats.zeppelin.wire.indexes import (
    bitmap_name,
    decode_bitmaps,
    decode_text_index,
    encode_bitmaps,
    encode_text_index,
    text_name,
)
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import VerifyOptions

VECTORS = "vectors"
_KINDS = {"bitmap": "Bitmap", "text": "Inverted"}
_K, _NPROBE = 10, 8
# Times that clusters are read: to draw queries, to find the nearest of all rows, and by the queries.
_READ = 3
_TIES = 1e-5
_PAGE = "runbooks/wrong-answers.md"
_REWRITE = "memwal-ops merge URI --retrain writes it again."


def check_answers(
    table: Namespace, options: VerifyOptions, context: RunContext, seed: int
) -> tuple[list[IndexAnswers], list[Finding]]:
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
    found = [[*_findings(answers)] for answers in results]
    results = [with_findings(answers, wrong) for answers, wrong in zip(results, found, strict=True)]
    return results, [one for wrong in found for one in wrong] if not options.deep else []


def plan_answers(table: Namespace, options: VerifyOptions) -> list[IndexAnswers]:
    """What asking costs at most, by index. Without requests.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
    """
    size, rows = _size(table), sum(one.vectors for one in table.manifest.segments)
    planned = []
    for name in _chosen(table, options):
        read = _READ * size if name == VECTORS else size
        queries = min(options.samples, rows) if name == VECTORS else 0
        fits = read <= options.max_bytes
        planned.append(IndexAnswers(
            index=name,
            type="IVF" if name == VECTORS else _KINDS[name.partition(" ")[0]],
            queries=queries,
            bytes_at_most=read if fits else 0,
            skipped="" if fits else f"it would read about {read:,} bytes: above --max-bytes",
        ))  # fmt: skip
    return planned


def _size(table: Namespace) -> int:
    """About how many bytes the clusters of all segments have."""
    return 4 * sum(one.vectors for one in table.manifest.segments) * (table.meta.dimensions or 0)


def _chosen(table: Namespace, options: VerifyOptions) -> list[str]:
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


def _vectors(table: Namespace, options: VerifyOptions, context: RunContext, seed: int, size: int) -> IndexAnswers:
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
    nearest = [np.full(_K, np.inf, np.float32) for _ in drawn]
    for part in live_rows(table, log):
        context.checkpoint()
        if not part.ids:
            continue
        for number, vector in enumerate(drawn):
            far = np.concatenate([nearest[number], distances(part.vectors, vector, metric)])
            nearest[number] = np.partition(far, _K - 1)[:_K]
    hits, totals = [], []
    answers = nearest_rows(table, log, drawn, _K, _NPROBE, metric, checkpoint=context.checkpoint)
    for number, found in enumerate(answers):
        context.advance("asking indexes", "queries", total=len(drawn))
        real = nearest[number][np.isfinite(nearest[number])]
        limit = float(real.max()) if real.size else 0.0
        near = sum(far <= limit + _TIES * max(abs(limit), 1e-3) for far, _, _ in found)
        totals.append(int(real.size))
        hits.append(min(near, int(real.size)))
    return IndexAnswers(
        **base,
        queries=len(drawn),
        recall=share_by_query(hits, totals, seed),
        rows_compared=rows,
        bytes_at_most=_READ * size,
    )


def _lists(table: Namespace, names: list[str], context: RunContext, size: int | None) -> list[IndexAnswers]:
    """Each value of a bitmap and each word of an inverted list, compared with the rows of its cluster."""
    kinds = {name: _KINDS[name.partition(" ")[0]] for name in names}
    segments = len(table.manifest.segments)
    if table.manifest.dialect != WIKI or size is None:
        why = "its clusters do not fit into --max-bytes" if size is None else "its keys are those of another program"
        return [IndexAnswers(index=name, type=kinds[name], segments=segments, skipped=why) for name in names]
    asked, wrong, missing, extra = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    errors: dict[str, str] = {}
    examples: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"missing": [], "extra": []})
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
                    found = _rows_of(kind, reader.read(path))
                except (SegmentCorruptError, InvalidFormatError) as error:
                    errors |= {f"{kind} {field}": str(error) for field in wanted}
                    continue
                encode = encode_bitmaps if kind == "bitmap" else encode_text_index
                right = _rows_of(kind, encode(cluster.attributes, fields))
                for field in wanted:
                    name, one, other = f"{kind} {field}", right.get(field, {}), found.get(field, {})
                    for key in one.keys() | other.keys():
                        asked[name] += 1
                        lost = one.get(key, frozenset()) - other.get(key, frozenset())
                        more = other.get(key, frozenset()) - one.get(key, frozenset())
                        wrong[name] += bool(lost or more)
                        missing[name] += len(lost)
                        extra[name] += len(more)
                        examples[name]["missing"] += [f"{number}:{at}" for at in sorted(lost)]
                        examples[name]["extra"] += [f"{number}:{at}" for at in sorted(more)]
                        del examples[name]["missing"][5:], examples[name]["extra"][5:]
    return [
        IndexAnswers(
            index=name,
            type=kinds[name],
            segments=segments,
            queries=asked[name],
            wrong=max(wrong[name], int(name in errors)),
            missing=missing[name],
            extra=extra[name],
            examples_missing=examples[name]["missing"],
            examples_extra=examples[name]["extra"],
            rows_compared=rows,
            bytes_at_most=size,
            error=errors.get(name, ""),
        )
        for name in names
    ]


def _rows_of(kind: str, data: bytes) -> Mapping[str, Mapping[str, frozenset[int]]]:
    """By field and key the rows of a bitmap object, or of an object of inverted lists."""
    if kind == "bitmap":
        maps = decode_bitmaps(data)
        return {field: {key: frozenset(rows) for key, rows in found.items()} for field, found in maps.items()}
    try:
        return {
            field: {
                word: frozenset(int(entry["position"]) for entry in listed["entries"])
                for word, listed in found["postings"].items()
            }
            for field, found in decode_text_index(data).items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidFormatError(f"Its inverted lists cannot be read: {error!r:.120}.") from error


def _findings(answers: IndexAnswers) -> Iterator[Finding]:
    place = f"the index {answers.index!r}"
    if answers.error:
        yield Finding(
            Severity.ERROR, "index_misses_rows", place, answers.error, "Queries by it fail.", _REWRITE, _PAGE
        )  # fmt: skip
    if answers.missing:
        yield Finding(
            Severity.ERROR, "index_misses_rows", place,
            f"It lacks {counted(answers.missing, 'row')}, for example (cluster:row) {_some(answers.examples_missing)}.",
            "Queries by it do not find rows that exist.", _REWRITE, _PAGE,
        )  # fmt: skip
    if answers.extra:
        yield Finding(
            Severity.ERROR, "index_returns_dead_rows", place,
            f"It has {counted(answers.extra, 'row')} too many, as (cluster:row) {_some(answers.examples_extra)}.",
            "Queries by it return rows that do not match.", _REWRITE, _PAGE,
        )  # fmt: skip


def _some(examples: Any) -> str:
    return ", ".join(map(str, examples))
