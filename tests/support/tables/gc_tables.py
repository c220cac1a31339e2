"""Tables for gc: make one, bring it to the state that frees its generations, see what is left."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from lance.file import LanceFileReader
from pyarrow import ipc

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.holds import take_hold
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.jobs.gc.job import GcOptions
from tests.support.gc_options import IMMEDIATE
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import open_dataset, read_base, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.jobs.gc.evidence import LanceCandidate
    from memwal_ops.formats.lance.table import Table
    from tests.support.tables.lsm_table import LsmTable

ZERO = timedelta(0)
HOUR, DAY = 3600, 86400


# -- made, and brought forward


def make(path: Path, kind: type[LsmTable] = Workload, *, generations: int = 3, regions: int = 2) -> LsmTable:
    """Generations of three entries in each region, every one by another writer epoch; nothing merged."""
    return copy_of(make_anew, str(path / "t.lance"), kind, generations, regions)


def make_anew(uri: str, kind: type[LsmTable], generations: int, regions: int) -> LsmTable:
    made = kind(1, regions=regions, base_rows=30).create(uri)
    for _ in range(generations):
        grow(made)
    return made


def grow(made: LsmTable) -> None:
    """One more generation for each region."""
    for at, region in enumerate(made.regions):
        if isinstance(made, RegionLayout) and made._states[region].current_generation > 1:
            made._states[region].epoch += 1
        for _ in range(3):
            made.put([at, at + 2 * len(made.regions), made._fresh(at)])
        made.flush(region)


def table_of(made: LsmTable) -> Table:
    return open_table(made.uri, made.storage_options)


def merged(made: LsmTable) -> None:
    assert not merge.apply(table_of(made), merge.MergeOptions()).blocked


def caught_up(made: LsmTable) -> None:
    catchup.apply(table_of(made), catchup.CatchupOptions())


def expired(made: LsmTable) -> None:
    expire.apply(table_of(made), expire.ExpireOptions(ZERO, allow_unsafe=True))


def free(made: LsmTable) -> LsmTable:
    """No process needs any generation any more."""
    merged(made)
    caught_up(made)
    expired(made)
    return made


def sound(made: LsmTable) -> None:
    """Every reader sees the model's rows."""
    assert_same(read_base(made.uri, made.storage_options), made.expected(), seed=made.seed)
    assert_same(read_spec(made.uri, made.storage_options), made.expected(), seed=made.seed)


# -- what a plan says, and what the table has


def planned(made: LsmTable, options: GcOptions = IMMEDIATE) -> list[LanceCandidate]:
    """Every item of a plan, which changes nothing."""
    return [*gc.candidates(table_of(made), options)]


def collect(made: LsmTable, options: GcOptions = IMMEDIATE, store: Any = None) -> gc.GcReport:
    table = table_of(made)
    return gc.apply(
        table if store is None else replace(table, store=store(table.store)), replace(options, limit=10_000)
    )


def paths(items: Iterable[LanceCandidate], kind: CandidateKind, verdict: Verdict) -> set[str]:
    return {item.path for item in items if item.kind is kind and item.verdict is verdict}


def reasons(items: Iterable[LanceCandidate], kind: CandidateKind) -> dict[str, str]:
    """Why things of a kind are kept, by path."""
    return {item.path: item.why for item in items if item.kind is kind and item.verdict is not Verdict.DELETE}


def generation_folders(made: LsmTable) -> set[str]:
    files = Files(made.uri, made.storage_options)
    return {path.rsplit("/", path.count("/") - 2)[0] for path in files.listing("_mem_wal/") if "_gen_" in path}


def entries(made: LsmTable, region: str) -> dict[int, str]:
    files = Files(made.uri, made.storage_options)
    return {
        wire.from_bit_reversed(path.rsplit("/", 1)[-1]): path
        for path in files.listing(f"_mem_wal/{region}/wal/")
        if path.endswith((".arrow", ".lance"))
    }


def versions(made: LsmTable, region: str) -> list[int]:
    files = Files(made.uri, made.storage_options)
    stem = f"_mem_wal/{region}/manifest/"
    return sorted(wire.from_bit_reversed(p.rsplit("/", 1)[-1]) for p in files.listing(stem) if p.endswith(".binpb"))


def age(made: LsmTable, pattern: str, seconds: float) -> None:
    """Let files be so old."""
    found = [path for path in Path(made.uri).glob(pattern) if path.is_file()]
    assert found, pattern
    at = time.time() - seconds
    for path in found:
        os.utime(path, (at, at))


def write(made: LsmTable, path: str, data: bytes = b"x") -> str:
    Files(made.uri, made.storage_options).put(path, data)
    return path


def keep_by_tag(made: LsmTable, version: int) -> str:
    open_dataset(made.uri).tags.create("audit", version)
    return f"tag audit at version {version}"


def keep_by_branch(made: LsmTable, version: int) -> str:
    open_dataset(made.uri).create_branch("side", version)
    return "branch side"


def keep_by_hold(made: LsmTable, version: int) -> str:
    hold = take_hold(table_of(made), version, timedelta(hours=1))
    return f"hold {hold.number} of {hold.by} on version {version}"


def unlist(made: LsmTable, generation: int, *, forget: bool) -> str:
    """Take a generation off the first region's list; with ``forget``, no version that stands had it."""
    region = made.regions[0]
    manifests = table_of(made).region(UUID(region))
    newest = manifests.latest()
    (folder,) = [one.path for one in newest.flushed_generations if one.generation == generation]
    assert manifests.commit(newest.next().without_generations({generation}))
    if forget:
        for version in versions(made, region)[:-1]:
            damage.remove_region_manifest_version(made.uri, region, version)
    return f"_mem_wal/{region}/{folder}"


def epochs_of(made: LsmTable, region: str) -> dict[int, int]:
    """Which epoch wrote each entry, read without the project."""
    files = Files(made.uri, made.storage_options)
    found = {}
    for number, path in entries(made, region).items():
        if path.endswith(".arrow"):
            metadata = ipc.open_stream(files.get(path)).schema.metadata
        else:
            reader = LanceFileReader(f"{made.uri}/{path}", storage_options=made.storage_options)
            metadata = reader.metadata().schema.metadata
        found[number] = int(metadata[b"writer_epoch"])
    return found


def firsts(epochs: dict[int, int]) -> dict[int, int]:
    """Per epoch its first entry."""
    return {epoch: min(n for n, of in epochs.items() if of == epoch) for epoch in set(epochs.values())}
