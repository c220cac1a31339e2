"""Open a Zeppelin namespace as an immutable ``Namespace``, pinned to one manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.guard import GuardedTable, Unguarded
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.errors import (
    InvalidFormatError,
    NotALanceTableError,
    ObjectNotFoundError,
    TableCorruptError,
    UnsupportedFeatureError,
)
from memwal_ops.formats.zeppelin import history, remedies
from memwal_ops.formats.zeppelin.training import METRICS
from memwal_ops.formats.zeppelin.wire.manifest import decode_manifest
from memwal_ops.formats.zeppelin.wire.names import MANIFEST, META
from memwal_ops.formats.zeppelin.wire.segment import MAX_DIMENSIONS
from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.locked_folder import LockedFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.guard import CommitGuard
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableFormat, TableSummary
    from memwal_ops.formats.zeppelin.wire.manifest import Manifest
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_FORMAT = "zeppelin"


@dataclass(frozen=True)
class Meta:
    """The settings of a namespace, from ``meta.json``.

    Attributes:
        dimensions: of its vectors; None: unknown.
        metric: ``cosine``, ``euclidean`` or ``dot_product``; None: unknown.
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
        location: its URI and storage options.
        store: its object store; the root is the namespace's own prefix.
        manifest: decoded.
        data: the manifest's bytes.
        tag: the entity tag of those bytes, for compare-and-swap.
        meta: the settings.
        revision: see :mod:`memwal_ops.formats.zeppelin.history`.
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
        return revision == self.revision or history.has(self, revision)

    def newest(self) -> Namespace:
        """The newest manifest, with the same guard."""
        return replace(load(self.location, self.store), guard=self.guard)

    def summary(self) -> TableSummary:
        """See :meth:`memwal_ops.core.protocols.TableFormat.summarize`."""
        return self.format.summarize(self)

    def check_writable(self) -> None:
        """Refuse a namespace that only a Zeppelin server may change.

        Raises:
            UnsupportedFeatureError: with the reason.
        """
        why = self.manifest.unwritable
        if why is None and self.meta.state != "active":
            why = f"its state is {self.meta.state!r}"
        if why is not None:
            raise UnsupportedFeatureError(
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
    except ObjectNotFoundError as error:
        if store.head(META) is not None:
            raise TableCorruptError(
                f"{MANIFEST} of {location.uri} is missing, which lists all of its objects.", remedy=remedies.MANIFEST
            ) from error
        raise NotALanceTableError(
            f"{location.uri} has no {MANIFEST}, so it is not a Zeppelin namespace.",
            remedy="Give the prefix that contains manifest.json.",
        ) from error
    try:
        manifest = decode_manifest(data, name)
    except InvalidFormatError as error:
        raise TableCorruptError(
            f"{MANIFEST} of {location.uri} cannot be read: {error}", remedy=remedies.MANIFEST
        ) from error
    meta = read_meta(store, location)
    revision, recorded = history.position(store, manifest, data)
    return Namespace(location, store, manifest, data, tag, meta, revision, recorded)


def read_meta(store: Store, location: Location) -> Meta:
    """Read ``meta.json``; empty settings if there is none, as in namespaces that a script wrote.

    Raises:
        TableCorruptError: it cannot be read.
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
    except ObjectNotFoundError:
        return Meta()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TableCorruptError(f"{META} of {location.uri} cannot be read: {error}.", remedy=remedies.META) from error
