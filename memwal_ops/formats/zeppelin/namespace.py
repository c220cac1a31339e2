"""Open a Zeppelin namespace as an immutable ``Namespace``, publish its manifests, and record them as revisions.

A manifest is published by compare-and-swap. Recorded ones are kept for readers that still use them.

``native``: ``manifests/<version>.msgpack``, the manifest's bytes; a revision is the manifest version, and every
publication records its predecessor and itself.

``wiki``: the manifest has no version and no list of keys to be deleted later, so numbered records are kept in
``_mem_wal_ops/history/<n>.json``. A compaction records the manifest that it replaces, and its own. Manifests
published in between (appends, tokens) belong to the revision that the next compaction records, which lists no fewer
entries: only compactions remove any.
"""

from __future__ import annotations

import json
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memwal_ops import errors
from memwal_ops.core.anchors import CommitGuard, GuardedTable, Unguarded
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.segments import METRICS
from memwal_ops.formats.zeppelin.wire import MANIFEST, META
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE
from memwal_ops.formats.zeppelin.wire.manifest import Manifest, decode_manifest, encode_manifest
from memwal_ops.formats.zeppelin.wire.segment import MAX_DIMENSIONS
from memwal_ops.log import get_logger
from memwal_ops.storage.local import LocalObjectStore, LockedFolder
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableFormat, TableSummary
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_FORMAT = "zeppelin"
WIKI_FOLDER, NATIVE_FOLDER = "_mem_wal_ops/history", "manifests"
_NAME = re.compile(r"(?:_mem_wal_ops/history/([0-9]{20})\.json|manifests/([0-9]{20})\.msgpack)")
_RECORDINGS = 100
# As many as Zeppelin's own compaction; an append takes milliseconds, so ten conflicts in a row mean a tight loop.
ATTEMPTS = 10
_FIRST_WAIT = 0.05
_MAX_WAIT = 2.0
_swaps_proven: set[str] = set()


@dataclass(frozen=True)
class Meta:
    """The settings of a namespace, from ``meta.json``; dimensions and metric are None where they are unknown.

    Attributes:
        state: ``active``, or a state that only a server can leave.
        full_text: fields with a full-text configuration.
        document: all of ``meta.json``.
    """

    dimensions: int | None = None
    metric: str | None = None
    state: str = "active"
    full_text: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Namespace(GuardedTable):
    """One manifest of a namespace.

    Attributes:
        store: its root is the namespace's own prefix.
        data: the manifest's bytes, and ``tag`` their entity tag, for compare-and-swap.
        revision: its number in the history.
        recorded: whether this manifest is in the history.
        guard: checked before every mutation.
    """

    location: Location
    store: Store
    manifest: Manifest
    data: bytes = field(repr=False)
    tag: str
    meta: Meta
    revision: int
    recorded: bool
    guard: CommitGuard = field(default_factory=Unguarded, compare=False)

    @property
    def format(self) -> TableFormat:
        """Zeppelin."""
        return formats()[_FORMAT]

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """Every registered job; a job refuses namespaces that it cannot process."""
        return job_specs(_FORMAT)

    def has_revision(self, revision: int) -> bool:
        """Whether it is this revision, or one in the history. At most one request."""
        path = revision_path(revision, self.manifest.dialect)
        return revision == self.revision or self.store.head(path) is not None

    def newest(self) -> Namespace:
        """The newest manifest, with the same guard."""
        return replace(load(self.location, self.store), guard=self.guard)

    def summary(self) -> TableSummary:
        """See :meth:`memwal_ops.core.protocols.TableFormat.summarize`."""
        return self.format.summarize(self)

    def check_writable(self) -> None:
        """Raise ``UnsupportedFeatureError``, with the reason, if only a Zeppelin server may change the namespace."""
        why = self.manifest.unwritable
        if why is None and self.meta.state != "active":
            why = f"its state is {self.meta.state!r}"
        if why is not None:
            raise errors.UnsupportedFeatureError(
                f"{self.location.uri} cannot be written by this release: {why}.",
                remedy="Let its Zeppelin server maintain it; inspect, verify and migrate can still read it.",
            )


def swappable(store: Store) -> Store:
    """The same store; for a local folder, one that supports compare-and-swap."""
    return LockedFolder(store.root) if type(store) is LocalObjectStore else store


def load(location: Location, store: Store) -> Namespace:
    """Open the newest manifest of the namespace.

    Raises:
        NotALanceTableError: there is no manifest object.
        TableCorruptError: it cannot be read, or is inconsistent; or it is missing, and its settings are there.
        UnsupportedFeatureError: it is of a later release.
        StorageError: the store refused or failed, by kind.
    """
    name = location.uri.rstrip("/").rpartition("/")[2]
    try:
        data, tag = store.get_with_tag(MANIFEST)
    except errors.ObjectNotFoundError as error:
        if store.head(META) is not None:
            raise errors.TableCorruptError(
                f"{MANIFEST} of {location.uri} is missing, which lists all of its objects.", remedy=remedies.MANIFEST
            ) from error
        raise errors.NotALanceTableError(
            f"{location.uri} has no {MANIFEST}, so it is not a Zeppelin namespace.",
            remedy="Give the prefix that contains manifest.json.",
        ) from error
    try:
        manifest = decode_manifest(data, name)
    except errors.InvalidFormatError as error:
        raise errors.TableCorruptError(
            f"{MANIFEST} of {location.uri} cannot be read: {error}", remedy=remedies.MANIFEST
        ) from error
    meta = read_meta(store, location)
    revision, recorded = position(store, manifest, data)
    return Namespace(location, store, manifest, data, tag, meta, revision, recorded)


def read_meta(store: Store, location: Location) -> Meta:
    """Read ``meta.json``; empty settings if there is none, as in namespaces that a script wrote.

    Raises ``TableCorruptError``: it cannot be read.
    """
    try:
        document = json.loads(store.get(META))
        dimensions, metric = document.get("dimensions"), document.get("distance_metric")
        state, full_text = document.get("state") or "active", document.get("full_text_search") or {}
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= MAX_DIMENSIONS):
            raise ValueError(f"dimensions is {dimensions!r}")
        if metric is not None and metric not in METRICS:
            raise ValueError(f"distance_metric is {metric!r}")
        return Meta(dimensions, metric, str(state), tuple(sorted(full_text)), document)
    except errors.ObjectNotFoundError:
        return Meta()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.TableCorruptError(
            f"{META} of {location.uri} cannot be read: {error}.", remedy=remedies.META
        ) from error


# -- the history


@dataclass(frozen=True)
class Revision:
    """A recorded revision: its number, its object, and when that was written, by the store's clock.

    ``kept``: the reason why gc retains it; None: it does not.
    """

    number: int
    path: str
    written: datetime
    bytes: int = 0
    kept: str | None = None


def revision_path(revision: int, dialect: str) -> str:
    """The path of a revision's object."""
    if dialect == NATIVE:
        return f"{NATIVE_FOLDER}/{revision:020}.msgpack"
    return f"{WIKI_FOLDER}/{revision:020}.json"


def recorded_revisions(store: Store, dialect: str) -> list[Revision]:
    """All recorded revisions, oldest first. One listing."""
    folder = NATIVE_FOLDER if dialect == NATIVE else WIKI_FOLDER
    revisions = (
        Revision(int(match[1] or match[2]), meta.path, meta.last_modified, meta.size)
        for meta in store.list(folder)
        if (match := _NAME.fullmatch(meta.path)) is not None
    )
    return sorted(revisions, key=lambda revision: revision.number)


def position(store: Store, manifest: Manifest, data: bytes) -> tuple[int, bool]:
    """The revision of the live manifest, and whether it is recorded."""
    if manifest.dialect == NATIVE:
        version = manifest.version or 0
        return max(version, 1), store.head(revision_path(version, NATIVE)) is not None
    newest = next(reversed(recorded_revisions(store, manifest.dialect)), None)
    if newest is None:
        return 1, False
    recorded = _records(store, newest.path, data)
    return newest.number + (not recorded), recorded


def read_revision(table: Namespace, revision: int) -> Manifest:
    """The manifest of a recorded revision. Raises ``VersionGoneError``, and ``TableCorruptError``: it is damaged."""
    path = revision_path(revision, table.manifest.dialect)
    try:
        data = _recorded_content(table.store, path)
        return decode_manifest(data, table.manifest.namespace, dialect=table.manifest.dialect)
    except errors.ObjectNotFoundError as error:
        raise errors.VersionGoneError(f"{table.location.uri} has no revision {revision}.") from error
    except errors.InvalidFormatError as error:
        raise errors.TableCorruptError(
            f"{path} of {table.location.uri} cannot be read: {error}", remedy=remedies.RECORD
        ) from error


def check_live(table: Namespace) -> None:
    """Compare the live manifest of a native namespace with the record of its version, if there is one.

    Raises ``TableCorruptError``: they differ: a server and memwal-ops record what they publish, byte by byte.
    """
    with suppress(errors.ObjectNotFoundError):
        path = revision_path(table.manifest.version or 0, NATIVE)
        if table.manifest.dialect == NATIVE and table.store.get(path) != table.data:
            raise _other_manifest(table.manifest)


def _other_manifest(manifest: Manifest) -> errors.TableCorruptError:
    version = manifest.version or 0
    return errors.TableCorruptError(
        f"{revision_path(version, NATIVE)} records a manifest of version {version} that differs from the live one.",
        remedy=remedies.TWO_MANIFESTS,
    )


def record_manifest(store: Store, manifest: Manifest, data: bytes) -> int:
    """Record a manifest, if it is not recorded yet, and return its revision.

    Raises:
        TableCorruptError: its native version is recorded with other content.
        CommitConflictError: other runs recorded theirs first too often.
    """
    if manifest.dialect == NATIVE:
        version = manifest.version or 0
        path = revision_path(version, NATIVE)
        if not store.put_if_absent(path, data) and store.get(path) != data:
            raise _other_manifest(manifest)
        return version
    for _ in range(_RECORDINGS):
        newest = next(reversed(recorded_revisions(store, manifest.dialect)), None)
        if newest is not None and _records(store, newest.path, data):
            return newest.number
        number = 1 if newest is None else newest.number + 1
        document = {"revision": number, "manifest": data.decode()}
        path, record_ = revision_path(number, manifest.dialect), encode_record(document)
        if store.put_if_absent(path, record_) or store.get(path) == record_:
            return number
    raise errors.CommitConflictError(
        f"Other runs recorded {_RECORDINGS} revisions before this one could.", remedy=remedies.RECORDING
    )


def _records(store: Store, path: str, data: bytes) -> bool:
    """Whether a record has a manifest; not, if it is damaged: no row is in it, and gc and verify report it."""
    try:
        return _recorded_content(store, path) == data
    except errors.TableCorruptError:
        return False


def _recorded_content(store: Store, path: str) -> bytes:
    data = store.get(path)
    if path.startswith(NATIVE_FOLDER):
        return data
    try:
        return str(decode_record(data, path)["manifest"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.TableCorruptError(f"{path} cannot be read: {error!r:.120}.", remedy=remedies.RECORD) from error


# -- publishing


class FencedError(errors.LeaseLostError):
    """Another compactor put a higher token into the manifest: nothing of this run is or becomes visible."""


def probe(table: Namespace) -> None:
    """Verify put-if-absent and compare-and-swap before anything relies on them.

    Raises ``ConditionalWriteUnsupportedError``: the store does not enforce one of them.
    """
    probe_conditional_writes(table.store)
    if table.store.root in _swaps_proven or table.store.root.startswith("/"):
        return  # a local folder has a lock file
    try:
        probe_compare_and_swap(table.store)
    except errors.ConditionalWriteUnsupportedError as error:
        raise errors.ConditionalWriteUnsupportedError(
            str(error), remedy="Keep the namespace on a store that enforces If-Match: every commit replaces one object."
        ) from error
    _swaps_proven.add(table.store.root)


def publish(table: Namespace, manifest: Manifest, *, compaction: bool = False) -> Namespace | None:
    """Replace the manifest of ``table``; None if another writer replaced it first.

    A ``compaction`` removes entries, so both manifests are recorded: readers of the previous one still need those
    entries. Native publications are all recorded.

    Raises:
        UnsupportedFeatureError: a server fenced the namespace for deletion, or bound the manifest to state that only it
            can write, after it was opened.
        StoreUnavailableError: no response; the next run determines the outcome.
    """
    # Checked on the manifest that is replaced. Timeline otherwise: W reads it and writes a fragment; a server fences
    # the namespace; W's swap conflicts, and its second attempt lists the fragment although objects are being deleted.
    table.check_writable()
    data = encode_manifest(manifest)
    records = compaction or manifest.dialect == NATIVE
    if records and not table.recorded:
        # First the predecessor: once it is replaced, the objects that its readers need are recorded nowhere else.
        record_manifest(table.store, table.manifest, table.data)
    if not table.store.compare_and_swap(MANIFEST, data, table.tag):
        return None
    if records:
        record_manifest(table.store, manifest, data)
    return table.newest()


def retried(table: Namespace, change: Callable[[Namespace], Manifest | None], *, compaction: bool = False) -> Namespace:
    """Publish a change, computed again from the newest manifest after each conflict; None: nothing to do.

    Raises ``CommitConflictError``: other writers were first too often.
    """
    for attempt in range(ATTEMPTS):
        manifest = change(table)
        if manifest is None:
            return table
        done = publish(table, manifest, compaction=compaction)
        if done is not None:
            return done
        get_logger(__name__).info("commit_conflict", table=table.location.uri, attempt=attempt + 1)
        wait = min(_FIRST_WAIT * 2**attempt, _MAX_WAIT)
        time.sleep(random.uniform(0, wait))  # noqa: S311 - jitter
        table = table.newest()
    raise errors.CommitConflictError(
        f"{table.location.uri}: other writers replaced the manifest {ATTEMPTS} times in a row before this run could.",
        remedy="Run it again when fewer writers append.",
    )


def recorded(table: Namespace) -> Namespace:
    """The same namespace with its live manifest recorded: the grace period of its predecessors starts then."""
    if table.recorded:
        return table
    revision = record_manifest(table.store, table.manifest, table.data)
    return replace(table, revision=revision, recorded=True)
