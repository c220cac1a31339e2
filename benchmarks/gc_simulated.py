"""Tables that exist only as listings: what gc and retention are measured on.

A million objects, or 50,000 versions, are made up as they are asked for: what is measured is the
collector, not a file system.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import ipc

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.generations.wal import wal_entry_path
from memwal_ops.formats.lance.layouts import SHARD as SHARD_LAYOUT
from memwal_ops.formats.lance.regions.manifests import HINT, RegionManifestStore
from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry, with_progress
from memwal_ops.formats.lance.wire.names import (
    MEM_WAL_FOLDER,
    NamingScheme,
    parse_generation_dir,
    parse_region_manifest_name,
    parse_version_manifest_name,
    parse_wal_entry_name,
    region_folder,
    version_manifest_name,
)
from memwal_ops.formats.lance.wire.region_manifest import (
    RegionManifest,
    RegionStatus,
    encode_region_manifest,
    encode_version_hint,
)
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta
from tests.support.counting_store import CountingStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

_LONG_AGO = datetime(2024, 1, 1, tzinfo=UTC)
_FILE_BYTES = 4096
_EPOCHS = 3
_MANIFESTS = 3
DATA = "data"
REGION = uuid.UUID(int=1, version=4)


@dataclass(frozen=True, slots=True)
class Stand:
    """What stands in the simulated regions: WAL entries and generations' directories per region.

    Nine tenths of the log are flushed, by three writers in turn. The younger half of the generations is not
    merged; of the older half every other one is still listed.
    """

    regions: int = 1
    entries: int = 0
    directories: int = 0
    files: int = 0

    @property
    def objects(self) -> int:
        """All files of all regions."""
        return self.regions * (self.entries + self.directories * self.files + _MANIFESTS + 1)

    @property
    def merged(self) -> int:
        """Each region's merge progress."""
        return self.directories // 2

    @property
    def region_ids(self) -> tuple[uuid.UUID, ...]:
        """The regions."""
        return tuple(uuid.UUID(int=number + 1, version=4) for number in range(self.regions))


SHAPES = {
    "one region, 900,000 log entries": Stand(entries=900_000, directories=10_000, files=10),
    "1,000 regions of 1,000 objects": Stand(regions=1_000, entries=896, directories=10, files=10),
    "100,000 directories": Stand(entries=100_000, directories=100_000, files=9),
}


class SimulatedStore(CountingStore):
    """A store whose ``_mem_wal/`` is made up, file by file, as it is asked for; all else is the inner store's."""

    def __init__(self, inner: Store, stand: Stand) -> None:
        """See the class."""
        super().__init__(inner)
        self._stand = stand

    def list_level(self, prefix: str = "") -> Listing:
        """The regions' folders, for ``_mem_wal``."""
        if prefix != MEM_WAL_FOLDER:
            return super().list_level(prefix)
        return Listing(tuple(region_folder(region_id) for region_id in self._stand.region_ids), ())

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """A region's folder, or what is below."""
        if not prefix.startswith(f"{MEM_WAL_FOLDER}/"):
            return super().list(prefix, after=after)
        self._count("list")
        region_id = uuid.UUID(prefix.split("/")[1])
        if prefix.endswith("/_versions"):
            return self._listed(iter(()))  # made-up generations have no manifests; a scan for each would be quadratic
        return self._listed(meta for meta in self._below(region_id, prefix) if meta.path.startswith(f"{prefix}/"))

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Only says so."""
        self._count("delete_many")
        return DeleteReport(sum(1 for _ in paths), {})

    def head(self, path: str) -> ObjectMeta | None:
        """Manifests up to the last; nothing else is asked for."""
        if not path.startswith(f"{MEM_WAL_FOLDER}/"):
            return super().head(path)
        self._count("head")
        version = parse_region_manifest_name(path.rsplit("/", 1)[-1])
        return _meta(path) if version is not None and version <= _MANIFESTS else None

    def get(self, path: str) -> bytes:
        """A region manifest."""
        if not path.startswith(f"{MEM_WAL_FOLDER}/"):
            return super().get(path)
        self._count("get")
        region_id, name = uuid.UUID(path.split("/")[1]), path.rsplit("/", 1)[-1]
        version = parse_region_manifest_name(name)
        if version is None and name != HINT:
            raise ObjectNotFoundError(f"{path} is not there.")
        data = encode_version_hint(_MANIFESTS) if version is None else self._manifest(region_id, version)
        self._count(read=len(data))
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """The head of a WAL entry."""
        if not path.startswith(f"{MEM_WAL_FOLDER}/"):
            return super().get_range(path, start, length)
        self._count("get_range")
        entry = parse_wal_entry_name(path.rsplit("/", 1)[-1])
        if entry is None:
            raise ObjectNotFoundError(f"{path} is not there.")
        data = log_entry(1 + (entry.entry_id - 1) * _EPOCHS // max(self._stand.entries, 1))[start : start + length]
        self._count(read=len(data))
        return data

    def _below(self, region_id: uuid.UUID, prefix: str) -> Iterator[ObjectMeta]:
        only = parse_generation_dir(prefix.rsplit("/", 1)[-1])
        if only is not None:
            yield from self._files(prefix, only.generation)
            return
        manifests = RegionManifestStore(self, region_id)
        folder = region_folder(region_id)
        yield _meta(f"{manifests.folder}/{HINT}")
        for version in range(1, _MANIFESTS + 1):
            yield _meta(manifests.path(version))
        for entry in range(1, self._stand.entries + 1):
            yield _meta(wal_entry_path(region_id, entry, SHARD_LAYOUT), entry)
        for generation in range(1, self._stand.directories + 1):
            yield from self._files(f"{folder}/{directory_name(generation)}", generation)

    def _files(self, directory: str, generation: int) -> Iterator[ObjectMeta]:
        for file in range(self._stand.files):
            yield _meta(f"{directory}/{DATA}/{file:036d}.lance", generation)

    def _manifest(self, region_id: uuid.UUID, version: int) -> bytes:
        newest = self._stand.directories
        listed = (one for one in range(1, newest + 1) if one > self._stand.merged or one % 2)
        data = bytearray(
            encode_region_manifest(
                RegionManifest(
                    region_id,
                    version,
                    0,
                    _EPOCHS,
                    self._stand.entries * 9 // 10,
                    self._stand.entries,
                    newest + 1,
                    (),
                    RegionStatus.ACTIVE,
                )
            )
        )
        # A message may be put together from parts; values for all of them would be memory of the measured process.
        for one in listed:
            entry = memwal_pb2.FlushedGeneration(generation=one, path=directory_name(one))
            data += memwal_pb2.RegionManifest(flushed_generations=[entry]).SerializeToString()
        return bytes(data)


@dataclass(frozen=True, slots=True)
class History:
    """How many versions a simulated table has, and each how many-th of them is large."""

    versions: int = 50_000
    large_every: int = 10
    fragments: int = 10_000
    progress_every: int = 500


class SimulatedHistory(CountingStore):
    """A store with a made-up ``_versions/``: older versions beside the real one, which is the newest."""

    def __init__(self, table: Table, history: History) -> None:
        """See the class."""
        super().__init__(table.store)
        self._history = history
        version = decode_version_manifest(table.store.get(version_path(table.version, table.naming)))
        self._version = replace(version, transaction=None)
        for field in ("transaction_section", "transaction_section_old"):
            version.manifest.ClearField(field)
        self._small = self._version.manifest.SerializeToString(deterministic=True)
        fragment = version.manifest.fragments[0]
        for number in range(1, history.fragments):
            version.manifest.fragments.add().CopyFrom(fragment)
            version.manifest.fragments[number].id = number
        self._large = self._version.manifest.SerializeToString(deterministic=True)

    @property
    def all_bytes(self) -> int:
        """What the made-up versions' files hold."""
        return sum(len(self._head(one)) + len(self._tail(one)) for one in range(1, self._history.versions + 1))

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """The versions."""
        found = super().list(prefix, after=after)
        return found if prefix != VERSIONS_FOLDER or after else self._listed(self._versions())

    def get(self, path: str) -> bytes:
        """A version as a whole."""
        number = self._number(path)
        if number is None:
            return super().get(path)
        self._count("get")
        data = self._head(number) + self._tail(number)
        self._count(read=len(data))
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """A part of a version."""
        number = self._number(path)
        if number is None:
            return super().get_range(path, start, length)
        self._count("get_range")
        data = (self._head(number) + self._tail(number))[start : start + length]
        self._count(read=len(data))
        return data

    def _versions(self) -> Iterator[ObjectMeta]:
        for number in range(self._history.versions, 0, -1):
            path = f"{VERSIONS_FOLDER}/{version_manifest_name(number, NamingScheme.V2)}"
            size = len(self._head(number)) + len(self._tail(number))
            yield ObjectMeta(path, size, _LONG_AGO + timedelta(seconds=number), f'"{number:032x}"')

    def _number(self, path: str) -> int | None:
        name = parse_version_manifest_name(path.rsplit("/", 1)[-1])
        known = name is not None and path.startswith(VERSIONS_FOLDER) and 0 < name.version <= self._history.versions
        return name.version if known and name is not None else None

    def _head(self, number: int) -> bytes:
        return self._section(number // self._history.progress_every)

    @lru_cache(maxsize=1 << 10)  # noqa: B019 - lives as long as the process
    def _section(self, merged: int) -> bytes:
        section = table_pb2.IndexSection()
        assert self._version.indexes is not None
        section.CopyFrom(self._version.indexes)
        entry = find_memwal_entry(section)
        assert entry is not None
        details = memwal_pb2.MemWalIndexDetails()
        details.ParseFromString(entry.index_details.value)
        if merged:
            details = with_progress(details, {REGION: merged})
        entry.index_details.value = details.SerializeToString(deterministic=True)
        data = section.SerializeToString(deterministic=True)
        return struct.pack("<I", len(data)) + data

    def _tail(self, number: int) -> bytes:
        body = self._small if number % self._history.large_every else self._large
        # Its own number after all else: of a protobuf field that stands twice, the last one counts.
        body += table_pb2.Manifest(version=number).SerializeToString()
        part = struct.pack("<I", len(body)) + body
        return part + struct.pack("<QHH4s", len(self._head(number)), 0, 2, b"LANC")


def _meta(path: str, age: int = 0) -> ObjectMeta:
    return ObjectMeta(path, _FILE_BYTES + age % 1000, _LONG_AGO + timedelta(seconds=age), None)


def directory_name(generation: int) -> str:
    return f"{generation * 2654435761 % (1 << 32):08x}_gen_{generation}"


@lru_cache
def log_entry(epoch: int) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, pa.schema([pa.field("id", pa.int64())], metadata={"writer_epoch": str(epoch)})):
        pass
    return bytes(sink.getvalue().to_pybytes())


def with_merged(table: Table, progress: dict[uuid.UUID, int]) -> None:
    """Make the newest version the only one, and let it say that these generations are merged."""
    version = decode_version_manifest(table.store.get(version_path(table.version, table.naming)))
    assert version.indexes is not None
    entry = find_memwal_entry(version.indexes)
    assert entry is not None
    details = with_progress(table.index.details, {one: merged for one, merged in progress.items() if merged})
    entry.index_details.value = details.SerializeToString(deterministic=True)
    table.store.put(version_path(table.version, table.naming), encode_version_manifest(version))
    table.store.delete_many([version_path(one, table.naming) for one in range(1, table.version)])
