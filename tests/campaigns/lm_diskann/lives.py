"""Random lives of an index: changes and merges that are killed before a durable step, and machines that crash.

A crash of the machine loses what was written and not synced: each file goes back to its content at its last fsync.
DuckDB syncs its own commits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import open_table, run_job
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.jobs import compact
from memwal_ops.formats.lm_diskann.library import DELTA, Index
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import Killed, check_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

DIMENSION, ROWS = 8, 1100
Content = dict[int, tuple[float, ...]]


class Disk:
    """What of the files that are written in place would survive a crash of the machine."""

    def __init__(self, folder: str, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._synced = Path(folder), dict[Path, bytes]()
        really = os.fsync

        def fsync(file: int) -> None:
            really(file)
            path = Path(os.readlink(f"/proc/self/fd/{file}"))
            if path.is_relative_to(self._folder) and path.is_file() and path.suffix in {".lmd", ".log"}:
                self._synced[path] = path.read_bytes()

        patch.setattr(os, "fsync", fsync)
        self._synced = {path: path.read_bytes() for path in self._in_place()}

    def _in_place(self) -> Iterator[Path]:
        yield self._folder / "graph.lmd"
        yield from (self._folder / "view").glob("*.log")

    def crash(self) -> None:
        for path in self._in_place():
            path.write_bytes(self._synced.get(path, b""))


@dataclass
class Life:
    """One index, its model, and a reader that opened it some time ago."""

    folder: str
    random: np.random.Generator
    disk: Disk
    content: Content
    delta_bytes: int = DELTA
    left: int = -1
    kills: int = 0

    def step(self, name: str, act: Callable[[], Any]) -> Any:
        """Carry out a durable step, or be killed before it."""
        del name
        if self.left == 0:
            raise Killed
        self.left -= 1
        return act()

    def once(self) -> None:
        """One operation, perhaps killed; then everything is looked at."""
        before, after = self.content, dict(self.content)
        self.left = int(self.random.integers(0, 12)) if self.random.random() < 0.6 else -1
        crash = bool(self.random.random() < 0.4)
        done = False
        try:
            if self.random.random() < 0.3:
                self._maintain()
            else:
                with Index(self.folder, step=self.step, delta_bytes=self.delta_bytes) as index:
                    self._change(index, after)
            done = True
        except Killed:
            self.kills += 1
        if not done and crash:
            self.disk.crash()
        self.left = -1
        seen = None if not done and crash else View(self.folder).live_rows()
        with lm_diskann.open(self.folder):
            pass  # recovers
        found = View(self.folder).live_rows()
        assert found == after if done else found in (before, after), "an operation is there as a whole, or not at all"
        assert seen is None or done or seen in (before, found), "what a reader saw is not taken back"
        check_sound(self.folder)
        self.content = found

    def _maintain(self) -> None:
        job = ("catchup", "compact", "compact", "gc")[self.random.integers(4)]
        options: dict[str, Any] = {"catchup": {"batch": 20}, "compact": {"max_bytes": 1 << 20}}.get(job, {})
        table: Any = replace(open_table(self.folder), steps=self.step)  # type: ignore[type-var]
        run_job(table, job, apply=True, **options)

    def _change(self, index: Index, after: Content) -> None:
        if self.random.random() < 0.4:
            index.merge(max_bytes=1 << 16)
            return
        rows = np.unique(self.random.integers(0, 2 * ROWS, self.random.integers(1, 25)))
        if self.random.random() < 0.3:
            for row in rows.tolist():
                after.pop(row, None)
            index.delete(rows)
            return
        vectors = self.random.normal(size=(len(rows), DIMENSION)).astype(np.float32)
        after.update(zip(rows.tolist(), map(tuple, vectors.tolist()), strict=True))
        index.insert(rows, vectors)


def prepare(folder: str) -> Content:
    """An index with a graph that has free slots, whose lives may begin."""
    vectors = np.random.default_rng(5).normal(size=(ROWS, DIMENSION)).astype(np.float32)
    lm_diskann.create(folder, dimension=DIMENSION, R=8, L=40)
    gone = np.arange(0, ROWS, 11)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(ROWS), vectors)
        index.delete(gone)
    for job in ("catchup", "merge", "gc"):
        run_job(open_table(folder), job, apply=True)
    return {row: tuple(vectors[row].tolist()) for row in np.setdiff1d(np.arange(ROWS), gone).tolist()}


def live(folder: str, content: Content, seed: int, patch: pytest.MonkeyPatch, operations: int = 12) -> Life:
    """One life, of which the number of kills counts. AssertionError, or an error of the index: something is wrong.

    A registered reader stays on the epoch at which it began, and must read it until the next one comes.
    """
    patch.setattr(compact, "MIN_FREE_SHARE", 0)
    # Every fourth one writes nearly all commits straight into the graph, so that no merge is needed.
    direct = 1 << 16 if seed % 4 == 3 else DELTA
    life = Life(folder, np.random.default_rng(seed), Disk(folder, patch), content, direct)
    for _ in range(operations // 4):
        with lm_diskann.open(folder, read_only=True, cache_bytes=0) as reader:
            begun, rows = reader.epoch, dict(life.content)
            for _ in range(4):
                life.once()
            some = life.random.choice(sorted(rows), 60, replace=False)
            queries = np.array([rows[row] for row in some.tolist()], np.float32)
            found, distances = reader.search(queries, k=1, L=200, as_of=begun)
            # A graph of 8 links need not lead to each row; but each answer is one of that epoch.
            assert (found[:, 0] == some).mean() >= 0.9
            assert all(row in rows for row in found[:, 0].tolist())
            near = np.array([rows[row] for row in found[:, 0].tolist()], np.float32)
            assert np.allclose(distances[:, 0], ((near - queries) ** 2).sum(1), atol=1e-3)
    return life
