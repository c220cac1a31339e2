"""A random history of writes and maintenance on two tables: one that our jobs maintain, one with pylance's own calls.

Each step is the same for both: what users do (appends, upserts, updates, deletes, columns that come, go and get other
names, indexes that are made anew) and compactions by pylance happen to both in the same way. ``catchup`` and
``compact`` are our jobs on the one, ``optimize_indices()`` and ``compact_files()`` on the other. With a log, rows go
through it on the one table and by ``merge_insert`` on the other.

``python -m tests.campaigns.answers.history SEED STEPS [log]`` runs one and prints what was wrong in both.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from lance.indices import IndexConfig

from memwal_ops import run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.answers.check import ANSWERS
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from tests.support.tables.answering import DIMENSION, SCALARS, VECTORS, rows, vectors
from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY, STAMP = "number", "stamp"
CHECKED_EVERY = 25
FIRST_ROWS = 3_000
_REGION = "00000000-0000-4000-8000-000000000001"
_RENAMED = ("zone", "bloom", "gram")
_PQ = {"num_sub_vectors": 8}
_SIMILAR = IndexConfig("minhashlsh", {"num_hashes": 64, "num_bands": 8, "shingle_size": 2})
_JSON = IndexConfig("json", {"target_index_type": "btree", "path": "x"})
#: Of each scalar index the column, the type, and arguments.
CONDITIONS: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    **{name: (column, kind, {}) for name, (column, kind) in SCALARS.items()},
    "by_phrase": ("phrase", "INVERTED", {"with_position": True}),
    "by_similar": ("similar", _SIMILAR, {}),
    "by_place": ("place", "RTREE", {}),
    "by_inner": ("outer.inner", "BTREE", {}),
    "by_document": ("document", _JSON, {}),
}
#: Of each vector index the column, the type, and arguments.
NEAREST: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    **{f"by_{kind.lower()}": (f"v_{kind.lower()}", kind, _PQ if kind.endswith("PQ") else {}) for kind in VECTORS},
    "by_dot": ("v_dot", "IVF_PQ", {**_PQ, "metric": "dot"}),
    "by_dot_graph": ("v_dot_graph", "IVF_HNSW_PQ", {**_PQ, "metric": "dot"}),
    "by_cosine": ("v_cosine", "IVF_PQ", {**_PQ, "metric": "cosine"}),
}


@dataclass
class Wrong:
    """What was wrong in a table, summed over all checks.

    Attributes:
        queries: asked.
        answers: of these, wrong ones.
        findings: on answers, how many, by index and kind.
        rows: keys that were missing, there twice, or had other values than those that were written last.
        failed: calls that raised an error, by what they said.
    """

    queries: int = 0
    answers: int = 0
    rows: int = 0
    findings: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def add_failure(self, call: str, error: BaseException) -> None:
        """Count a call that failed."""
        reason = getattr(error, "reason", "") or str(error).split("\n")[0][:100]
        key = f"{call}: {type(error).__name__} {reason}"
        self.failed[key] = self.failed.get(key, 0) + 1

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.answers:,} wrong answers of {self.queries:,}, {self.rows:,} wrong rows, "
            f"findings {dict(sorted(self.findings.items()))}, failed calls {self.failed}"
        )


@dataclass
class History:
    """Two tables, and what must be in them.

    Attributes:
        folder: where they are.
        seed: of all that is random.
        log: whether the table of our jobs has a log.
    """

    folder: str
    seed: int
    log: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    ours: Wrong = field(default_factory=Wrong)
    theirs: Wrong = field(default_factory=Wrong)

    def __post_init__(self) -> None:
        """Make both tables, with an index of each type."""
        self._chance = random.Random(self.seed)
        self._random = np.random.default_rng(self.seed)
        self._centers = 3 * self._random.normal(size=(20, DIMENSION))
        self.uris = (f"{self.folder}/ours.lance", f"{self.folder}/theirs.lance")
        self._names = {one: one for one in _RENAMED}
        self._next, self._stamp, self._has_extra = 0, 0, False
        self._unmerged = False
        #: By key the number of the write that it is of.
        self.model: dict[int, int] = {}
        first = self._rows(FIRST_ROWS)
        self._stable = stable = self._chance.random() < 0.5
        # Deletions in a log are rows with NULL in all columns, and 2.0 has no structs that are NULL.
        version = self._chance.choice(["2.1", "2.2"] if self.log else ["2.0", "2.1", "2.2"])
        for uri in self.uris:
            dataset = lance.write_dataset(
                first, uri, max_rows_per_file=1_000, enable_stable_row_ids=stable, data_storage_version=version
            )
            for name in self._all_indexes():
                self._index(dataset, name)
        if self.log:
            lance.dataset(self.uris[0]).initialize_mem_wal()
        self.what = f"seed {self.seed}, {'with' if self.log else 'without'} a log, stable row ids {stable}, {version}"

    # What users do.

    def append(self) -> None:
        """New rows."""
        new = self._rows(self._chance.choice([1, 20, 100, 300]))
        self._each(lambda dataset: dataset.insert(self._named(new, dataset)))

    def upsert(self) -> None:
        """Rows of which some are there."""
        new = self._rows(self._chance.choice([5, 50, 150]), replaced=0.7)
        self._each(lambda dataset: self._merge_insert(dataset, new))

    def update(self) -> None:
        """Other values in some rows."""
        self._stamp += 1
        rest = self._chance.randrange(50)
        for key in [one for one in self.model if one % 50 == rest]:
            self.model[key] = self._stamp
        changes = {"kind": f"'changed{self._stamp % 9}'", STAMP: str(self._stamp), "real": "real + 1.0"}
        self._each(lambda dataset: dataset.update(changes, f"{KEY} % 50 = {rest}"))

    def delete(self) -> None:
        """Rows that are chosen by a remainder, or a whole range."""
        if self._chance.random() < 0.7:
            rest = self._chance.randrange(40)
            condition, gone = f"{KEY} % 40 = {rest}", [one for one in self.model if one % 40 == rest]
        else:
            low = self._chance.choice(sorted(self.model))
            condition = f"{KEY} >= {low} AND {KEY} < {low + 200}"
            gone = [one for one in self.model if low <= one < low + 200]
        if len(self.model) - len(gone) < FIRST_ROWS // 2:
            return
        for key in gone:
            del self.model[key]
        self._each(lambda dataset: dataset.delete(condition))

    def columns(self) -> None:
        """A column comes with its index, or goes; or an indexed one gets another name."""
        if self._chance.random() < 0.5:
            logical = self._chance.choice(_RENAMED)
            old = self._names[logical]
            new = logical if old != logical else f"{logical}_named"
            self._names[logical] = new
            self._each(lambda dataset: dataset.alter_columns({"path": old, "name": new}))
        elif self._has_extra:
            self._has_extra = False
            self._each(lambda dataset: dataset.drop_columns(["extra"]))
        else:
            self._has_extra = True
            kind = self._chance.choice(["BTREE", "BITMAP", "ZONEMAP"])

            def add(dataset: lance.LanceDataset) -> None:
                if self.log:  # pylance adds no computed column beside a log
                    dataset.add_columns(pa.field("extra", pa.int64()))
                    dataset.update({"extra": f"{KEY} % 100"})
                else:
                    dataset.add_columns({"extra": f"{KEY} % 100"})
                lance.dataset(dataset.uri).create_scalar_index("extra", kind, name="by_extra")

            self._each(add)

    def index_again(self) -> None:
        """An index is made anew."""
        name = self._chance.choice(self._all_indexes())
        self._each(lambda dataset: self._index(dataset, name))

    def pylance_compacts(self) -> None:
        """Both are compacted by pylance."""
        target = self._chance.choice([500, 2_000, 100_000])
        self._each(lambda dataset: dataset.optimize.compact_files(target_rows_per_fragment=target))

    # What maintains them.

    def catchup(self) -> None:
        """Indexes get the rows that they lack."""
        self._job("catchup", retrain="auto" if not self.log else "never")
        self._theirs("optimize_indices", lambda dataset: dataset.optimize.optimize_indices())

    def compact(self) -> None:
        """Small files become larger ones."""
        self._job("compact")
        self._theirs("compact_files", lambda dataset: dataset.optimize.compact_files())

    def log_rows(self) -> None:
        """Rows and deletions by the log, one or more generations; merged now or later."""
        new = self._rows(self._chance.choice([20, 100]), replaced=0.6)
        gone = self._chance.sample(sorted(self.model), 5)
        keys = pa.table({KEY: pa.array(gone, pa.int64())})
        with RegionWriter(self.uris[0], _REGION) as writer:
            writer.put(self._named(new, lance.dataset(self.uris[0])))
            writer.delete(keys)
            writer.flush()
        self._unmerged = True
        for key in gone:
            del self.model[key]

        def write(dataset: lance.LanceDataset) -> None:
            self._merge_insert(dataset, new)
            lance.dataset(dataset.uri).delete(f"{KEY} IN ({', '.join(map(str, gone))})")

        self._theirs("merge_insert", write)
        if self._chance.random() < 0.5:
            self.merge()

    def merge(self) -> None:
        """What is in the log gets into the table."""
        if self._unmerged:
            self._job("merge")
            self._unmerged = False

    def step(self) -> str:
        """One step, drawn by the seed."""
        chances = {
            self.append: 22, self.upsert: 12, self.update: 6, self.delete: 8, self.columns: 5, self.index_again: 2,
            self.pylance_compacts: 8, self.catchup: 18, self.compact: 8, **({self.log_rows: 20} if self.log else {}),
        }  # fmt: skip
        chosen = self._chance.choices([*chances], [*chances.values()])[0]
        name = chosen.__name__
        self.steps[name] = self.steps.get(name, 0) + 1
        if name != "log_rows":
            self.merge()
        chosen()
        return name

    def check(self) -> None:
        """Ask both tables, and compare their rows with the model."""
        self.merge()
        for uri, wrong in zip(self.uris, (self.ours, self.theirs), strict=True):
            report = run_job(uri, "verify", answers=True, seed=self._chance.randrange(1 << 30))
            wrong.queries += sum(one.queries for one in report.answers)
            wrong.answers += sum(one.wrong for one in report.answers)
            for one in report.findings.kept:
                if one.check not in ANSWERS | {"index_distances", "index_rows"}:
                    continue
                name = f"{one.about} {one.check}"
                wrong.findings[name] = wrong.findings.get(name, 0) + 1
            table = lance.dataset(uri).to_table(columns=[KEY, STAMP])
            found = dict(zip(table[KEY].to_pylist(), table[STAMP].to_pylist(), strict=True))
            wrong.rows += table.num_rows - len(found)
            wrong.rows += len(found.items() ^ self.model.items())

    def run(self, steps: int, report: Callable[[str], object]) -> None:
        """Go that many steps, checking now and then; after the last one the indexes are caught up and checked."""
        for number in range(1, steps + 1):
            self.step()
            if number == steps:
                self.merge()
                self.catchup()
            if number == steps or number % CHECKED_EVERY == 0:
                self.check()
                report(f"{number} steps, {len(self.model):,} rows\n  ours: {self.ours.describe()}")
                report(f"  pylance's own calls: {self.theirs.describe()}")
        report(f"{self.what}: {self.steps}")

    # How.

    def _rows(self, count: int, replaced: float = 0.0) -> pa.Table:
        """Rows with values that indexes find hard, and a vector for each vector index; they are in the model."""
        self._stamp += 1
        table = rows(self._random, self._next, count)
        keys = np.arange(self._next, self._next + count)
        self._next += count
        if replaced:
            there = self._chance.sample(sorted(self.model), int(count * replaced))
            keys[: len(there)] = there
        self.model |= dict.fromkeys(keys.tolist(), self._stamp)
        made = {name: table[name].combine_chunks() for name in table.column_names} | {
            KEY: pa.array(keys, pa.int64()),
            STAMP: pa.array([self._stamp] * count, pa.int64()),
        }
        x, y = (pa.array(100 * self._random.random(count)) for _ in range(2))
        made |= {
            "similar": table["gram"].combine_chunks(),
            "place": pa.StructArray.from_arrays([x, y], ["x", "y"]),
            "outer": pa.StructArray.from_arrays([pa.array(self._random.integers(0, 999, count))], ["inner"]),
            "document": pa.array([f'{{"x": {one % 50}}}' for one in keys.tolist()], pa.json_()),
        }
        made |= {column: vectors(self._random, count, centers=self._centers) for column, _, _ in NEAREST.values()}
        special = {
            KEY: pa.field(KEY, pa.int64(), nullable=False, metadata=PRIMARY_KEY if self.log else None),
            "place": pa.field("place", made["place"].type, metadata={"ARROW:extension:name": "geoarrow.point"}),
        }
        fields = [special.get(name, pa.field(name, value.type)) for name, value in made.items()]
        return pa.table([*made.values()], schema=pa.schema(fields))

    def _named(self, table: pa.Table, dataset: lance.LanceDataset) -> pa.Table:
        """The rows with the columns that the table has today."""
        if self._has_extra:
            extra = pa.array([one % 100 for one in table[KEY].to_pylist()], pa.int64())
            table = table.append_column("extra", extra)
        named = table.rename_columns([self._names.get(one, one) for one in table.column_names])
        return named.select(dataset.schema.names)

    def _merge_insert(self, dataset: lance.LanceDataset, new: pa.Table) -> None:
        merge = dataset.merge_insert(KEY).when_matched_update_all().when_not_matched_insert_all()
        merge.execute(self._named(new, dataset))

    def _all_indexes(self) -> list[str]:
        names = [*CONDITIONS, *NEAREST]
        return [one for one in names if not (self._stable and one == "by_document")]  # pylance makes none with those

    def _index(self, dataset: lance.LanceDataset, name: str) -> None:
        if name in NEAREST:
            column, kind, arguments = NEAREST[name]
            dataset.create_index(column, kind, name=name, num_partitions=8, replace=True, **arguments)
            return
        column, kind, arguments = CONDITIONS[name]
        dataset.create_scalar_index(self._names.get(column, column), kind, name=name, replace=True, **arguments)

    def _each(self, do: Callable[[lance.LanceDataset], Any]) -> None:
        """The same call of pylance on both."""
        do(lance.dataset(self.uris[0]))
        self._theirs("write", do)

    def _theirs(self, call: str, do: Callable[[lance.LanceDataset], Any]) -> None:
        try:
            do(lance.dataset(self.uris[1]))
        except Exception as error:
            self.theirs.add_failure(call, error)

    def _job(self, name: str, **options: Any) -> None:
        try:
            report = run_job(self.uris[0], name, **options)
        except MemwalOpsError as error:
            self.ours.add_failure(name, error)
            return
        for one in getattr(report, "indexes", ()):
            if one.error is not None:
                self.ours.add_failure(f"{name} {one.name}", one.error)
        if report.exit_code and name != "catchup":
            self.ours.add_failure(name, AssertionError(f"ended with {report.exit_code}, {report.decision}"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        history = History(folder, int(sys.argv[1]), log="log" in sys.argv[3:])
        history.run(int(sys.argv[2]), partial(print, flush=True))
