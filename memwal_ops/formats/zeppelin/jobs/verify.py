"""Check a namespace: fragments, segments, history, lease, tokens and orphans. Reads only.

Its repair releases expired leases of supervisors; for other findings it lists the choices, as a namespace's own objects
belong to its server.

Memory: one cluster, and eight bytes for each row of a segment.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memwal_ops import errors
from memwal_ops.core import verification
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.context import RunContext
from memwal_ops.core.repair import Choice, RepairJob
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.answers import check_answers, expected_rows, listed_rows, plan_answers
from memwal_ops.formats.zeppelin.backlog import REWRITE, Contested, Listings, missing_of, read_fragments
from memwal_ops.formats.zeppelin.compaction import dimensions_of, metric_of
from memwal_ops.formats.zeppelin.jobs.gc import NamespaceEvidence, NamespaceKind, NamespaceObjects
from memwal_ops.formats.zeppelin.lease import read_lease
from memwal_ops.formats.zeppelin.namespace import Namespace, check_live, read_revision, recorded_revisions
from memwal_ops.formats.zeppelin.segments import Rows, SegmentReader, imbalance
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions, ZeppelinVerifyOptions
from memwal_ops.formats.zeppelin.wire import MANIFEST, META
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI, Fragment, finite
from memwal_ops.formats.zeppelin.wire.segment import attributes_name, bitmap_name, text_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.answers import IndexAnswers
    from memwal_ops.formats.zeppelin.wire.manifest import SegmentRef


# Of a cluster; these are read with it.
_INDEX = re.compile(r"(bitmap|fts_index)_[0-9]+\.bin")
_SAMPLED = 32
_NEAR = 1e-3
_FAR = timedelta(days=1)


def check_namespace(
    table: Namespace, options: ZeppelinVerifyOptions, context: RunContext, checked: dict[str, Any]
) -> Iterator[verification.Inconsistency]:
    """Yield every finding, and count in ``checked`` what was read. Raises ``StorageError``: the store failed."""
    checked |= {"fragments": 0, "rows": 0, "clusters": 0, "objects": Counter[str]()}
    yield from _settings(table)
    yield from _lease(table)
    yield from _log(table, context, checked)
    for segment in table.manifest.segments:
        try:
            yield from _Segment(table, segment, options, context, checked).check()
        except errors.MemwalOpsError as error:
            yield verification.finding_of(
                error, "segment", segment.prefix, "Queries and compactions that need it fail."
            )
    yield from _history(table)
    yield from verification.check_own_files(table)
    if table.manifest.unwritable is None:
        yield from _unneeded(table, checked["objects"])


def _settings(table: Namespace) -> Iterator[verification.Inconsistency]:
    if (why := table.manifest.unwritable) is not None:
        yield verification.Inconsistency(
            verification.Severity.INFO, "writable", "manifest.json", f"It cannot be written by this release: {why}.",
            "merge and gc refuse the namespace.", "Let its Zeppelin server maintain it, or migrate it.",
        )  # fmt: skip
    if table.manifest.dialect == NATIVE:
        if table.meta.metric is None:
            yield verification.Inconsistency(
                verification.Severity.ERROR, "settings", META, "It is missing, or has no distance_metric.",
                "A Zeppelin server does not find the namespace; merge refuses it.", remedies.META,
                errors.runbook(9) or "",
            )  # fmt: skip
        # Not whole prefixes: a server whose compaction carries some clusters of a segment retires the others' objects.
        flat = (SegmentReader(table.store, one) for one in table.manifest.segments if not one.hierarchical)
        live = table.manifest.fragment_keys.union(need.path for one in flat for need in one.needed(None))
        for key in filter(live.__contains__, table.manifest.pending):
            yield verification.Inconsistency(
                verification.Severity.ERROR, "pending_deletes", key,
                "It is pending deletion, and the live manifest needs it.",
                "A gc that deletes it loses rows; memwal-ops keeps it.", "Remove the key from pending_deletes.",
            )  # fmt: skip


def _lease(table: Namespace) -> Iterator[verification.Inconsistency]:
    try:
        stored = read_lease(table)
    except errors.TableCorruptError as error:
        yield verification.finding_of(error, "compactor_lease", "lease.json", "No compaction can start.")
        return
    if stored is None:
        return
    lease, now = stored[0], datetime.now(UTC)
    if lease.token < table.manifest.token:
        yield verification.Inconsistency(
            verification.Severity.WARNING, "tokens", "lease.json",
            f"Its token is {lease.token}; the manifest has {table.manifest.token} already.",
            "The lease was deleted or restored: a compactor that continues from its token is refused.",
            "None for memwal-ops: it continues above both. Never delete lease.json.",
        )  # fmt: skip
    if lease.expires - now > _FAR:
        yield verification.Inconsistency(
            verification.Severity.WARNING, "compactor_lease", "lease.json",
            f"{lease.holder} holds it until {lease.expires.isoformat()}.",
            "No compaction can start before that; the clock of its holder, or the local one, is wrong.",
            "Correct the clock; write the lease again with the same token and a time in the past.",
            errors.runbook(57) or "",
        )  # fmt: skip


def _log(table: Namespace, context: RunContext, checked: dict[str, Any]) -> Iterator[verification.Inconsistency]:
    try:
        dimensions = dimensions_of(table)
    except errors.SegmentCorruptError:
        dimensions = None  # reported with its segment
    refs, hidden = table.manifest.fragments, table.manifest.hidden.difference(table.manifest.pending_keys)
    contested: set[str] = set()
    for ref, fragment in read_fragments(table, refs, dimensions):
        context.advance("reading fragments", "fragments", total=len(refs))
        checked["fragments"] += 1
        if not isinstance(fragment, Fragment):
            yield verification.finding_of(
                fragment, "fragment", ref.key, "Compactions stop before it; strong queries fail."
            )
            continue
        checked["rows"] += len(fragment.ids)
        contested = contested.difference(fragment.deletes) | hidden.intersection(fragment.ids)
        both = {*fragment.ids} & {*fragment.deletes}
        if both:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "fragment", ref.key, f"{min(both)!r} is both written and deleted in it.",
                "The write counts; readers that apply deletes last would not show it.", "Fix the writer.",
            )  # fmt: skip

    if contested:
        yield verification.Inconsistency(
            verification.Severity.WARNING, "pending_ids", "manifest.json",
            f"{Contested(tuple(sorted(contested)))}.",
            "No query returns them; merge keeps their rows in the log, as it is not defined which came later.",
            "Delete them by an append, or write them again.",
        )  # fmt: skip
    if table.manifest.pending_keys:
        yield verification.Inconsistency(
            verification.Severity.INFO, "pending_ids", "manifest.json",
            f"{len(table.manifest.pending_keys)} entries of pending_deletes look like object keys, for example "
            f"{table.manifest.pending_keys[0]!r}.",
            "None for memwal-ops, which keeps the entries, and the objects as long as a manifest lists them.",
            "Remove them if no other program uses them.",
        )  # fmt: skip
    ids = table.manifest.fragment_ids
    if table.manifest.dialect == WIKI and ids != sorted(ids):
        late = next(b for a, b in pairwise(ids) if b < a)
        yield verification.Inconsistency(
            verification.Severity.INFO, "order", f"wal/{late}.fragment.json",
            "Its ULID is below that of the fragment listed before it.",
            "None for memwal-ops, which uses the order of the list. A reader that sorts by ULID returns other rows.",
            "Correct the writers' clocks.",
        )  # fmt: skip


class _Segment:
    def __init__(
        self,
        table: Namespace,
        segment: SegmentRef,
        options: ZeppelinVerifyOptions,
        context: RunContext,
        checked: dict[str, Any],
    ) -> None:
        self.table, self.segment, self.options = table, segment, options
        self.context, self.checked = context, checked
        self.reader = SegmentReader(table.store, segment)
        self.metric = metric_of(table, options.metric)[0]

    def check(self) -> Iterator[verification.Inconsistency]:
        centroids = self.reader.centroids()
        dimensions = self.table.meta.dimensions
        if dimensions is not None and centroids.shape[1] != dimensions:
            yield self._error(f"Its centroids have {centroids.shape[1]} dimensions; meta.json has {dimensions}.")
        points = self._points(centroids)
        sizes: list[int] = []
        hashes: list[Any] = []
        random = np.random.default_rng(0)
        for number in range(self.segment.clusters):
            self.context.advance("reading clusters", "clusters", total=self.segment.clusters)
            try:
                rows = self.reader.cluster(number)
            except errors.SegmentCorruptError as error:
                yield verification.finding_of(
                    error, "cluster", self.segment.prefix_of(number), "No query returns its rows."
                )
                continue
            self.checked["clusters"] += 1
            self.checked["rows"] += len(rows.ids)
            sizes.append(len(rows.ids))
            hashes.append(np.array([xxhash.xxh64_intdigest(name.encode()) for name in rows.ids], np.uint64))
            if len(rows.ids) and rows.vectors.shape[1] != centroids.shape[1]:
                yield self._error(f"Cluster {number} has {rows.vectors.shape[1]} dimensions.")
                continue
            if finite(rows.attributes) != rows.attributes:
                yield verification.Inconsistency(
                    verification.Severity.WARNING, "attributes",
                    self.segment.prefix_of(number) + attributes_name(number),
                    "It has NaN or Infinity, which are not JSON.",
                    "Readers that are strict about JSON cannot read the cluster's attributes.",
                    "memwal-ops merge URI --retrain writes null in their place.",
                )  # fmt: skip
            yield from self._rows(number, rows, points, random)
            yield from self._indexes(number, rows)
        yield from self._others()
        yield from self._whole(sizes, np.concatenate(hashes) if hashes else np.zeros(0, np.uint64))

    def _points(self, vectors: Any) -> Any:
        """Vectors as they are compared with centroids, by other code than the compaction's: in double precision."""
        points = vectors.astype(np.float64)
        if self.metric != "cosine":
            return points
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        return points / np.where(lengths, lengths, 1)

    def _rows(
        self, number: int, rows: Rows, to: Any, random: np.random.Generator
    ) -> Iterator[verification.Inconsistency]:
        if not np.isfinite(rows.vectors).all():
            yield self._error(f"Cluster {number} has a vector with a value that is not a finite number.")
            return
        chosen = np.arange(len(rows.ids))
        if not self.options.deep and len(chosen) > _SAMPLED:
            chosen = random.choice(len(chosen), _SAMPLED, replace=False)
        far = (to**2).sum(axis=1) / 2 - self._points(rows.vectors[chosen]) @ to.T
        slack = _NEAR * (1 + np.abs(far).max(initial=0))
        wrong = int((far[:, number] > far.min(axis=1, initial=np.inf) + slack).sum())
        if wrong:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "assignment", f"{self.segment.prefix_of(number)}cluster_{number}.bin",
                f"{wrong} of {len(chosen)} rows are nearer to another centroid, for the metric {self.metric}.",
                "Queries that probe few clusters miss them.", "memwal-ops merge URI --retrain",
            )  # fmt: skip

    def _indexes(self, number: int, rows: Rows) -> Iterator[verification.Inconsistency]:
        compares = self.options.deep and self.table.manifest.dialect == WIKI
        for kind, name, fields in (
            ("bitmap", bitmap_name(number), self.segment.bitmap_fields),
            ("text", text_name(number), self.segment.fts_fields),
        ):
            if not fields:
                continue
            path = self.segment.prefix_of(number) + name
            try:
                listed = listed_rows(kind, self.reader.read(path))
                expected = {field: expected_rows(kind, rows.attributes, field) for field in fields if compares}
                if any(listed.get(field, {}) != lists for field, lists in expected.items()):
                    yield _index(path, "It does not match its cluster's attributes.")
            except (errors.SegmentCorruptError, errors.InvalidFormatError) as error:
                yield _index(path, str(error))

    def _others(self) -> Iterator[verification.Inconsistency]:
        for item in self.reader.needed(None):
            if item.has_rows or _INDEX.match(item.path.rpartition("/")[2]):
                continue
            try:
                size = len(self.reader.read(item.path))
                if item.size not in {None, size}:
                    yield _index(item.path, f"It has {size} bytes; {item.size} are recorded.")
            except errors.SegmentCorruptError as error:
                yield _index(item.path, str(error))

    def _whole(self, sizes: list[int], hashes: Any) -> Iterator[verification.Inconsistency]:
        segment = self.segment
        twice = len(hashes) - len(np.unique(hashes))
        if twice:
            yield self._error(f"{twice} ids are in it more than once.")
        if len(sizes) == segment.clusters and sum(sizes) != segment.vectors:
            yield self._error(f"It has {sum(sizes)} rows; the manifest has {segment.vectors}.")
        if sizes and imbalance(sizes) > self.options.retrain_imbalance_threshold:
            yield verification.Inconsistency(
                verification.Severity.INFO, "imbalance", segment.prefix,
                f"Its largest cluster has {max(sizes)} rows, its smallest {min(sizes)}.",
                "Queries that probe the largest read more than others.", "memwal-ops merge URI --retrain",
            )  # fmt: skip

    def _error(self, evidence: str) -> verification.Inconsistency:
        return verification.Inconsistency(
            verification.Severity.ERROR, "segment", self.segment.prefix, evidence,
            "Queries return wrong rows, or miss some.",
            errors.SegmentCorruptError.remedy, errors.runbook(62) or "",
        )  # fmt: skip


def _index(path: str, wrong: str) -> verification.Inconsistency:
    return verification.Inconsistency(
        verification.Severity.ERROR, "index", path, wrong, "Queries that use it return wrong rows, or fail.", REWRITE,
        errors.runbook(62) or "",
    )  # fmt: skip


def _history(table: Namespace) -> Iterator[verification.Inconsistency]:
    listed = Listings(table.store)
    try:
        check_live(table)
    except errors.TableCorruptError as error:
        yield verification.finding_of(
            error, "history", MANIFEST, "One of the two is damaged, or not of this namespace."
        )
    for revision in recorded_revisions(table.store, table.manifest.dialect):
        try:
            read_revision(table, revision.number)
            missing = missing_of(table, revision.number, listed)
        except errors.MemwalOpsError as error:
            consequence = "gc deletes nothing: the objects that its readers need are unknown."
            yield verification.finding_of(error, "history", revision.path, consequence)
            continue
        if missing is not None and revision.number != table.revision:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "history", revision.path,
                f"It lists {missing}, which is missing or cut.",
                "Readers of that revision fail.", "None, if no reader uses it; gc will delete the record.",
            )  # fmt: skip


def _unneeded(table: Namespace, counts: Counter[str]) -> Iterator[verification.Inconsistency]:
    try:
        evidence = NamespaceEvidence.of(table, ZeppelinGcOptions(), datetime.now(UTC))
    except errors.TableCorruptError as error:
        yield verification.finding_of(error, "history", "the history", "gc deletes nothing.")
        return
    for stage in NamespaceObjects(table, evidence).stages():
        for candidate in stage.candidates:
            counts[str(candidate.kind)] += 1
            if candidate.verdict is Verdict.UNKNOWN:
                yield verification.Inconsistency(
                    verification.Severity.INFO, "unrecognized", candidate.path, candidate.why, "None: gc keeps it.",
                    "Delete it by hand if it is yours.",
                )  # fmt: skip
    for kind, folder in ((NamespaceKind.ORPHAN_FRAGMENT, "wal/"), (NamespaceKind.ORPHAN_SEGMENT, "segments/")):
        if counts[kind]:
            yield verification.Inconsistency(
                verification.Severity.INFO, "orphans", folder,
                f"{counts[kind]} that no manifest lists: left by killed runs, or about to be listed.",
                "Storage that nothing reads.", "memwal-ops gc URI --apply deletes them in two runs.",
            )  # fmt: skip


def plan(
    table: Namespace, options: ZeppelinVerifyOptions, context: RunContext | None = None
) -> verification.VerifyReport | verification.AnswersPlan:
    """Verify a namespace, or tell what asking its indexes costs."""
    if options.dry_run:
        return verification.AnswersPlan(table.revision, plan_answers(table, options), options.max_bytes)
    return verified(table, options, context)


apply = plan


def verified(
    table: Namespace, options: ZeppelinVerifyOptions, context: RunContext | None = None
) -> verification.VerifyReport:
    """Check all objects. Raises ``StorageError`` if the store fails."""
    context = context or RunContext()
    checked: dict[str, Any] = {}
    findings = verification.Inconsistencies(options.max_findings)
    if options.checks_all:
        findings.extend(check_namespace(table, options, context, checked))
    else:
        findings.extend(verification.missing_object(table))
    if not options.asks or findings.counts["missing_object"]:
        return verification.VerifyReport(table.revision, findings, checked)
    seed = options.seed_at(table.revision)
    answers: list[IndexAnswers] = []
    try:
        answers, wrong = check_answers(table, options, context, seed)
        findings.extend(wrong)
    except errors.InvalidUsageError:
        raise
    except errors.MemwalOpsError as error:
        findings.add(
            verification.finding_of(error, "not_checked", "answers of indexes", "This part was not checked completely.")
        )
    return verification.VerifyReport(table.revision, findings, checked, answers=answers, seed=seed)


# -- repair


_CHOICES: Mapping[str, tuple[Choice, ...]] = {
    "pending_deletes": (
        Choice("Stop the server, and remove the key from pending_deletes.", "The manifest is edited by hand."),
        Choice("Leave it as it is.", "memwal-ops keeps the object; another program's gc deletes it, and rows with it."),
    ),
    "pending_ids": (
        Choice(
            "Append a delete of the ids: zeppelin.open_writer(URI).append(deletes=[...]).",
            "The next merge removes their rows, and the entries.",
        ),
        Choice("Append the rows again.", "Queries return them, and the entries are removed."),
        Choice("Leave them as they are.", "No query returns them; their rows stay in the log."),
    ),
    "compactor_lease": (
        Choice("Correct the clock that is wrong, and wait until the lease ends.", "No compaction until then."),
        Choice(
            "Make sure that its holder has ended, and write the lease with the same token and a time in the past.",
            "A holder that still runs cannot publish, because of the fencing token, and loses its work.",
        ),
    ),
}


REPAIR: RepairJob[Namespace] = RepairJob(
    lambda table, options, context: verified(
        table, ZeppelinVerifyOptions(deep=options.deep, max_findings=options.max_findings), context
    ),
    choices=_CHOICES,
)
