"""What the suite asks of a format: :class:`FormatUnderTest`. A new format adds one here, and inherits every test."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memwal_ops import open_table
from memwal_ops.formats.lance.options import CompactOptions, ExpireOptions, MaintainOptions, SnapshotOptions
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions, ZeppelinMaintainOptions, ZeppelinMergeOptions
from memwal_ops.legacy import MemWalWriter
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.gc_options import IMMEDIATE
from tests.support.tables.damage import remove_generation
from tests.support.tables.legacy_table import LegacyTable, base_rows, details_of, read_legacy, rows as legacy_rows
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memwal_ops.core.options import Options
    from memwal_ops.core.protocols import Table
    from tests.support.tables.lsm_table import LsmTable

Rows = dict[Any, Any]


class TableUnderTest(Protocol):
    """A table, its writer and its readers, on local files."""

    uri: str

    def write(self) -> None:
        """Put, replace and delete some keys: more of a backlog."""

    def expected(self) -> Rows:
        """The last write of every key."""

    def read(self) -> Rows:
        """Base and log by the format's rules; by a reader that shares no code with the jobs."""

    def read_revision(self, revision: int) -> Rows:
        """What a retained revision holds."""

    def remove_entry(self) -> None:
        """Take away what the next merge would read first."""

    def damage(self) -> None:
        """Make the table one that cannot be opened."""


@dataclass(frozen=True)
class FormatUnderTest:
    """One format, or one layout of it.

    Attributes:
        name: of the format, as it is registered.
        label: of the test.
        make: a table with a backlog at a URI.
        options: of jobs that would not act at once by default, so that all garbage goes.
        waits: two runs of one job: one waits, or is told ``busy``. Otherwise they race, and both end well.
        most_steps: kill at that many durable steps of each job, spread evenly; None: at all of them.
        with_store: the same table over another store; its calls are the durable steps.
        conditional: its commits rest on conditional writes of a store.
        trims: its gc takes what is merged off a list that is part of a revision, and so publishes one.
        foreign: an option of a merge that another format has, and this one has not.
    """

    name: str
    label: str
    make: Callable[[str], TableUnderTest]
    options: Mapping[str, Options] = field(default_factory=dict)
    waits: bool = False
    most_steps: int | None = None
    with_store: Callable[[Any, Any], Any] = lambda table, store: replace(table, store=store)
    conditional: bool = True
    trims: bool = False
    foreign: tuple[str, str] = ("--max-bytes", "1GiB")

    def options_of(self, table: Table, job: str) -> Options:
        """The options that the suite runs a job with."""
        return self.options.get(job) or table.jobs[job].options()

    def steps(self, count: int) -> Sequence[int]:
        """The calls, from 1 to ``count``, at which a run is killed."""
        most = self.most_steps or count
        return sorted({1 + at * (count - 1) // max(1, min(most, count) - 1) for at in range(min(most, count))})


@dataclass
class Snapshot:
    """The files of a table, to begin again from; it must not be written to meanwhile."""

    made: Any
    backup: str

    @classmethod
    def of(cls, made: Any) -> Snapshot:
        """Take one."""
        backup = f"{made.uri}.backup"
        shutil.copytree(made.uri, backup)
        return cls(made, backup)

    def restore(self) -> None:
        """Put everything back, at the same place: files may name each other by it."""
        shutil.rmtree(self.made.uri)
        shutil.copytree(self.backup, self.made.uri)

    def forget(self) -> None:
        """Let it go."""
        shutil.rmtree(self.backup)


# -- Lance


class LanceTable:
    """A table of either layout; its writers are closed between writes."""

    def __init__(self, made: LsmTable) -> None:
        self.made = made
        self.uri = made.uri

    def write(self) -> None:
        regions = len(self.made.regions)
        for at in range(regions):
            self.made.put([at, at + regions, 100 + at])
            self.made.delete([at + 2 * regions])
        self.made.close()

    def expected(self) -> Rows:
        return self.made.expected()

    def read(self) -> Rows:
        return read_spec(self.uri)

    def read_revision(self, revision: int) -> Rows:
        return read_base(self.uri, version=revision)

    def remove_entry(self) -> None:
        (region, *_) = self.made.regions
        remove_generation(self.uri, region, 1)

    def damage(self) -> None:
        for path in Path(self.uri, "_versions").glob("*.manifest"):
            path.write_bytes(b"no manifest")


def _lance(kind: type[LsmTable]) -> Callable[[str], TableUnderTest]:
    def make(uri: str) -> LanceTable:
        made = LanceTable(kind(5, regions=2, base_rows=20).create(uri))
        made.write()
        return made

    return make


_NOW = {
    "expire": ExpireOptions(older_than=timedelta(0), allow_unsafe=True),
    "gc": IMMEDIATE,
    "compact": CompactOptions(),
    "snapshot": SnapshotOptions(),
    "maintain": MaintainOptions(
        apply=True, expire=ExpireOptions(older_than=timedelta(0), allow_unsafe=True), gc=IMMEDIATE
    ),
}
SHARD = FormatUnderTest(
    "lance", "lance-shard", _lance(Workload), options=_NOW, most_steps=3, foreign=("--max-entries", "3")
)
REGION = FormatUnderTest(
    "lance", "lance-region", _lance(RegionLayout), options=_NOW, most_steps=3, foreign=("--max-entries", "3")
)


class LegacyLanceTable:
    """A table with the legacy MemWAL index; its writer is the document's, and it has no deletes."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._made = LegacyTable(uri, size=20).create()
        self._made.other("other", 0, "MERGED", wal="wal/other")
        Path(uri, "wal/other").mkdir(parents=True)
        Path(uri, "wal/other/0.arrow").write_bytes(b"the log of what was merged long ago")
        self._made.finish()
        self._stamp = 0

    def write(self) -> None:
        writer = MemWalWriter(self.uri, "r", f"owner-{self._stamp}")
        for _ in range(2):
            self._stamp += 1
            values = {number: float(self._stamp) for number in (0, 1, 100 + self._stamp)}
            writer.append(legacy_rows(values))
            self._made.model |= values
            writer.seal()
        writer.flush()

    def expected(self) -> Rows:
        return dict(self._made.model)

    def read(self) -> Rows:
        return read_legacy(self.uri)

    def read_revision(self, revision: int) -> Rows:
        return base_rows(self.uri, revision)

    def remove_entry(self) -> None:
        first = min(one["generation"] for one in details_of(self.uri) if one["state"] == "FLUSHED")
        for kind in ("mem", "wal"):
            shutil.rmtree(f"{self.uri}/{kind}/r/{first}", ignore_errors=True)

    def damage(self) -> None:
        for path in Path(self.uri, "_versions").glob("*.manifest"):
            path.write_bytes(b"no manifest")


def _legacy(uri: str) -> LegacyLanceTable:
    made = LegacyLanceTable(uri)
    made.write()
    return made


LEGACY = FormatUnderTest(
    "lance", "lance-legacy", _legacy, options=_NOW, most_steps=3, trims=True, foreign=("--max-entries", "3")
)


# -- the toy


class ToyTable:
    """A jsonlog table; the writer and the reader that a user of the format would have."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._store = open_store(resolve(uri))
        self._model: Rows = {str(number): number for number in range(10)}
        self._stamp = 0
        self._put("jsonlog.json", {"release": 1})
        self._put("base/0000000001.json", {"version": 1, "merged": 0, "rows": self._model})

    def write(self) -> None:
        for number in (0, 1, 100):
            self._stamp += 1
            entry = {str(number): self._stamp, str(number + 2): None}
            self._append(entry)
            self._model = {key: row for key, row in {**self._model, **entry}.items() if row is not None}

    def _append(self, entry: Rows) -> None:
        while True:
            _, base = self._base()
            number = max([base["merged"], *self._log()]) + 1
            # Stalled between the two, it may take a number that was merged and collected meanwhile.
            if self._put(f"log/{number:010}.json", entry) and self._base()[1]["merged"] < number:
                return

    def expected(self) -> Rows:
        return dict(self._model)

    def read(self) -> Rows:
        while True:
            revision, base = self._base()
            rows = dict(base["rows"])
            entries = [number for number in self._log() if number > base["merged"]]
            for number in entries:
                rows |= json.loads(Path(self.uri, f"log/{number:010}.json").read_bytes())
            if self._base()[0] == revision:
                assert entries == [*range(base["merged"] + 1, base["merged"] + 1 + len(entries))]
                return {key: row for key, row in rows.items() if row is not None}

    def read_revision(self, revision: int) -> Rows:
        rows = json.loads(Path(self.uri, f"base/{revision:010}.json").read_bytes())["rows"]
        assert isinstance(rows, dict)
        return rows

    def remove_entry(self) -> None:
        Path(self.uri, "log/0000000001.json").unlink()

    def damage(self) -> None:
        for path in Path(self.uri, "base").glob("*.json"):
            path.write_text("{")

    def _put(self, path: str, document: Rows) -> bool:
        return self._store.put_if_absent(path, json.dumps(document).encode())

    def _base(self) -> tuple[int, Rows]:
        newest = max(os.listdir(f"{self.uri}/base"))
        return int(newest[:10]), json.loads(Path(self.uri, "base", newest).read_bytes())

    def _log(self) -> list[int]:
        folder = Path(self.uri, "log")
        return sorted(int(name[:10]) for name in os.listdir(folder)) if folder.exists() else []


def _toy(uri: str) -> ToyTable:
    made = ToyTable(uri)
    made.write()
    return made


# -- Zeppelin


def _zeppelin(uri: str) -> NamespaceUnderTest:
    made = NamespaceUnderTest(uri)
    made.write()
    return made


# A killed run leaves its lease, which the next one waits for.
_COMPACTED = ZeppelinMergeOptions(lease_ttl=timedelta(seconds=1), wait=timedelta(seconds=5))
_COLLECTED = ZeppelinGcOptions(reader_grace=timedelta(0), orphan_min_age=timedelta(0), allow_unsafe=True)
ZEPPELIN = FormatUnderTest(
    "zeppelin",
    "zeppelin",
    _zeppelin,
    options={
        "merge": _COMPACTED,
        "gc": _COLLECTED,
        "maintain": ZeppelinMaintainOptions(apply=True, merge=_COMPACTED, gc=_COLLECTED),
    },
    waits=True,
    most_steps=12,
    foreign=("--max-entries", "3"),
)


TOY = FormatUnderTest("jsonlog", "toy", _toy)


# -- LM-DiskANN

_DIMENSION = 8


class IndexFolder:
    """An index of few rows; its reader is the decoder that was written from the format's page."""

    def __init__(self, uri: str) -> None:
        from memwal_ops.formats import lm_diskann
        from tests.support.lm_diskann.fixtures import compile_kernels

        compile_kernels()
        self.uri = uri
        self._model: Rows = {}
        self._stamp = 0
        lm_diskann.create(uri, dimension=_DIMENSION, R=8)

    def write(self) -> None:
        from memwal_ops.formats import lm_diskann

        with lm_diskann.open(self.uri, wait=_SOON.total_seconds()) as index:
            for number in (0, 1, 100):
                self._stamp += 1
                vector = [float(self._stamp)] * _DIMENSION
                index.insert([number, number + 2], [vector, vector])
                index.delete([number + 2])
                self._model[number] = tuple(vector)
                self._model.pop(number + 2, None)

    def expected(self) -> Rows:
        return dict(self._model)

    def read(self) -> Rows:
        from tests.support.lm_diskann.decoder import View

        return View(self.uri).live_rows()

    def read_revision(self, revision: int) -> Rows:
        from tests.support.lm_diskann.decoder import View

        return View(self.uri).live_rows(revision)

    def remove_entry(self) -> None:
        import duckdb

        with duckdb.connect(f"{self.uri}/diskann_store.duckdb") as store:
            store.execute(
                "DELETE FROM lmd_delta_blocks WHERE node_id = (SELECT max(node_id) - 1 FROM lmd_delta_blocks)"
            )

    def damage(self) -> None:
        Path(self.uri, "metadata.lmd").write_bytes(b"none")


def _index_folder(uri: str) -> IndexFolder:
    made = IndexFolder(uri)
    made.write()
    return made


class StoreSteps:
    """Durable steps of an index folder as calls of a store: one that does nothing before each, and one after it."""

    def __init__(self, table: Any, store: Any) -> None:
        self._step, self._store = table.step, store

    def __call__(self, name: str, act: Callable[[], Any]) -> Any:
        self._store.delete_many([])
        result = self._step(name, act)
        self._store.delete_many([])
        return result


_SOON = timedelta(milliseconds=200)


def _index_options() -> Mapping[str, Options]:
    from memwal_ops.formats.lm_diskann.specs import (
        IndexCatchupOptions,
        IndexCompactOptions,
        IndexGcOptions,
        IndexMaintainOptions,
        IndexMergeOptions,
    )

    merge, catchup, gc = (one(wait=_SOON) for one in (IndexMergeOptions, IndexCatchupOptions, IndexGcOptions))
    compact = IndexCompactOptions(wait=_SOON)
    maintain = IndexMaintainOptions(apply=True, merge=merge, catchup=catchup, compact=compact, gc=gc)
    return {"merge": merge, "catchup": catchup, "compact": compact, "gc": gc, "maintain": maintain}


INDEX = FormatUnderTest(
    "lm_diskann",
    "lm-diskann",
    _index_folder,
    options=_index_options(),
    waits=True,
    most_steps=6,
    with_store=lambda table, store: replace(table, store=store, steps=StoreSteps(table, store)),
    conditional=False,
    trims=True,
    foreign=("--max-entries", "3"),
)
_EXTRA = all(find_spec(name) is not None for name in ("duckdb", "numba"))
FORMATS = (SHARD, REGION, LEGACY, ZEPPELIN, TOY, *([INDEX] if _EXTRA else []))


def opened(made: TableUnderTest) -> Any:
    """The newest revision, as every front end opens it."""
    return open_table(made.uri)
