"""A region in memory: its manifests, a listing of its folder, and evidence whose gates the test gives."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from memwal_ops.core.candidates import Gate
from memwal_ops.errors import RegionManifestCorruptError
from memwal_ops.formats.lance.generations.generation_files import DirectoryContents, FileState, RegionContents
from memwal_ops.formats.lance.jobs.gc.evidence import GcEvidence
from memwal_ops.formats.lance.jobs.gc.region import RegionView
from memwal_ops.formats.lance.options import RetentionOptions
from memwal_ops.formats.lance.regions.manifests import RegionManifestGoneError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import JOB_PROPERTY, region_manifest_name
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest, RegionStatus
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

REGION = UUID(int=7)
FOLDER = f"_mem_wal/{REGION}"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
BASE_POINTS = Gate(met=False, text="a base version that may be opened has files below _mem_wal/")
FREE = Gate(met=True, text="free")


def directory(generation: int) -> str:
    return f"{generation:08x}_gen_{generation}"


def manifest(
    version: int, listed: Collection[int] = (), *, epoch: int = 1, current: int = 9, **fields: Any
) -> RegionManifest:
    flushed = tuple(FlushedGeneration(number, directory(number)) for number in listed)
    values = {"replay_after_wal_id": None, "wal_id_last_seen": None, **fields}
    return RegionManifest(
        REGION,
        version,
        0,
        epoch,
        current_generation=current,
        flushed_generations=flushed,
        status=RegionStatus.ACTIVE,
        **values,
    )


class Manifests:
    """The manifests of a region as the store has them now; ``read_versions`` were read, in order."""

    def __init__(self, *manifests: RegionManifest | int, hint: int | None = None) -> None:
        self.standing: dict[int, RegionManifest | None] = {}
        for one in manifests:
            self.standing[one if isinstance(one, int) else one.version] = None if isinstance(one, int) else one
        self.hinted = hint
        self.read_versions: list[int] = []
        self.probed_from: list[int] = []

    def path(self, version: int) -> str:
        return f"{FOLDER}/manifest/{region_manifest_name(version)}"

    def hint(self) -> int | None:
        return self.hinted

    def read(self, version: int) -> RegionManifest:
        """An int among the manifests is one that does not decode."""
        self.read_versions.append(version)
        if version not in self.standing:
            raise RegionManifestGoneError(f"{version} is gone")
        one = self.standing[version]
        if one is None:
            raise RegionManifestCorruptError(f"{version} is broken")
        return one

    def latest_from(self, version: int, known: RegionManifest | None = None) -> RegionManifest:
        assert version in self.standing
        assert known is None or known.version == version
        self.probed_from.append(version)
        newest = self.standing[max(self.standing)]
        assert newest is not None
        return newest


class Given(GcEvidence):
    """Evidence with the gates of generations that the test gives; the others are free."""

    gates: dict[int, Gate]

    def generation_gates(self, region_id: UUID, generation: int) -> tuple[Gate, ...]:
        assert region_id == REGION
        return (FREE, self.gates.get(generation, FREE))


def evidence_of(manifests: Manifests, *, points: bool = False, needed: Collection[int] = (), **options: Any) -> Given:
    def region(region_id: UUID) -> Manifests:
        assert region_id == REGION
        return manifests

    merged = table_pb2.Transaction(transaction_properties={JOB_PROPERTY: "merge"})
    table: Any = SimpleNamespace(
        region=region,
        store="the store",
        layout="the layout",
        layout_of=lambda _: "the layout",
        index=SimpleNamespace(merged_generations={}),
        manifest=VersionManifest(table_pb2.Manifest(), None, merged, 0, 3),
    )
    retention: Any = SimpleNamespace(points_into_mem_wal=points)
    evidence = Given(
        table, retention, {}, NOW, RetentionOptions(**{"drain_after": timedelta(0), "allow_unsafe": True, **options})
    )
    object.__setattr__(evidence, "gates", {number: Gate(met=False, text=f"{number} is needed") for number in needed})
    return evidence


def listing(manifests: Manifests, ages: dict[int, timedelta] | None = None, **directories: timedelta) -> RegionContents:
    """A listing of all manifests, two hours old but where ``ages`` has another age, and of directories by their age."""
    found = RegionContents(REGION)
    for version in manifests.standing:
        found.manifests[version] = FileState(100 + version, NOW - (ages or {}).get(version, 2 * HOUR))
    for name, age in directories.items():
        found.directories[name] = DirectoryContents(3, 30, NOW - age)
    return found


def view(
    manifests: Manifests, contents: RegionContents, evidence: Given | None = None, settled: int | None = None
) -> RegionView:
    newest = manifests.standing[max(manifests.standing)]
    assert newest is not None
    return RegionView(
        evidence or evidence_of(manifests),
        contents,
        newest,
        None if settled is None else manifests.standing[settled],
        _damages=dict.fromkeys(range(1, 100)),  # none is damaged
    )
