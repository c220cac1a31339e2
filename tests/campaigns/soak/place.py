"""Where a soak runs, and how it reads: the base of one version, then the generations above its progress."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from tests.campaigns.soak.ledger import SCHEMA, Ledger, Sheet, checksum, judge, new_blocks, region_id, region_of
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.reading import open_dataset
from tests.support.tables.schemas import TOMBSTONE

# Rows of the table's owner, which no region ever writes: all of one fragment, and always all equal.
OWNERS_REGION = 1 << 10
OWNERS_ROWS = 40
# runbooks/README.md: an object vanished meanwhile, a version is gone, others won, the answer was lost.
LOST_RACES = frozenset({25, 26, 30, 31})
# A region is blocked: seen once under load, where a flush may take longer than versions are kept here.
BLOCKED = 10
# The store did not answer in time, or refused some deletions.
LOST_CONNECTIONS = frozenset({24, 27})


@dataclass(frozen=True)
class Place:
    """What every process of a soak is told, by one file.

    Attributes:
        folder: for ledgers, logs and this file; local always.
        grace: seconds. Versions, orphans and fence posts live for small multiples of it (see ``jobs.py``).
        sizes: fewest and most rows of a put.
        rows_per_second: what all writers together aim at.
    """

    uri: str
    options: dict[str, str]
    folder: str
    seed: int
    regions: int
    grace: float
    sizes: tuple[int, int]
    rows_per_second: float
    stable_row_ids: bool = False
    deletes: bool = True

    @classmethod
    def load(cls, folder: str) -> Place:
        """The one of that folder."""
        return cls(**json.loads((Path(folder) / "place.json").read_text()))

    def save(self) -> None:
        """For the processes to read."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        (Path(self.folder) / "place.json").write_text(json.dumps(asdict(self)))

    def dataset(self, version: int | None = None) -> lance.LanceDataset:
        """The base table."""
        return open_dataset(self.uri, self.options, version)

    @property
    def lost_races(self) -> frozenset[int]:
        """Exit codes of a command that others, or the network, may cause, and that runbooks/README.md lists."""
        return LOST_RACES | {BLOCKED} | (LOST_CONNECTIONS if "://" in self.uri else frozenset())

    def files(self) -> Files:
        """All objects of the table."""
        return Files(self.uri, self.options)

    def ledger(self, region: int) -> Ledger:
        """What the writers of a region promised so far."""
        return Ledger.of(self.folder, region)

    def create(self) -> None:
        """The table: the owner's rows, an index on the key, one on another column, no region yet."""
        ids = (np.int64(OWNERS_REGION) << 44) + np.arange(OWNERS_ROWS)
        zero = np.zeros(OWNERS_ROWS, np.int64)
        columns = {"id": ids, "seq": zero, "ord": zero.astype(np.int32), "check": zero}
        dataset = lance.write_dataset(
            pa.table(columns, schema=SCHEMA),
            self.uri,
            storage_options=self.options or None,
            enable_stable_row_ids=self.stable_row_ids,
        )
        dataset.create_scalar_index("id", "BTREE")
        dataset.create_scalar_index("seq", "BTREE")
        dataset.initialize_mem_wal()
        # Readers choose any version, and none of these is older than the first region.
        dataset.cleanup_old_versions(older_than=timedelta(0))


@dataclass(frozen=True)
class View:
    """One reader's choice of files: a base version and the generations that were listed after it, in order."""

    version: int
    generations: tuple[tuple[int, str], ...]


def look(place: Place, version: int | None = None) -> View:
    """Choose the newest version, or this one, and then the generations above its progress."""
    files = place.files()
    version = version or int(place.dataset().version)
    manifest = wire.parse_manifest(files.get(wire.manifest_names(files)[version]))
    details = wire.decode(wire.mem_wal_details(manifest))
    progress = {wire.uuid_of(one, 1): int(wire.get(one, 2)) for one in wire.sub(details, 9)}
    found = []
    for region in range(place.regions):
        known = region_id(region)
        listed = _listed(files, known)
        found += [(region, listed[one]) for one in sorted(listed) if one > progress.get(known, 0)]
    return View(version, tuple(found))


def _listed(files: Files, region: str) -> dict[int, str]:
    """The generations of a region by its newest manifest."""
    names = [path for path in files.listing(f"_mem_wal/{region}/manifest") if path.endswith(".binpb")]
    if not names:
        return {}
    newest = max(names, key=lambda path: wire.from_bit_reversed(path.rsplit("/", 1)[-1]))
    listed = wire.sub(wire.decode(files.get(newest)), 8)
    return {int(wire.get(one, 1)): bytes(wire.get(one, 2)).decode() for one in listed}  # type: ignore[arg-type]


def read(place: Place, view: View) -> tuple[dict[int, pa.Table], list[tuple[int, pa.Table]]]:
    """The base's rows by region, and the generations' in order; no key twice in any of them."""
    base = place.dataset(view.version).to_table(columns=SCHEMA.names)
    owners = region_of(base["id"].to_numpy())
    parts = {int(region): base.filter(owners == region) for region in np.unique(owners)}
    generations = []
    for region, path in view.generations:
        rows = open_dataset(f"{place.uri}/_mem_wal/{region_id(region)}/{path}", place.options).to_table()
        generations.append((region, rows))
    for region, rows in [*parts.items(), *generations]:
        ids = rows["id"].to_numpy()
        assert len(np.unique(ids)) == len(ids), f"region {region}: {len(ids) - len(np.unique(ids))} keys stand twice"
    return parts, generations


def check(place: Place, rows: tuple[dict[int, pa.Table], list[tuple[int, pa.Table]]], *, whole: bool) -> dict[int, int]:
    """Judge what was read; per region the last operation that it shows."""
    base, generations = rows
    reached = {}
    for region in range(place.regions):
        ledger = place.ledger(region)
        sheet = Sheet(region, new_blocks(ledger.operations()))
        for part in [base.get(region), *(one for number, one in generations if number == region)]:
            if part is not None:
                _lay(sheet, part)
        reached[region] = judge(sheet, ledger, place.seed, whole=whole)
    strangers = set(base) - set(range(place.regions)) - {OWNERS_REGION}
    assert not strangers, f"rows of regions that there are not: {strangers}"
    return reached


def _lay(sheet: Sheet, rows: pa.Table) -> None:
    """Rows over a sheet; tombstones take away."""
    gone = rows[TOMBSTONE].to_numpy().astype(bool) if TOMBSTONE in rows.column_names else np.zeros(len(rows), bool)
    ids = rows["id"].to_numpy()
    sheet.delete(ids[gone])
    standing = rows.filter(~gone)
    ids, seq, order = (_numbers(standing, name) for name in ("id", "seq", "ord"))
    broken = ids[checksum(ids, seq, order) != _numbers(standing, "check")]
    assert not len(broken), f"region {sheet.region}: rows are mixed up, e.g. keys {broken[:5].tolist()}"
    sheet.put(ids, seq, order)


def _numbers(rows: pa.Table, name: str) -> Any:
    return rows[name].to_numpy().astype(np.int64)
