"""Erase rows of a namespace: delete them by an append, compact, and collect what the compaction replaced.

A compaction writes living rows alone into a new segment. So what may hold a deleted row is the log, and each object
that the live manifest does not list any more.
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
from memwal_ops.core.candidates import UNKNOWN, Verdict
from memwal_ops.core.erasing import NOT_SEEN, Erasure, Survey, run_erasure
from memwal_ops.core.erasure import EraseOptions, EraseReport, Holder
from memwal_ops.core.options import OptionError
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import MemwalOpsError, VersionGoneError
from memwal_ops.formats.zeppelin import history
from memwal_ops.formats.zeppelin.backlog import read_fragment
from memwal_ops.formats.zeppelin.filters import compile_filter
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.options import GcOptions, MergeOptions
from memwal_ops.formats.zeppelin.publish import probe
from memwal_ops.formats.zeppelin.reader import live_rows
from memwal_ops.formats.zeppelin.roots import prefix_of
from memwal_ops.formats.zeppelin.segments import SegmentReader
from memwal_ops.formats.zeppelin.wire.names import MANIFEST, META
from memwal_ops.formats.zeppelin.writer import Writer
from memwal_ops.storage.clock import store_time
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.core.candidates import Candidate
    from memwal_ops.core.certificate import CheckReport
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.segments import Rows
    from memwal_ops.formats.zeppelin.wire.manifest import Manifest

    Test = Callable[[str, Any], bool]

_NEXT_RUN = timedelta(minutes=15)
_NO_ROWS = "it has no rows"
_LISTS = re.compile(r"(manifest|meta|lease)\.json|(manifests|snapshots|_gc|_lifecycle|_staging)/.*")
_KEEPERS = ("hold ", "the snapshot ")

__all__ = ["EraseOptions", "EraseReport", "apply", "plan"]


def plan(table: Namespace, options: EraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Report what holds such rows. Reads only."""
    return run_erasure(table, options, partial(_begin, table, options, context), applied=False)


def apply(table: Namespace, options: EraseOptions, context: RunContext) -> EraseReport | CheckReport:
    """Erase. Safe to kill, to repeat, and concurrently with writers, readers and compactions.

    Raises:
        BusyError: another compactor holds the lease.
        MemwalOpsError: as merge and gc; what was done stays, and the next run continues.
    """
    probe(table)
    return run_erasure(table, options, partial(_begin, table, options, context), applied=True)


def _begin(table: Namespace, options: EraseOptions, context: RunContext) -> NamespaceErasure:
    if options.ttl.column is not None:
        raise OptionError("{ttl} does not apply: an attribute of a namespace has no type of times.", "ttl")
    table.check_writable()
    matches = None if options.where is None else _compiled(options.where)
    now = min(datetime.now(UTC), store_time(table.store))
    return NamespaceErasure(table.newest(), matches, now, options=options, context=context)


def _compiled(where: str) -> Test:
    """The predicate on a row's id and attributes.

    Raises:
        OptionError: it is no filter.
    """
    try:
        found = json.loads(where)
        if not isinstance(found, dict) or not found:
            raise OptionError("{where} is no filter, as queries have it: a JSON object that is not empty.", "where")
    except ValueError as error:
        raise OptionError(
            f"{{where}} is no filter, as queries have it: {error}.",
            "where",
            remedy='Write it like {{"id": "a"}} or {{"op": "in", "field": "user", "values": [1, 2]}}.',
        ) from error
    test = compile_filter(found)
    return lambda name, attributes: test({"id": name, **(attributes or {})})


@dataclass
class NamespaceErasure(Erasure):
    """The erasure of rows of a namespace.

    Attributes:
        table: the newest manifest that it has read.
        matches: whether a row must be gone; None: all that was deleted before a time.
        now: by the slower of both clocks.
    """

    table: Namespace
    matches: Test | None
    now: datetime
    _left: Survey | None = field(default=None, init=False)
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
    def gc_options(self) -> GcOptions:
        """The grace times of gc: no longer than revisions have to be old, and no shorter than is safe."""
        default, unsafe = GcOptions(), self.options.allow_unsafe
        least = timedelta(0) if unsafe else timedelta(minutes=1)
        return GcOptions(
            reader_grace=min(default.reader_grace, max(self.options.older_than, least)),
            orphan_min_age=min(
                default.orphan_min_age, max(self.options.older_than, least if unsafe else timedelta(hours=1))
            ),
            keep_revisions=1,
            allow_unsafe=unsafe,
        )

    def survey(self) -> Survey:
        """See the base class."""
        self.context.checkpoint()
        newest = self.table.newest()
        if self._left is not None and newest.data == self._left.table.data:
            return self._left
        self.table = newest
        found = Survey(newest, living=len(self._living()))
        evidence = gc.Evidence.of(newest, self.gc_options, self.now)
        report = gc.ZeppelinGcReport(applied=False)
        listed = {one.path: one for one in collector.candidates([gc.Objects(newest, evidence)], report)}
        why = {**self._of(newest.manifest, is_live=True), **self._retained(evidence)}
        for meta in newest.store.list():
            path = prefix_of(meta.path).rstrip("/") if meta.path.startswith("segments/") else meta.path
            found.objects.append((meta, self._proof(path, why)))
            if found.objects[-1][1] is None and path not in {one.name for one in found.holders}:
                found.holders.append(self._holder(path, why.get(path), listed.get(path)))
        self._left = found
        return found

    def count(self, name: str, number: int) -> None:
        """See the base class."""
        super().count(name, number)
        if number:
            self._left = None

    def _living(self) -> list[str]:
        if self.matches is None:
            return []
        return [name for rows in live_rows(self.table) for name in self._matching(rows.ids, rows.attributes)]

    def _matching(self, ids: Any, attributes: Any) -> Iterator[str]:
        assert self.matches is not None  # noqa: S101 - the callers check
        return (name for name, one in zip(ids, attributes, strict=True) if self.matches(name, one))

    def _retained(self, evidence: gc.Evidence) -> dict[str, str | None]:
        """As :meth:`_of`, of objects that only a retained revision needs."""
        live = self.table.manifest
        found: dict[str, str | None] = {}
        for one in evidence.roots.revisions:
            if one.kept is not None:
                with suppress(VersionGoneError):  # another collector has expired it meanwhile
                    found |= self._of(history.read(self.table, one.entry.revision), is_live=False)
        gone = live.fragment_keys | {prefix.rstrip("/") for prefix in live.prefixes}
        return {path: why for path, why in found.items() if path not in gone}

    def _of(self, manifest: Manifest, *, is_live: bool) -> dict[str, str | None]:
        """Why objects of a manifest may hold such rows; None: they do not."""
        found: dict[str, str | None] = {}
        for ref in manifest.fragments:
            found[ref.key] = self._once(ref.key, partial(self._why_fragment, ref, is_live=is_live))
        for segment in manifest.segments:
            path = segment.prefix.rstrip("/")
            found[path] = self._once(f"{path} {is_live}", partial(self._why_segment, segment, is_live=is_live))
            for prefix in {prefix.rstrip("/") for prefix in manifest.prefixes} - {path}:
                found.setdefault(prefix, found[path])  # clusters that a server carried over
        return found

    def _once(self, key: str, search: Callable[[], str | None]) -> str | None:
        if key not in self._read:
            try:
                self._read[key] = search()
            except MemwalOpsError as error:
                self._read[key] = f"it cannot be read: {error}"
        return self._read[key]

    def _why_fragment(self, ref: Any, *, is_live: bool) -> str | None:
        if self.matches is None:
            meta = self.table.store.head(ref.key)
            old = meta is None or self.before is None or meta.last_modified < self.before
            return "it may have rows that were deleted before that time" if old or not is_live else None
        found = read_fragment(self.table, ref)
        gone = self._matching(found.deletes, [None] * len(found.deletes))
        return self._counted(sum(1 for _ in (*self._matching(found.ids, found.attributes), *gone)))

    def _why_segment(self, segment: Any, *, is_live: bool) -> str | None:
        if self.matches is None:
            return None if is_live else "it may have rows that were deleted before that time"
        parts: Iterator[Rows] = SegmentReader(self.table.store, segment).clusters()
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

    def _holder(self, path: str, why: str | None, candidate: Candidate | None) -> Holder:
        kind = "segment" if path.startswith("segments/") else "fragment" if path.startswith("wal/") else "object"
        text = why or "no revision lists it any more, and it is not searched"
        if candidate is None or candidate.kind == UNKNOWN:
            return Holder("unrecognized", path, "it is not searched: move or delete it", blocks=True)
        if path in self.table.manifest.fragment_keys or f"{path}/" in self.table.manifest.prefixes:
            return Holder(kind, path, f"{text}; it is compacted first")
        if candidate.verdict is Verdict.DELETE:
            return Holder(kind, path, text)
        unmet = [gate for gate in candidate.gates if not gate.met]
        blocks = any(keeper in gate.text for gate in unmet for keeper in _KEEPERS)
        later = self.now + max(self.gc_options.reader_grace, _NEXT_RUN)
        until = None if blocks else max((gate.until or later for gate in unmet), default=later)
        return Holder(kind, path, f"{text}; {candidate.why}", until, blocks)

    def erase(self) -> Survey:
        """See the base class."""
        found = self.survey()
        if self.matches is not None and found.living:
            self.context.step("delete")
            gone = self._living()
            Writer(self.table).append(deletes=gone)
            self.count("rows_deleted", len(gone))
        if self.survey().holders:
            self.context.step("merge")
            merged = merge.apply(self.table.newest(), MergeOptions(), self.context)
            self.count("fragments_merged", merged.fragments)
            if merged.blocked is not None:
                self.faults.append(Holder("fragment", merged.blocked.id, str(merged.blocked.error), blocks=True))
        if self.survey().holders:
            self.context.step("gc")
            report = gc.apply(self.table.newest(), self.gc_options, self.context)
            self.count("objects_deleted", report.deleted_objects)
        return self.survey()
