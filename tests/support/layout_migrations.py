"""Tables for migrations between the layouts of today, their writers, and migrations that are killed at each call."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs.migrate import job
from memwal_ops.formats.lance.options import MigrateOptions
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from memwal_ops.storage import probe
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.seeds import CAMPAIGN_SEED
from tests.support.tables.writers import closed_at_the_end

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("val", pa.float64())])
OTHER = {"shard": "region", "region": "shard"}
REFUSED = (OSError, RuntimeError, MemwalOpsError)
"""What a writer of either kind raises that was fenced, or whose region is sealed."""


def rows(values: Mapping[int, float]) -> pa.Table:
    return pa.table({"id": [*values], "val": [*values.values()]}, schema=SCHEMA)


def keys(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def writer(uri: str, layout: str, region: str | None = None) -> Any:
    """A writer of that layout: pylance's own, or the product's."""
    if layout == "region":
        return RegionWriter(uri, region)
    opened = lance.dataset(uri).mem_wal_writer(region or str(uuid.uuid4()), max_wal_flush_interval_ms=1)
    return closed_at_the_end(opened)


def migrate(uri: str, to: str | None = None, **options: Any) -> Any:
    return run_job(uri, "migrate", apply=options.pop("apply", True), **({} if to is None else {"to": to}), **options)


def scanned(uri: str, consistency: Any = "strong") -> dict[int, float]:
    """Base and log, as the product's reader has them."""
    return _by_key(read(uri, consistency).scan().to_table())


def base_rows(uri: str) -> dict[int, float]:
    """The base table alone, as pylance has it."""
    return _by_key(lance.dataset(uri).to_table())


def _by_key(table: pa.Table) -> dict[int, float]:
    found = table.to_pydict()
    assert len({*found["id"]}) == len(found["id"])
    return dict(zip(found["id"], found["val"], strict=True))


@dataclass
class Made:
    """A table with regions of one layout, and what it must read as."""

    uri: str
    layout: str
    model: dict[int, float] = field(default_factory=dict)
    open: list[Any] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)

    def put(self, writer: Any, values: Mapping[int, float]) -> None:
        writer.put(rows(values))
        self.model |= values

    def delete(self, writer: Any, *ids: int) -> None:
        writer.delete(keys(*ids))
        for one in ids:
            self.model.pop(one, None)

    def region(self) -> str:
        self.regions.append(str(uuid.uuid4()))
        return self.regions[-1]


def empty(uri: str, layout: str) -> Made:
    """A base table of 20 rows with its index."""
    made = Made(uri, layout, dict.fromkeys(range(20), 0.5))
    dataset = lance.write_dataset(rows(made.model), uri)
    if layout == "region":
        create_mem_wal(uri)
    else:
        dataset.initialize_mem_wal()
    return made


def filled(uri: str, layout: str, *, idle: bool = True) -> Made:
    """Three regions: one merged and flushed and logged, one that is closed, one of whose log nothing is flushed.

    With ``idle`` the writers of the first and the last remain open.
    """
    made = empty(uri, layout)
    first, second, third = made.region(), made.region(), made.region()
    with writer(uri, layout, first) as one:
        made.put(one, {1: 1.0, 100: 1.5})
    assert run_job(uri, "merge").decision == "merged"
    with writer(uri, layout, first) as one:
        made.put(one, {1: 2.0, 101: 2.5})
        made.delete(one, 100)
    with writer(uri, layout, second) as one:
        made.put(one, {2: 3.0, 200: 3.5})
    for number, region in enumerate((first, third)):
        one = writer(uri, layout, region)
        made.put(one, {1 + 2 * number: 4.0, 300 + number: 4.5})
        made.delete(one, 5 + number)
        made.open.append(one)
    if not idle:
        made.open.clear()
    return made


def kill_and_repeat(tmp_path: Path, layout: str, *, every: int) -> None:
    """Kill a migration before and after each ``every``-th call of the store, and run it again; then roll it back."""
    made = filled(str(tmp_path / "t.lance"), layout)
    backup, to = str(tmp_path / "backup"), OTHER[layout]
    shutil.copytree(made.uri, backup)

    def start(at: int, *, after: bool) -> DyingStore:
        probe._proven.clear()
        opened = open_table(made.uri)
        store = DyingStore(opened.store, at, after=after)
        job.apply(replace(opened, store=store), MigrateOptions(to=to))
        return store

    with calm():
        calls = len(start(1 << 30, after=False).calls)
        assert calls > 40
        for at in range(1 + CAMPAIGN_SEED % every, calls + 1, every):
            for after in (False, True):
                shutil.rmtree(made.uri)
                shutil.copytree(backup, made.uri)
                where = f"call {at} of {calls}, {'after' if after else 'before'}"
                with pytest.raises(Killed):
                    start(at, after=after)
                if layout == "region":  # pylance's logs are not read by the product
                    assert scanned(made.uri) == made.model, where
                again = migrate(made.uri, to)
                assert again.decision in {"migrated", "nothing_to_migrate"}, where
                assert open_table(made.uri).layout.name == to, where
                assert base_rows(made.uri) == scanned(made.uri) == made.model, where
                assert all(open_table(made.uri).region(uuid.UUID(one)).latest().sealed for one in made.regions), where
                if at % 7 == 0:
                    assert migrate(made.uri, rollback=True).decision == "rolled_back", where
                    assert base_rows(made.uri) == scanned(made.uri) == made.model, where
