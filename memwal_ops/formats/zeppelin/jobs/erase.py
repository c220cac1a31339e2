"""Erase rows of a namespace: delete them by an append, compact, and collect what the compaction replaced.

A compaction writes living rows alone into a new segment. So what may hold a deleted row is the log, and each object
that the live manifest does not list any more. Before a certificate is written, all bytes that stay are searched.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from memwal_ops.core import collector
from memwal_ops.core.byte_scan import ErasedValues, ScanScope
from memwal_ops.core.candidates import UNKNOWN, Candidate, Verdict
from memwal_ops.core.certificate import NOT_SEEN, CheckReport, Erasure, TableSurvey, run_erasure
from memwal_ops.core.erasure import EraseReport, RowHolder
from memwal_ops.core.options import OptionError
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import MemwalOpsError, VersionGoneError
from memwal_ops.formats.zeppelin.backlog import contested, read_fragment
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.namespace import Namespace, probe, read_revision
from memwal_ops.formats.zeppelin.reader import compile_filter, live_rows, read_log
from memwal_ops.formats.zeppelin.roots import prefix_of
from memwal_ops.formats.zeppelin.segments import Rows, SegmentReader
from memwal_ops.formats.zeppelin.specs import ZeppelinEraseOptions, ZeppelinGcOptions, ZeppelinMergeOptions
from memwal_ops.formats.zeppelin.wire import MANIFEST, META
from memwal_ops.formats.zeppelin.wire.manifest import (
    FIELDS,
    FRAGMENT_FIELDS,
    SEGMENT_FIELDS,
    FragmentRef,
    Manifest,
    SegmentRef,
)
from memwal_ops.formats.zeppelin.writer import Writer
from memwal_ops.storage.clock import store_time
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.core.context import RunContext

    Test = Callable[[str, Any], bool]

_MAY_HAVE = "it may have rows that were deleted before that time"
_NAMESAKES = (
    "{} with another id and an attribute named id that matches: the id is meant, and such rows stay. Name their ids to "
    "erase them."
)
_NEXT_RUN = timedelta(minutes=15)
_NO_ROWS = "it has no rows"
_LISTS = re.compile(r"(manifest|meta|lease)\.json|(manifests|snapshots|_gc|_lifecycle|_staging)/.*")
_KEEPERS = ("hold ", "the snapshot ")
_AVERAGES = ("centroids.bin", "pq_codebook.bin", "sq_calibration.bin")
_VECTOR_BYTES = 16
_REMEDY = {
    True: "memwal-ops merge URI --retrain trains others",
    False: "move or delete it if a server or a person wrote it, or report this",
}
_WORDS = json.dumps([
    *FIELDS, *FRAGMENT_FIELDS, *SEGMENT_FIELDS, "key_prefix", "centroid_count", "created_at", "attributes", "checksum",
    "vectors", "sorted_numeric_keys", "avg_doc_length", "doc_count", "postings", "position", "expires_at",
    "acquired_at", "candidates", "first_seen_unreachable_at", "unreachable_since_manifest_version", "imbalance",
    "dimensions", "distance_metric", "index_type", "ivf_flat", "updated_at", "full_text_search", "cosine", "euclidean",
    "dot_product", "fencing_token", "holder_id", "namespace",
]).encode()  # fmt: skip
"""Names in objects of every namespace: a value that is one of them is not looked for."""

__all__ = ["EraseReport", "ZeppelinEraseOptions", "apply", "plan"]


def plan(table: Namespace, options: ZeppelinEraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Report what holds such rows. Reads only."""
    return run_erasure(table, options, partial(_begin, table, options, context), applied=False)


def apply(table: Namespace, options: ZeppelinEraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Erase. Safe to kill, to repeat, and concurrently with writers, readers and compactions.

    Raises:
        BusyError: another compactor holds the lease.
        MemwalOpsError: as merge and gc; what was done stays, and the next run continues.
    """
    probe(table)
    return run_erasure(table, options, partial(_begin, table, options, context), applied=True)


def _begin(table: Namespace, options: ZeppelinEraseOptions, context: RunContext) -> NamespaceErasure:
    if options.ttl.column is not None:
        raise OptionError("{ttl} does not apply: an attribute of a namespace has no type of times.", "ttl")
    table.check_writable()
    wanted = None if options.where is None else _parsed(options.where)
    test = compile_filter(wanted)
    # The id comes last: an attribute named "id" would hide it, another row be deleted, and the asked one stay.
    matches: Test = lambda name, attributes: test({**(attributes or {}), "id": name})  # noqa: E731 - one line
    now, chosen = min(datetime.now(UTC), store_time(table.store)), None if wanted is None else matches
    return NamespaceErasure(table.newest(), chosen, now, wanted, options=options, context=context)


def _parsed(where: str) -> dict[str, Any]:
    """The filter on a row's attributes and id. Raises ``OptionError``: it is no filter."""
    try:
        condition = json.loads(where)
        if not isinstance(condition, dict) or not condition:
            raise OptionError("{where} is no filter, as queries have it: a JSON object that is not empty.", "where")
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"{{where}} is no filter, as queries have it: {error}.",
            "where",
            remedy='Write it like {{"id": "a"}} or {{"op": "in", "field": "user", "values": [1, 2]}}.',
        ) from error
    return condition


@dataclass
class NamespaceErasure(Erasure):
    """The erasure of rows of a namespace.

    Attributes:
        table: the newest manifest that it has read.
        matches: whether a row must be gone, by the filter ``wanted``; None: all that was deleted before a time.
        now: by the slower of both clocks.
    """

    table: Namespace
    matches: Test | None
    now: datetime
    wanted: dict[str, Any] | None
    _left: TableSurvey | None = field(default=None, init=False)
    _read: dict[str, str | None] = field(default_factory=dict, init=False)
    not_seen: ClassVar[tuple[str, ...]] = (
        *NOT_SEEN,
        "averages: centroids and codebooks, until memwal-ops merge --retrain trains others",
        "the ids of deleted rows in pending_deletes of manifests",
    )
    written_in_place: ClassVar[tuple[str, ...]] = (MANIFEST, META, "lease.json", "_gc/", "_lifecycle/", "_staging/")

    @property
    def before(self) -> datetime | None:
        """See the base class."""
        return self.options.cut(self.now)

    @property
    def gc_options(self) -> ZeppelinGcOptions:
        """The grace times of gc: no longer than revisions have to be old, and no shorter than is safe."""
        default, unsafe = ZeppelinGcOptions(), self.options.allow_unsafe
        minute, hour = (timedelta(0) if unsafe else least for least in (timedelta(minutes=1), timedelta(hours=1)))
        reader_grace = min(default.reader_grace, max(self.options.older_than, minute))
        orphan_min_age = min(default.orphan_min_age, max(self.options.older_than, hour))
        return ZeppelinGcOptions(
            reader_grace=reader_grace, orphan_min_age=orphan_min_age, keep_revisions=1, allow_unsafe=unsafe
        )

    def survey(self) -> TableSurvey:
        """See the base class."""
        self.context.checkpoint()
        newest = self.table.newest()
        if self._left is not None and newest.data == self._left.table.data:
            return self._left
        self.table = newest
        survey = TableSurvey(newest, living=len(self._living()))
        if self.matches is None and (left := contested(newest)).ids:
            survey.holders.append(
                RowHolder("row", "wal/", f"{left}: delete them by an append, or write them again", blocks=True)
            )
        evidence = gc.NamespaceEvidence.of(newest, self.gc_options, self.now)
        objects, report = gc.NamespaceObjects(newest, evidence), gc.ZeppelinGcReport(applied=False)
        listed = {candidate.path: candidate for candidate in collector.candidates([objects], report)}
        why = {**self._of(newest.manifest, is_live=True), **self._retained(evidence)}
        for meta in newest.store.list():
            path = prefix_of(meta.path).rstrip("/") if meta.path.startswith("segments/") else meta.path
            survey.objects.append((meta, self._proof(path, why)))
            if survey.objects[-1][1] is None and path not in {holder.name for holder in survey.holders}:
                survey.holders.append(self._holder(path, why.get(path), listed.get(path)))
        self._left = survey
        return survey

    def count(self, name: str, number: int) -> None:
        """See the base class."""
        super().count(name, number)
        if number:
            self._left = None

    def _living(self) -> list[str]:
        """Rows to be deleted; and contested ones, which no query returns, and no compaction removes before a delete."""
        if self.matches is None:
            return []
        log, test, namesakes = read_log(self.table), compile_filter(self.wanted), 0
        living = [*self._matching(log.contested.ids, log.contested.attributes)]
        for rows in live_rows(self.table, log):
            matching = [*self._matching(rows.ids, rows.attributes)]
            living += matching
            chosen = {*matching}
            namesakes += sum(
                name not in chosen and "id" in (more or {}) and test(more)
                for name, more in zip(rows.ids, rows.attributes, strict=True)
            )
        self.warnings = [_NAMESAKES.format(counted(namesakes, "row"))] if namesakes else []
        return living

    def _matching(self, ids: Any, attributes: Any) -> Iterator[str]:
        assert self.matches is not None  # noqa: S101 - the callers check
        return (name for name, values in zip(ids, attributes, strict=True) if self.matches(name, values))

    def _retained(self, evidence: gc.NamespaceEvidence) -> dict[str, str | None]:
        live = self.table.manifest
        holders: dict[str, str | None] = {}
        for revision in evidence.roots.revisions:
            if revision.kept is not None:
                with suppress(VersionGoneError):  # another collector has expired it meanwhile
                    holders |= self._of(read_revision(self.table, revision.number), is_live=False)
        gone = live.fragment_keys | {prefix.rstrip("/") for prefix in live.prefixes}
        return {path: why for path, why in holders.items() if path not in gone}

    def _of(self, manifest: Manifest, *, is_live: bool) -> dict[str, str | None]:
        """Why objects of a manifest may hold such rows; None: they do not."""
        holders: dict[str, str | None] = {}
        for ref in manifest.fragments:
            holders[ref.key] = self._once(ref.key, partial(self._why_fragment, ref, is_live=is_live))
        for segment in manifest.segments:
            path = segment.prefix.rstrip("/")
            holders[path] = None if is_live else _MAY_HAVE
            if self.matches is not None:
                holders[path] = self._once(f"{path} {is_live}", partial(self._matching_rows, segment))
            for prefix in {prefix.rstrip("/") for prefix in manifest.prefixes} - {path}:
                holders.setdefault(prefix, holders[path])  # clusters that a server carried over
        return holders

    def _once(self, key: str, search: Callable[[], str | None]) -> str | None:
        if key not in self._read:
            try:
                self._read[key] = search()
            except MemwalOpsError as error:
                self._read[key] = f"it cannot be read: {error}"
        return self._read[key]

    def _why_fragment(self, ref: FragmentRef, *, is_live: bool) -> str | None:
        if self.matches is None:
            meta = self.table.store.head(ref.key)
            old = meta is None or self.before is None or meta.last_modified < self.before
            return _MAY_HAVE if old or not is_live else None
        fragment = read_fragment(self.table, ref)
        gone = self._matching(fragment.deletes, [None] * len(fragment.deletes))
        return self._counted(sum(1 for _ in (*self._matching(fragment.ids, fragment.attributes), *gone)))

    def _matching_rows(self, segment: SegmentRef) -> str | None:
        parts = SegmentReader(self.table.store, segment).clusters()
        return self._counted(sum(1 for part in parts for _ in self._matching(part.ids, part.attributes)))

    @staticmethod
    def _counted(rows: int) -> str | None:
        return f"it has {counted(rows, 'such row')}" if rows else None

    def _proof(self, path: str, why: dict[str, str | None]) -> str | None:
        if path in why:
            clean = (
                "it was read: no row in it matches" if self.matches else "it was made of living rows since that time"
            )
            return clean if why[path] is None else None
        own = path.startswith("_mem_wal_ops/") and not path.startswith(f"{QUARANTINE_FOLDER}/")
        return _NO_ROWS if own or _LISTS.fullmatch(path) else None

    def _holder(self, path: str, why: str | None, candidate: Candidate | None) -> RowHolder:
        kind = "segment" if path.startswith("segments/") else "fragment" if path.startswith("wal/") else "object"
        text = why or "no revision lists it any more, and it is not searched"
        if candidate is None or candidate.kind == UNKNOWN:
            return RowHolder("unrecognized", path, "it is not searched: move or delete it", blocks=True)
        if path in self.table.manifest.fragment_keys or f"{path}/" in self.table.manifest.prefixes:
            return RowHolder(kind, path, f"{text}; it is compacted first")
        if candidate.verdict is Verdict.DELETE:
            return RowHolder(kind, path, text)
        unmet = [gate for gate in candidate.gates if not gate.met]
        blocks = any(keeper in gate.text for gate in unmet for keeper in _KEEPERS)
        later = self.now + max(self.gc_options.reader_grace, _NEXT_RUN)
        until = None if blocks else max((gate.until or later for gate in unmet), default=later)
        return RowHolder(kind, path, f"{text}; {candidate.why}", until, blocks)

    def erase(self) -> TableSurvey:
        """See the base class."""
        if self.options.certificate is not None and self.matches is not None:
            self._remember()
        survey = self.survey()
        if self.matches is not None and survey.living:
            self.context.step("delete")
            gone = self._living()
            Writer(self.table).append(deletes=gone)
            self.count("rows_deleted", len(gone))
        if self.survey().holders:
            self.context.step("merge")
            merged = merge.apply(self.table.newest(), ZeppelinMergeOptions(), self.context)
            self.count("fragments_merged", merged.fragments)
            if merged.blocked is not None:
                self.faults.append(RowHolder("fragment", merged.blocked.id, str(merged.blocked.error), blocks=True))
        if self.survey().holders:
            if self.options.certificate is not None and self.matches is None:
                self._remember()
            self.context.step("gc")
            report = gc.apply(self.table.newest(), self.gc_options, self.context)
            self.count("objects_deleted", report.deleted_objects)
        return self.survey()

    def _remember(self) -> None:
        """Keep the values of the rows that must be gone, in all objects of recorded revisions, while they are there.

        Without an expression: of all rows of objects that the live manifest does not list any more.
        """
        self.values.add("a value of --where", _values_of(self.wanted))
        live = self.table.newest().manifest
        evidence = gc.NamespaceEvidence.of(self.table, self.gc_options, self.now)
        seen = set[str]() if self.matches is not None else {*live.fragment_keys, *live.prefixes}
        for number in [None, *(revision.number for revision in evidence.roots.revisions)]:
            manifest = live
            if number is not None:
                try:
                    manifest = read_revision(self.table, number)
                except VersionGoneError:
                    continue
            reads: list[tuple[str, Callable[[], Iterable[Rows]]]] = [
                *((ref.key, partial(self._rows, ref)) for ref in manifest.fragments),
                *((segment.prefix, SegmentReader(self.table.store, segment).clusters) for segment in manifest.segments),
            ]
            for key, read in reads:
                if key not in seen:
                    seen.add(key)
                    with suppress(MemwalOpsError):  # collected meanwhile, or it cannot be read: the survey names it
                        for rows in read():
                            self._keep(rows)

    def _rows(self, ref: FragmentRef) -> list[Rows]:
        fragment = read_fragment(self.table, ref)
        return [Rows(fragment.ids, fragment.values, fragment.attributes)]

    def _keep(self, rows: Rows) -> None:
        for name, vector, attributes in zip(rows.ids, rows.vectors, rows.attributes, strict=True):
            if self.matches is None or self.matches(name, attributes):
                self.values.add("the id", name)
                if vector.nbytes >= _VECTOR_BYTES:
                    packed = b"".join(b"\xca" + value.tobytes() for value in vector.astype(">f4"))
                    self.values.add("the vector", vector.astype("<f4").tobytes(), packed, ",".join(map(str, vector)))
                for attribute, value in (attributes or {}).items():
                    self.values.add(f"the attribute {attribute!r:.40}", value)

    def scanned(self) -> ScanScope | None:
        """See the base class."""
        if self.options.certificate is None:
            return None
        return ScanScope(self.table.store, self._forget, lambda path: ("object", _REMEDY[path.endswith(_AVERAGES)]))

    def _forget(self, values: ErasedValues) -> None:
        table = self.table.newest()
        names = [name for segment in table.manifest.segments for name in segment.bitmap_fields + segment.fts_fields]
        values.forget(_WORDS, [table.manifest.namespace, *names, *table.meta.full_text])
        for rows in live_rows(table):
            data = json.dumps([*rows.ids, *rows.attributes], ensure_ascii=False).encode("utf-8", "surrogatepass")
            values.forget(data + rows.vectors.tobytes(), [*rows.ids, *rows.attributes])


def _values_of(wanted: Any) -> list[Any]:
    if isinstance(wanted, list):
        return [value for part in wanted for value in _values_of(part)]
    if not isinstance(wanted, dict):
        return []
    if "op" not in wanted:
        return [*wanted.values()]
    parts = [*_values_of(wanted.get("filters")), *_values_of(wanted.get("filter"))]
    return [wanted.get("value"), wanted.get("values"), *parts]
