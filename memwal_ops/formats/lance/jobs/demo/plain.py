"""The demo ``memwal-ops demo --layout none``: a table as LanceDB leaves it after months, and what maintenance changes.

The table is written by pylance, as ``lancedb`` writes it: by appends, updates, deletes and upserts, one small version
each, after its indexes were built. The commands run as processes of their own; while the first of them works, a writer
goes on. Nothing is printed that was not measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from memwal_ops.core.demo import DemoRun, indented, prove
from memwal_ops.text import counted, grid, size_text

_DOCUMENTS, _DIMENSION, _DAYS = 20_000, 64, 90
_APPENDS_A_DAY, _APPENDED, _CHANGED = 3, 40, 100
# As of embeddings: 64 numbers that vary around some topics in few directions.
_TOPICS, _DIRECTIONS = 64, 8
_NEAREST, _QUESTIONS, _REPEATED = 10, 20, 3
_PAUSE = 0.2
# On a loaded machine, more would leave more small files than there were before.
_MOST_PAIRS = 8
_WEEK = timedelta(days=8)


def demo(run: DemoRun) -> Iterator[str]:
    """Make a table that was never maintained, and maintain it beside a writer, unless ``run.merge`` is false.

    Yields: the output, step by step.

    Raises:
        InvalidUsageError: the folder has such a table already, or cannot be created.
        InvariantViolatedError: a row was lost, or changed.
    """
    made = _Documents(run.new_table("documents.lance"))
    made.write_months()
    _make_older(made.uri, timedelta(days=_DAYS), spread=True)
    work = ", ".join(f"{count:,} {kind}" for kind, count in made.commits.items())
    yield f"""1. A TABLE AS LANCEDB LEAVES IT   {made.uri}

   {_DOCUMENTS:,} documents were imported, and indexed by id (BTREE) and by vector (IVF_PQ). Then came
   {_DAYS} days of work: {work}. Nothing was maintained.
   It was made just now, in {made.seconds:.0f} s, by pylance, the library below lancedb. Only the times of its files
   are set back, so that they are up to {_DAYS} days old.
"""
    yield f"2. WHAT IT NEEDS   memwal-ops scan --database {run.folder}\n"
    yield indented(_command("scan", "--database", str(run.folder)))
    prove(made.is_in(lance.dataset(made.uri)), "The table does not have the rows that were written.")
    if not run.merge:
        yield _your_turn(3, made.uri, run)
        return

    reader = lance.dataset(made.uri)
    rows_of_reader, before = made.rows(), measure(made)
    yield f"\n3. MAINTENANCE, BESIDE A WRITER   memwal-ops maintain {made.uri} --apply\n"
    report, commits = _beside_a_writer(made, "maintain", made.uri, "--apply")
    yield indented(report)
    prove(made.is_in(lance.dataset(made.uri)), "A row was lost or changed.")
    prove(_sorted(reader) == rows_of_reader, "A reader that had the table open sees other rows than before.")
    at_once = measure(made)

    _make_older(made.uri, _WEEK)
    yield f"\n4. A WEEK LATER   The times of the files are set back again. memwal-ops maintain {made.uri} --apply\n"
    yield indented(_command("maintain", made.uri, "--apply"))
    prove(made.is_in(lance.dataset(made.uri)), "A row was lost or changed.")
    later = measure(made)
    yield f"\n5. BEFORE AND AFTER\n\n{indented(_comparison(before, at_once, later))}"
    yield f"""
   Each query opens the table anew, as a new process does: reads of files (on S3 each is a request), bytes, and
   processor time (the least of {_REPEATED} runs). After the first maintenance the table is larger: the versions of the last
   7 days are kept, so that readers can finish. The fragments left are large, or what the writer added
   meanwhile: few small ones wait for others of their size, so that the large ones are not written again for them.

6. THE PROOF

   ok  {counted(len(made.expected), "document")}, each with its last text and vector: all were compared, before and after each step
   ok  {counted(commits, "commit")} of a writer during the maintenance: none failed, all are there
   ok  a reader that had opened version {reader.version} before read the same rows afterwards"""
    yield _your_turn(7, made.uri, run)


@dataclass
class _Documents:
    """The table and the rows that it must have. ``expected``: by id the text and the number of the vector."""

    uri: str
    expected: dict[int, tuple[str, int]] = field(default_factory=dict)
    commits: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(7)
        self._topics = self._random.normal(size=(_TOPICS, _DIMENSION))
        self._directions = self._random.normal(size=(_DIRECTIONS, _DIMENSION))
        self._vectors = np.empty((0, _DIMENSION), np.float32)

    def write_months(self) -> None:
        """Documents with a BTREE and a vector index, and three months of daily work, which no index covers."""
        started = time.monotonic()
        dataset = lance.write_dataset(self._new(range(_DOCUMENTS), "as imported"), self.uri)
        dataset.create_scalar_index("id", "BTREE")
        dataset.create_index("vector", "IVF_PQ", num_partitions=16, num_sub_vectors=16)
        for day in range(_DAYS):
            for _ in range(_APPENDS_A_DAY):
                self.append(_APPENDED, f"written on day {day}")
            (self.update, self.delete, self.upsert)[day % 3](f"changed on day {day}")
        self.seconds = time.monotonic() - started

    def append(self, count: int, text: str) -> Sequence[int]:
        """Append new documents; return their ids."""
        first = max(self.expected) + 1
        ids = range(first, first + count)
        lance.write_dataset(self._new(ids, text), self.uri, mode="append")
        self.commits["appends"] += 1
        return ids

    def update(self, text: str, chosen: Sequence[int] = ()) -> None:
        """Give some documents another text."""
        chosen = chosen or self._choose()
        lance.dataset(self.uri).update({"text": f"'{text}'"}, where=f"id IN ({', '.join(map(str, chosen))})")
        self.expected |= {key: (text, self.expected[key][1]) for key in chosen}
        self.commits["updates"] += 1

    def delete(self, text: str) -> None:
        """Delete some documents."""
        del text
        chosen = self._choose()
        lance.dataset(self.uri).delete(f"id IN ({', '.join(map(str, chosen))})")
        for key in chosen:
            del self.expected[key]
        self.commits["deletes"] += 1

    def upsert(self, text: str) -> None:
        """Replace some documents, and add as many."""
        first = max(self.expected) + 1
        rows = self._new([*self._choose(), *range(first, first + _CHANGED)], text)
        merge = lance.dataset(self.uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(rows)
        self.commits["upserts"] += 1

    def rows(self) -> pa.Table:
        """The rows that the table must have, by id."""
        ids = sorted(self.expected)
        texts, numbers = zip(*(self.expected[key] for key in ids), strict=True)
        return self._table(ids, texts, numbers)

    def is_in(self, dataset: lance.LanceDataset) -> bool:
        """Whether the table has these rows, value by value, and no others."""
        return bool(_sorted(dataset) == self.rows())

    def questions(self) -> np.ndarray[Any, Any]:
        """Vectors to search for: near those of documents of all ages."""
        return self._vectors[:: len(self._vectors) // _QUESTIONS][:_QUESTIONS] + np.float32(0.01)

    def _new(self, ids: Sequence[int], text: str) -> pa.Table:
        first = len(self._vectors)
        topics = self._topics[self._random.integers(0, _TOPICS, len(ids))]
        moved = self._random.normal(scale=0.3, size=(len(ids), _DIRECTIONS)) @ self._directions
        self._vectors = np.concatenate([self._vectors, (topics + moved).astype(np.float32)])
        self.expected |= {key: (text, first + at) for at, key in enumerate(ids)}
        return self._table(ids, [text] * len(ids), range(first, first + len(ids)))

    def _table(self, ids: Sequence[int], texts: Sequence[str], numbers: Sequence[int]) -> pa.Table:
        vectors = pa.array(self._vectors[np.asarray(numbers)].reshape(-1))
        columns = [pa.array(ids, pa.int64()), pa.array(texts), pa.FixedSizeListArray.from_arrays(vectors, _DIMENSION)]
        return pa.Table.from_arrays(columns, ["id", "text", "vector"])

    def _choose(self) -> list[int]:
        first = int(self._random.integers(0, max(self.expected)))
        return [key for key in range(first, first + _CHANGED) if key in self.expected] or self._choose()


@dataclass(frozen=True)
class QueryCost:
    """What a query takes, with the opening of the table. ``seconds`` are of the processor."""

    requests: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A state of the table: what it consists of, and what queries take."""

    fragments: int
    versions: int
    files: int
    size: int
    by_id: QueryCost
    nearest: QueryCost
    scan: QueryCost
    recall: float


def measure(made: _Documents) -> Measured:
    """Count the table's parts and files, and time three queries, each on a table that was just opened."""
    dataset = lance.dataset(made.uri)
    files = [path.stat().st_size for path in Path(made.uri).rglob("*") if path.is_file()]
    newest = max(made.expected)
    return Measured(
        len(dataset.get_fragments()),
        len(dataset.versions()),
        len(files),
        sum(files),
        by_id=_time(made.uri, lambda table: table.to_table(filter=f"id = {newest}")),
        nearest=_time(made.uri, lambda table: _search(table, made.questions()[0])),
        scan=_time(made.uri, lambda table: table.to_table(columns=["id"], filter="text LIKE '%day 89'")),
        recall=_recall(made),
    )


def _time(uri: str, ask: Callable[[lance.LanceDataset], pa.Table]) -> QueryCost:
    queries = []
    for _ in range(_REPEATED):
        started, table = time.process_time(), lance.dataset(uri)
        ask(table)
        spent, read = time.process_time() - started, table.io_stats_snapshot()
        queries.append(QueryCost(read.read_iops, read.read_bytes, spent))
    return min(queries, key=lambda query: query.seconds)


def _search(table: lance.LanceDataset, vector: np.ndarray[Any, Any]) -> pa.Table:
    asked = {"column": "vector", "q": vector, "k": _NEAREST, "nprobes": 8, "refine_factor": 10}
    return table.to_table(columns=["id", "_distance"], nearest=asked)


def _recall(made: _Documents) -> float:
    """The share of the true nearest documents among those that are found, over all questions."""
    rows, table = made.rows(), lance.dataset(made.uri)
    vectors = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, _DIMENSION)
    ids, hits = rows["id"].to_numpy(), 0
    for question in made.questions():
        true = ids[np.argsort(((vectors - question) ** 2).sum(axis=1))[:_NEAREST]]
        hits += len(set(true) & set(_search(table, question)["id"].to_pylist()))
    return hits / (_NEAREST * _QUESTIONS)


def _beside_a_writer(made: _Documents, *arguments: str) -> tuple[str, int]:
    """Run a command while documents are appended and changed; return its output and how many commits that were."""
    before, ended = made.commits.total(), threading.Event()

    def write() -> None:
        for _ in range(_MOST_PAIRS):
            if ended.wait(_PAUSE):
                return
            made.update("changed during the maintenance", made.append(_APPENDED, "written during the maintenance"))

    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(write)
        try:
            output = _command(*arguments)
        finally:
            ended.set()
        writer.result()
    return output, made.commits.total() - before


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "memwal_ops", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    prove(done.returncode == 0, f"{' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr}")
    return done.stdout.rstrip()


def _make_older(uri: str, age: timedelta, *, spread: bool = False) -> None:
    """Set the times of all files back; ``spread``: the first by all of it, the last not at all."""
    files = sorted((path.stat().st_mtime, str(path)) for path in Path(uri).rglob("*") if path.is_file())
    for at, (written, path) in enumerate(files):
        share = 1 - (at + 1) / len(files) if spread else 1.0
        then = written - age.total_seconds() * share
        os.utime(path, (then, then))


def _sorted(dataset: lance.LanceDataset) -> pa.Table:
    return dataset.to_table().sort_by("id").combine_chunks()


def _comparison(*states: Measured) -> str:
    rows: list[tuple[str, ...]] = [
        ("fragments", *(f"{state.fragments:,}" for state in states)),
        ("versions", *(f"{state.versions:,}" for state in states)),
        ("files", *(f"{state.files:,}" for state in states)),
        ("size", *(size_text(state.size) for state in states)),
        *_query_rows("one document by its id", [state.by_id for state in states]),
        *_query_rows("a filter without an index", [state.scan for state in states]),
        *_query_rows("the 10 nearest of a vector", [state.nearest for state in states]),
        ("  share of the true 10", *(f"{state.recall:.3f}" for state in states)),
    ]
    return grid(("", "before", "after", "a week later"), rows, words=("",))


def _query_rows(what: str, states: Sequence[QueryCost]) -> Iterator[tuple[str, ...]]:
    yield f"{what}: reads", *(f"{state.requests:,}" for state in states)
    yield "  bytes read", *(size_text(state.bytes) for state in states)
    yield "  processor time", *(f"{state.seconds * 1000:.1f} ms" for state in states)


def _your_turn(number: int, uri: str, run: DemoRun) -> str:
    command = run.command
    return f"""
{number}. YOUR TURN   The table stays until you remove it:   rm -r {run.to_remove(uri)}

   {command} maintain {uri} --dry-run   what is due on this table, time and space
   {command} scan --database DIR       what your own tables need, and a configuration; changes nothing
   {command} maintain URI --dry-run    what maintenance of one of them would do, time and space
   {command} maintain URI --apply      do it, beside its writers
   {command} run --config FILE         maintain all of them, as a service"""
