"""Deviations from the protocols, planted on purpose: more than those of :mod:`tests.campaigns.sim.planted`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from memwal_ops.core import leases
from memwal_ops.core.leases import NumberedRecords
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc.collectors import RegionCollector
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.retention import garbage
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.storage.records import encode_record
from tests.campaigns.sim.planted import Bug, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEVIATIONS: dict[str, Bug] = {}


def _deviation(make: Callable[[], Iterable[Patch]]) -> Callable[[], Iterable[Patch]]:
    name = make.__name__.replace("_", " ")
    DEVIATIONS[name] = Bug(name, (make.__doc__ or "").strip(), make)
    return make


@_deviation
def expiry_is_not_announced() -> Iterable[Patch]:
    """Versions are deleted without an announcement, so that a hold can be granted meanwhile."""
    yield Patch(expire, "announced_expiry", lambda *_: nullcontext())


@_deviation
def manifests_are_not_set_aside() -> Iterable[Patch]:
    """Manifests are deleted without a record: a tag of the same moment cannot be satisfied."""
    yield Patch(garbage, "record", lambda *_: "_mem_wal_ops/expired/none")


@_deviation
def expiry_ignores_tags() -> Iterable[Patch]:
    """Tagged versions are expired."""
    yield Patch(LiveVersions, "protected", lambda _: {})


@_deviation
def the_newest_version_expires() -> Iterable[Patch]:
    """No version is kept, not even the newest one."""
    yield Patch(expire, "_choose", lambda _, retention, *__: (retention.versions, ()))


@_deviation
def the_newest_lease_is_pruned() -> Iterable[Patch]:
    """All numbers of a lease are pruned: the next holder gets a token that there was before."""

    def prune(store: Any, job: str, newest: int) -> None:
        leases._records(store, job).delete_records([newest])

    yield Patch(leases, "_prune", prune)


@_deviation
def records_are_overwritten() -> Iterable[Patch]:
    """Leases and holds are written without a condition: two processes have the same number."""

    def put(self: Any, number: int, document: Any) -> bool:
        self.store.put(self.path(number), encode_record(document))
        return True

    yield Patch(NumberedRecords, "put_if_absent", put)


@_deviation
def region_manifests_are_overwritten() -> Iterable[Patch]:
    """The next manifest of a region is written without a condition: a writer's flush gets lost."""

    def put(self: Any, version: int, data: bytes, *_: Any, **__: Any) -> bool:
        self._store.put(self.path(version), data)
        self.write_hint(version)
        return True

    yield Patch(RegionManifestStore, "publish", put)


@_deviation
def flushes_are_not_fenced() -> Iterable[Patch]:
    """Directories of suspended flushes are deleted before a manifest prevents that they are published."""
    yield Patch(RegionCollector, "_fence_flushes", lambda *_: None)
