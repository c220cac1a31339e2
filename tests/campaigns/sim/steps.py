"""Everything that may happen to a table, one method each; both the seeded histories and the machine draw on it."""

from __future__ import annotations

import random
from typing import Any

from tests.campaigns.sim.fault_steps import FaultSteps
from tests.campaigns.sim.final_steps import FinalSteps
from tests.campaigns.sim.seen import LATER_RELEASE
from tests.campaigns.sim.writer_steps import WriterSteps
from tests.campaigns.sim.writers import RegionTable, ShardTable
from tests.support.tables import wire
from tests.support.tables.files import Files


def make_table(uri: str, seed: int) -> RegionTable | ShardTable:
    """The table of a seed: its layout, regions, index, row ids."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "regions": rng.choice([1, 2]),
        "base_rows": 12,
        "with_btree": bool(seed % 4 < 2),
        "stable_row_ids": bool(seed % 8 < 4),
    }
    # A MemTable ends by a flush alone, so that a history does not hang on the moment of one in the background.
    made = RegionTable(seed, **options) if seed % 2 else ShardTable(seed, max_memtable_rows=5000, **options)
    made.create(uri)
    if seed % 3 == 0:
        name, manifest = wire.newest_manifest(Files(uri))
        details = wire.encode([*wire.decode(wire.mem_wal_details(manifest)), LATER_RELEASE])
        Files(uri).put(name, wire.build_manifest(wire.with_details(manifest, details)))
    return made


class Steps(WriterSteps, FaultSteps, FinalSteps):
    """Every step that a history may take; those of owners come with the end, which takes them back."""
