"""What collecting garbage costs: ``python -m benchmarks.gc`` (``--short`` to see that it runs).

Planning a million objects (memory, and time against listing them once), retention over 50,000
versions, requests of a run in each state, and deleting 10,000 files against deleting them one by one
and against nothing but full batches. Prints Markdown.

The million objects exist only as listings (:class:`SimulatedStore`): what is measured is the
collector, not a file system.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import ipc

from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops import open_table
from memwal_ops.cli import process
from memwal_ops.core.layout import MEM_WAL_FOLDER, Layout, region_folder
from memwal_ops.core.regions import HINT, RegionManifestStore
from memwal_ops.core.retention import Retention
from memwal_ops.core.versions import VERSIONS_FOLDER, version_path
from memwal_ops.core.wal import wal_entry_path
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.format._pb import memwal_pb2, table_pb2
from memwal_ops.format.memwal_index import find_memwal_entry, with_progress
from memwal_ops.format.names import (
    NamingScheme,
    parse_generation_dir,
    parse_region_manifest_name,
    parse_version_manifest_name,
    parse_wal_entry_name,
    version_manifest_name,
)
from memwal_ops.format.region_manifest import (
    RegionManifest,
    RegionStatus,
    encode_region_manifest,
    encode_version_hint,
)
from memwal_ops.format.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.jobs import catchup, expire, gc, merge
from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta
from memwal_ops.storage.counting import CountingStore
from tests.tables.many_regions import make_regions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator

    from memwal_ops.core.table import Table
    from memwal_ops.format.version_manifest import VersionManifest
    from memwal_ops.storage.api import Store

_MIB = 1 << 20
_LONG_AGO = datetime(2024, 1, 1, tzinfo=UTC)
_FILE_BYTES = 4096
_EPOCHS = 3
_MANIFESTS = 3
_DATA = "data"
_GENERATIONS = 200
REGION = uuid.UUID(int=1, version=4)
IMMEDIATE = gc.GcOptions(
    reader_grace=timedelta(0), orphan_min_age=timedelta(0), manifest_retention=2, allow_unsafe=True
)


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
        data = _log_entry(1 + (entry.entry_id - 1) * _EPOCHS // max(self._stand.entries, 1))[start : start + length]
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
            yield _meta(wal_entry_path(region_id, entry, Layout.SHARD), entry)
        for generation in range(1, self._stand.directories + 1):
            yield from self._files(f"{folder}/{_directory(generation)}", generation)

    def _files(self, directory: str, generation: int) -> Iterator[ObjectMeta]:
        for file in range(self._stand.files):
            yield _meta(f"{directory}/{_DATA}/{file:036d}.lance", generation)

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
            entry = memwal_pb2.FlushedGeneration(generation=one, path=_directory(one))
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
        self._small = _manifest_part(self._version)
        fragment = version.manifest.fragments[0]
        for number in range(1, history.fragments):
            version.manifest.fragments.add().CopyFrom(fragment)
            version.manifest.fragments[number].id = number
        self._large = _manifest_part(self._version)

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
        return body + struct.pack("<QHH4s", len(self._head(number)), 0, 2, b"LANC")


def _manifest_part(version: VersionManifest) -> bytes:
    data = version.manifest.SerializeToString(deterministic=True)
    return struct.pack("<I", len(data)) + data


def _meta(path: str, age: int = 0) -> ObjectMeta:
    return ObjectMeta(path, _FILE_BYTES + age % 1000, _LONG_AGO + timedelta(seconds=age), None)


def _directory(generation: int) -> str:
    return f"{generation * 2654435761 % (1 << 32):08x}_gen_{generation}"


@lru_cache
def _log_entry(epoch: int) -> bytes:
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


# -- planning


def plan_simulated(folder: str, stand: Stand) -> dict[str, Any]:
    """In this process: list everything once, plan everything, and say what both took.

    Processor time: nothing here waits for anything, and the machine may be busy.
    """
    process.prepare()
    uri = f"{folder}/t.lance"
    with_merged(make_regions(uri, 1, Layout.SHARD), dict.fromkeys(stand.region_ids, stand.merged))
    table = open_table(uri)
    store = SimulatedStore(table.store, stand)
    table = replace(table, store=store)
    before = _peak()
    started = time.process_time()
    listed = sum(1 for region_id in table.regions.region_ids for _ in store.list(region_folder(region_id)))
    floor = time.process_time() - started
    store.reset()
    started = time.process_time()
    report = gc.plan(table, gc.GcOptions())
    seconds = time.process_time() - started
    verdicts = sum(counter.total() for counter in report.counts.values())
    return {
        "listed": listed,
        "verdicts": verdicts,
        "counts": report.to_json()["counts"],
        "floor": floor,
        "seconds": seconds,
        "before": before,
        "peak": _peak(),
        "calls": store.calls.total(),
    }


def retention_simulated(folder: str, history: History) -> dict[str, Any]:
    """In this process: read the progress of many versions, look again, and ask who needs generations."""
    process.prepare()
    table = make_regions(f"{folder}/t.lance", 1, Layout.SHARD)
    store = SimulatedHistory(table, history)
    table = replace(table, store=store)
    retention = Retention()
    before = _peak()
    seconds = {}
    calls = {}
    for step in ("first", "again"):
        store.reset()
        started = time.perf_counter()
        retention.refresh(table, datetime.now(UTC))
        seconds[step] = time.perf_counter() - started
        calls[step] = store.calls.total()
        if step == "first":
            read = store.bytes_read
    progress = history.versions // history.progress_every
    started = time.perf_counter()
    held = sum(retention.needs(REGION, generation) is not None for generation in range(1, _GENERATIONS + 1))
    return {
        "versions": len(retention.versions),
        "read": read,
        "all_bytes": store.all_bytes,
        "calls": calls,
        "seconds": seconds,
        "needs": (time.perf_counter() - started) / _GENERATIONS,
        "held": held,
        "needed_by_the_oldest": retention.needs(REGION, 1),
        "needed_by_nearly_all": retention.needs(REGION, progress),
        "before": before,
        "peak": _peak(),
    }


def _peak() -> int:
    # Not ru_maxrss: that of a child begins with what its parent had.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_child(*arguments: str) -> dict[str, Any]:
    """What a process that does nothing else says of itself."""
    child = [sys.executable, "-W", "ignore", "-m", "benchmarks.gc", *arguments]
    done = subprocess.run(child, check=True, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- requests


@dataclass(frozen=True, slots=True)
class Step:
    """What one command cost: calls of the store, and requests by method where a server counted them."""

    name: str
    decision: str
    calls: int
    requests: dict[str, int]


def steps(uri: str, options: dict[str, str] | None, counts: Counter[str], regions: int) -> Iterator[Step]:
    """The life of one generation in each region, from merged to gone, and the runs that find nothing."""
    make(uri, Shape(base=2_000, regions=regions, generations=1, rows=100), storage_options=options)
    merge.apply(open_table(uri, options), merge.MergeOptions())
    catchup.apply(open_table(uri, options), catchup.CatchupOptions())
    expire.apply(open_table(uri, options), expire.ExpireOptions(timedelta(0)))
    for name, run, care in (
        ("plan, a generation to drain", gc.plan, gc.GcOptions()),
        ("apply, drains it", gc.apply, gc.GcOptions()),
        ("plan, a generation to delete", gc.plan, IMMEDIATE),
        ("apply, deletes it", gc.apply, IMMEDIATE),
        ("plan, nothing to do", gc.plan, IMMEDIATE),
        ("apply, nothing to do", gc.apply, IMMEDIATE),
    ):
        counts.clear()
        table = open_table(uri, options)
        store = CountingStore(table.store)
        report = run(replace(table, store=store), care)
        yield Step(name, report.decision, store.calls.total(), dict(counts))


def per_region(few: list[Step], many: list[Step], more: int) -> Iterator[list[str]]:
    """Rows: what a run costs with few regions, and each further region."""
    for one, other in zip(few, many, strict=True):
        assert one.decision == other.decision
        total, totals = sum(one.requests.values()) or one.calls, sum(other.requests.values()) or other.calls
        methods = ", ".join(f"{count} {method}" for method, count in sorted(one.requests.items()))
        yield [
            one.name,
            one.decision,
            f"{total}",
            methods or "calls of the store",
            f"**{(totals - total) / more:.1f}**",
        ]


# -- deletes

_DIRECTORIES = 1_000
_IN_EACH = 8
_LOG = 2_000


def deletable(uri: str, options: dict[str, str] | None, scale: int) -> Table:
    """A region of orphans and of flushed log entries: 10,000 files, divided by ``scale``."""
    table = make_regions(uri, 1, Layout.SHARD, options)
    with_merged(table, {REGION: _DIRECTORIES})
    folder, manifests = region_folder(REGION), table.region(REGION)
    newest = replace(manifests.latest().next(), flushed_generations=(), current_generation=_DIRECTORIES + 1)
    assert manifests.commit(replace(newest, replay_after_wal_id=_LOG // scale, wal_id_last_seen=_LOG // scale))
    data = dict.fromkeys(
        (
            f"{folder}/{_directory(generation)}/{_DATA}/{file}.lance"
            for generation in range(1, _DIRECTORIES // scale + 1)
            for file in range(_IN_EACH)
        ),
        b"rows",
    )
    data |= {wal_entry_path(REGION, entry, Layout.SHARD): _log_entry(1) for entry in range(1, _LOG // scale + 1)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(table.store.put, data, data.values()))
    return open_table(uri, options)


def ours(table: Table) -> int:
    """``gc --apply``."""
    return gc.apply(table, IMMEDIATE).deleted_objects


def one_by_one(table: Table) -> int:
    """As ``aws s3 rm --recursive`` does: list, and a request for each file."""
    listed = [meta.path for meta in table.store.list(region_folder(REGION))]
    return sum(table.store.delete_many([path]).deleted for path in listed)


def batches(table: Table) -> int:
    """The floor: list, and nothing but full batches; no proof of anything."""
    return table.store.delete_many([meta.path for meta in table.store.list(region_folder(REGION))]).deleted


def deleting(base: str, options: dict[str, str] | None, counts: Counter[str], where: str, scale: int) -> None:
    """Rows: deleting the same files in three ways."""
    for name, way in (("gc --apply", ours), ("one by one", one_by_one), ("full batches", batches)):
        table = deletable(f"{base}/{way.__name__}.lance", options, scale)
        store = CountingStore(table.store)
        counts.clear()
        started = time.perf_counter()
        deleted = way(replace(table, store=store))
        seconds = time.perf_counter() - started
        calls = store.calls
        verbs = ", ".join(f"{calls[verb]:,} {verb}" for verb in ("list", "delete_many"))
        cells = [where, name, f"{deleted:,}", f"{seconds:.2f} s", verbs]
        _row([*cells, f"**{counts.total():,}**" if options else ""])


# -- all


def _row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def _head(title: str, cells: list[str]) -> None:
    print(f"\n## {title}\n")
    _row(cells)
    _row(["---"] * len(cells))


def main() -> None:
    """All tables of benchmarks/README.md that are about gc."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few objects, to see that it runs")
    parser.add_argument("--plan", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--retention", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan or arguments.retention:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.plan:
                print(json.dumps(plan_simulated(folder, Stand(**json.loads(arguments.plan)))))
            else:
                print(json.dumps(retention_simulated(folder, History(**json.loads(arguments.retention)))))
        return
    scale = 50 if arguments.short else 1
    planning(scale)
    retaining(scale)
    with tempfile.TemporaryDirectory() as folder, counting_server() as (options, counts):
        remote = f"s3://{BUCKET}"
        _head("Garbage: requests", ["where", "run", "decision", "one region", "of these", "each further region"])
        for where, base, access in (("local files", folder, None), ("S3 stand-in", remote, options)):
            few, many = (list(steps(f"{base}/{regions}.lance", access, counts, regions)) for regions in (1, 5))
            for cells in per_region(few, many, 4):
                _row([where, *cells])
        columns = ["where", "way", "deleted", "seconds", "calls of the store", "requests at the server"]
        _head("Garbage: deleting 10,000 files in 1,000 folders and a log", columns)
        deleting(folder, None, counts, "local files", scale)
        deleting(remote, options, counts, "S3 stand-in", scale)


def planning(scale: int) -> None:
    """A million objects; to divide each number by ``scale`` keeps the shape."""
    columns = ["what stands", "objects", "list once", "plan", "plan / list", "requests", "before", "peak"]
    _head("Garbage: planning", columns)
    for name, stand in SHAPES.items():
        smaller = replace(
            stand,
            regions=-(-stand.regions // scale),
            entries=stand.entries // (1 if stand.regions > 1 else scale),
            directories=stand.directories // (1 if stand.regions > 1 else scale),
        )
        found = in_child("--plan", json.dumps(asdict(smaller)))
        cells = [name, f"{found['listed']:,}", f"{found['floor']:.1f} s", f"{found['seconds']:.1f} s"]
        ratio = f"**{found['seconds'] / found['floor']:.1f}**"
        memory = [f"{found[key] // _MIB} MiB" for key in ("before", "peak")]
        _row([*cells, ratio, f"{found['calls']:,}", *memory])


def retaining(scale: int) -> None:
    """Fifty thousand versions."""
    columns = ["versions", "their bytes", "read", "requests", "seconds", "again", "a generation", "before", "peak"]
    _head("Garbage: retained versions", columns)
    for versions in (5_000, 50_000):
        found = in_child("--retention", json.dumps(asdict(History(versions // scale, progress_every=500 // scale))))
        cells = [f"{found['versions']:,}", f"{found['all_bytes'] / _MIB:,.0f} MiB", f"{found['read'] / _MIB:,.0f} MiB"]
        requests = f"{found['calls']['first']:,}, then {found['calls']['again']}"
        seconds = [f"{found['seconds'][step]:.2f} s" for step in ("first", "again")]
        memory = [f"{found[key] // _MIB} MiB" for key in ("before", "peak")]
        _row([*cells, requests, *seconds, f"{found['needs'] * 1e3:.2f} ms", *memory])


if __name__ == "__main__":
    main()
