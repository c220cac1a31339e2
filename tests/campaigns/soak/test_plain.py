"""A soak of a plain table: other processes append, upsert, update and delete in loops; jobs run beside, and are killed.

Every writer tells what it committed. At the end each row is there once, with its last value, every index finds what a
scan finds, and every version that a tag names or that is listed reads as it did.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import CommitConflictError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, ExpireOptions
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from multiprocessing.synchronize import Event
    from pathlib import Path

_SECONDS = float(os.environ.get("SOAK_SECONDS", "12"))
# In-flight commits never span that many versions here, so that no writer's version is expired.
_KEPT = 400
# How pylance says that it repeated its commit for long enough, and published nothing.
# or, where it was stopped for so long that the version that it began with was expired meanwhile, that it is gone.
_GAVE_UP = ("concurrent", "Failed to commit the transaction after", "not found")
_OPTIONS: dict[str, Any] = {
    "catchup": CatchupOptions(),
    "compact": CompactOptions(target_rows=2000),
    "expire": ExpireOptions(older_than=timedelta(0), keep=_KEPT, allow_unsafe=True),
}


def write(kind: str, uri: str, stop: Event, told: Any) -> None:
    """Commit in a loop; each writer has its own rows."""
    made = PlainTable(uri)
    first = {"append": 10_000, "upsert": 50_000, "update": 0, "delete": 300}[kind]
    for number in range(first, first + (300 if kind == "delete" else 10**9)):
        while not stop.is_set():
            time.sleep(0.05)
            try:
                write_one(made, kind, first, number)
                break
            except OSError as error:
                if not any(words in str(error) for words in _GAVE_UP):
                    raise
        if stop.is_set():
            break
    told.put(made.model)


def write_one(made: PlainTable, kind: str, first: int, number: int) -> None:
    """Commit one change."""
    if kind == "append":
        lance.write_dataset(made.batch([number]), made.uri, mode="append")
        made.model[number] = made.text(number)
    elif kind == "upsert":
        made.upsert(first + number % 50, number % 100, text=f"up {number}")
    elif kind == "update":
        made.update(100 + number % 200, text=f"set {number}")
    else:
        made.dataset.delete(f"id = {number}")
        made.model[number] = ""


def maintain(job: str, uri: str, stop: Event, told: Any) -> None:
    """Run a job in a loop; the decisions, how often each."""
    decisions: dict[str, int] = {}
    while not decisions or not stop.is_set():
        try:
            word = str(run_job(uri, job, _OPTIONS[job], apply=True).decision)
        except CommitConflictError:
            word = "conflict"
        decisions[word] = decisions.get(word, 0) + 1
    told.put(decisions)


def read(uri: str, stop: Event, told: Any) -> None:
    """Read the tagged version again and again: how often."""
    made, times = PlainTable(uri), 0
    expected = made.read("begin")
    while not times or not stop.is_set():
        assert made.read("begin") == expected
        times += 1
    told.put(times)


class _Actor:
    """A process that is started again after it was killed."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stop, self._told = self._context.Event(), self._context.Queue()
        self._target, self._arguments = target, arguments
        self._process = self._start()

    def _start(self) -> SpawnProcess:
        process = self._context.Process(target=self._target, args=(*self._arguments, self._stop, self._told))
        process.start()
        return process

    def kill(self) -> None:
        """SIGKILL, and start it again."""
        self._process.kill()
        self._process.join()
        self._process = self._start()

    def stop(self) -> None:
        """Ask it to end."""
        self._stop.set()

    def told(self) -> Any:
        """What it told at its end."""
        told = self._told.get(timeout=1800)
        self._process.join(600)
        assert self._process.exitcode == 0
        return told


@pytest.mark.timeout(3600)
def test_jobs_beside_writers_in_loops(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=3, rows=200).create_indexes()
    made.dataset.tags.create("begin", made.dataset.version)
    begin = made.read("begin")
    writers = [_Actor(write, kind, made.uri) for kind in ("append", "upsert", "update", "delete")]
    jobs = {job: _Actor(maintain, job, made.uri) for job in _OPTIONS}
    reader = _Actor(read, made.uri)
    chance = random.Random(int(os.environ.get("CAMPAIGN_SEED", "0")))
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        time.sleep(chance.uniform(2, 6))
        jobs[chance.choice([*jobs])].kill()
    time.sleep(_SECONDS)  # now each of them comes to an end at least once
    for actor in (*jobs.values(), *writers, reader):
        actor.stop()
    decisions = {job: actor.told() for job, actor in jobs.items()}
    for actor in writers:
        made.model |= actor.told()
    assert reader.told()
    made.model = {number: text for number, text in made.model.items() if text}
    assert made.read() == made.model
    assert made.read("begin") == begin
    for job, options in _OPTIONS.items():
        assert run_job(made.uri, job, options, apply=True).exit_code == 0, decisions
    table = open_table(made.uri)
    assert coverage(base_indexes(table)["id_btree"].covered, table.manifest).uncovered_rows == 0
    for version in made.dataset.versions():
        lance.dataset(made.uri, version=version["version"]).to_table(columns=["id"])
    for number in [*chance.sample(sorted(made.model), 50), 300, 301]:
        found = made.dataset.to_table(filter=f"id = {number}", columns=["text"])["text"].to_pylist()
        assert found == [text for text in [made.model.get(number)] if text is not None]
    report = run_job(made.uri, "verify", deep=True)
    assert report.decision == "healthy", report.describe()
    assert all(decisions.values()), decisions
