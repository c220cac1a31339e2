"""Collectors to search with: the product's decisions on a log in memory, simpler rules, and the whole gc on a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import lance

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.formats.lance.generations.generation_files import FileState, RegionContents
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import GcEvidence
from memwal_ops.formats.lance.jobs.gc.region import RegionView, _History
from memwal_ops.formats.lance.jobs.gc.wal import WalView
from memwal_ops.formats.lance.layouts import Layout
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
from memwal_ops.storage.api import ObjectMeta
from tests.integration.contracts.small import REGION
from tests.support.gc_options import IMMEDIATE
from tests.support.spec_writer import Entry, Manifest, MemoryRegion, TableRegion
from tests.support.tables import wire
from tests.support.tables.region_layout import RegionLayout

PATIENT = replace(IMMEDIATE, manifest_retention=1000)
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ID = UUID(REGION)

# -- decisions on a log in memory


class Wal(WalView):
    """The product's view of a log in memory; only the reading of bytes is replaced."""

    def _epoch_of(self, entry_id: int) -> int | None:
        entry: Entry = self.view.evidence.table.region_in_memory.log[entry_id]  # type: ignore[attr-defined]
        return entry.epoch


Ages = Callable[[int], timedelta]


def view(region: MemoryRegion, layout: Layout, options: gc.GcOptions = PATIENT, ages: Ages | None = None) -> Wal:
    """What the collector sees; `ages` per entry, and per manifest as a negative number."""
    age = ages or (lambda _: timedelta(0))
    contents = RegionContents(ID)
    for position in region.log:
        contents.wal.add(position, ObjectMeta(f"{position}", 1, NOW - age(position), None))
    contents.wal.sort()
    read: dict[int, RegionManifest] = {}
    for version, one in region.manifests.items():
        contents.manifests[version] = FileState(1, NOW - age(-version))
        read[version] = decoded(one)
    history = _History(read_to=max(read))
    for version in sorted(read):
        history.claims.setdefault(read[version].writer_epoch, read[version])
    ours = SimpleNamespace(transaction_properties={"memwal-ops.job": "merge"})
    manifest = SimpleNamespace(manifest=SimpleNamespace(base_paths=(), config={}), transaction=ours)
    index = SimpleNamespace(merged_generations={ID: 1 << 40})
    table: Any = SimpleNamespace(
        layout=layout, layout_of=lambda _: layout, index=index, manifest=manifest, region_in_memory=region
    )
    newest = read[max(read)]
    return Wal(
        RegionView(GcEvidence(table, LiveVersions(), {}, NOW, options), contents, newest, newest, _history=history)
    )


def decoded(one: Manifest) -> RegionManifest:
    return RegionManifest(
        region_id=ID,
        version=one.version,
        region_spec_id=0,
        writer_epoch=one.epoch,
        replay_after_wal_id=one.replay_after,
        wal_id_last_seen=one.last_seen,
        current_generation=one.current_generation,
        flushed_generations=(),
        status=0,
    )


Collector = Callable[[MemoryRegion, Layout], set[int]]


def by_proof(region: MemoryRegion, layout: Layout) -> set[int]:
    """The entries that gc deletes."""
    if not region.manifests:
        return set()
    items = view(region, layout).entries()
    return {wire.from_bit_reversed(one.path.rsplit("/", 1)[-1]) for one in items if one.verdict is Verdict.DELETE}


def forgetful(region: MemoryRegion, layout: Layout) -> set[int]:
    """The same, where the manifests that made the claims are collected first."""
    newest = region.newest()
    region.manifests = {version: one for version, one in region.manifests.items() if version > newest.version - 2}
    return by_proof(region, layout)


def everything(region: MemoryRegion, _: Layout) -> set[int]:
    """Landmine 3: all that is flushed."""
    return {position for position in region.log if position <= region.newest().replay_after}


def but_first_entries(region: MemoryRegion, layout: Layout) -> set[int]:
    """All but the first entry of each epoch."""
    first: dict[int, int] = {}
    for position in sorted(region.log):
        first.setdefault(region.log[position].epoch, position)
    return everything(region, layout) - set(first.values())


def but_first_entries_and_the_last(region: MemoryRegion, layout: Layout) -> set[int]:
    """All but the first entry of each epoch, and the last of the log."""
    return but_first_entries(region, layout) - {max(region.log, default=0)}


# -- the whole gc, on a real table


def region_table(folder: Path) -> TableRegion:
    """A table of the region layout, without a writer so far."""
    made = RegionLayout(1, regions=1, base_rows=10, with_btree=False)
    return TableRegion(made.create(f"{folder}/t.lance"))


def collect(uri: str, options: gc.GcOptions = PATIENT) -> gc.GcReport:
    """Merge, let old versions go, then collect twice: what the first run drained, the second finds drained."""
    merge.apply(open_table(uri), merge.MergeOptions())
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    gc.apply(open_table(uri), options)
    return gc.apply(open_table(uri), options)
