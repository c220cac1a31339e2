"""A fenced writer that wakes after gc, on real tables: the specification's writer, and pylance's in every order."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.formats.lance.layouts import REGION as REGION_LAYOUT
from tests.campaigns.crash.fencing import PATIENT, but_first_entries, collect, region_table
from tests.integration.contracts.small import make, rows, writer
from tests.support.gc_options import IMMEDIATE
from tests.support.spec_writer import MemoryRegion, SpecWriter, TableRegion


def readable(region: TableRegion) -> set[int]:
    """The rows of the table: what is merged, what is flushed, what a writer would replay."""
    rows = {key for (key,) in region.made.read_spec()}
    return rows | region.replayed()


def perform(region: TableRegion, writers: list[SpecWriter], step: str, row: int) -> None:
    """One step of a history, as `Search` writes them down."""
    who, _, what = step.partition(" ")
    if who == "gc":
        collect(region.made.uri)
    elif what == "put":
        one = writers[int(who)]
        one.put(row if one.row is None else one.row)
    else:
        getattr(writers[int(who)], what)()


LOSSES = {
    # Epoch 2 looks for the end of the log when what it would have found was flushed and collected.
    "late look": "0 claim, 0 look, 0 put, 0 put, 1 claim, 2 claim, 2 look, 2 put, 2 flush, 2 put, gc, 1 look, 1 put",
    # Epoch 1 looks only when epoch 2 wrote already, and its next position is not the first entry of epoch 2.
    "behind a newer one": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 1 put, 1 put, 1 flush, 1 put, gc, 0 put"
    ),
    # Epoch 1 writes between entries of epoch 2, where a bisection does not look.
    "between": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 0 put, 1 put, 1 check, 1 put, 1 flush, 1 put, gc, 0 put"
    ),
    # Epoch 2 goes on behind what the late epoch 1 wrote, which has the next position too.
    "hopping": (
        "0 claim, 1 claim, 1 look, 1 put, 0 look, 0 put, 1 put, 1 check, 2 claim, 2 look, 0 put, 2 put, 2 check, "
        "2 put, 2 flush, 2 put, gc, 1 put"
    ),
}  # fmt: skip


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_simpler_rules_on_a_real_table(tmp_path: Path, name: str) -> None:
    """Each of these lost an acknowledged row where only the first entry of each epoch was kept."""
    region = region_table(tmp_path)
    writers = [SpecWriter(region) for _ in range(3)]
    for row, step in enumerate(LOSSES[name].split(", "), 100):
        perform(region, writers, step, row)
        acknowledged = {row for one in writers for row in one.acknowledged}
        assert acknowledged <= readable(region), step
    memory = MemoryRegion()
    simple = [SpecWriter(memory) for _ in range(3)]
    for row, step in enumerate(LOSSES[name].split(", "), 100):
        if step == "gc":
            for position in but_first_entries(memory, REGION_LAYOUT):
                del memory.log[position]
        else:
            perform(memory, simple, step, row)  # type: ignore[arg-type]
    assert not {row for one in simple for row in one.acknowledged} <= memory.readable()


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_on_a_real_table(tmp_path: Path, seed: int) -> None:
    """Up to five writers, any of which may stall at any step; the collector is the product's own."""
    rng = random.Random(seed)
    done = {"gc": 0, "fenced": 0}
    for number in range(12):
        region = region_table(tmp_path / str(number))
        writers: list[SpecWriter] = []
        path: list[str] = []
        for row in range(100, 100 + rng.randint(15, 40)):
            if not writers or (len(writers) < 5 and rng.random() < 0.12):
                writers.append(SpecWriter(region))
            moves = [f"{at} {step}" for at, one in enumerate(writers) for step in one.steps()]
            step = "gc" if not moves or rng.random() < 0.12 else rng.choice(moves)
            path.append(step)
            if step == "gc":
                if region.newest().version:
                    before = set(region.positions())
                    collect(region.made.uri, rng.choice([PATIENT, IMMEDIATE]))
                    done["gc"] += set(region.positions()) < before
                continue
            perform(region, writers, step, row)
        done["fenced"] += sum(one.doing == "fenced" for one in writers)
        acknowledged = {row for one in writers for row in one.acknowledged}
        assert acknowledged <= readable(region), (seed, number, path)
    assert min(done.values()) > 5, done


# -- pylance's real writers


class Histories:
    """All histories of some steps: claim (the next writer opens), put, close, gc."""

    def __init__(self, writers: int, steps: int) -> None:
        self.writers, self.steps = writers, steps

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return self._from((), 0, frozenset())

    def _from(self, path: tuple[str, ...], claimed: int, standing: frozenset[int]) -> Iterator[tuple[str, ...]]:
        if len(path) == self.steps:
            if "gc" in path and standing:
                yield path
            return
        if path[-1:] != ("gc",):
            yield from self._from((*path, "gc"), claimed, standing)
        if claimed < self.writers:
            yield from self._from((*path, "claim"), claimed + 1, standing | {claimed})
        for one in standing:
            yield from self._from((*path, f"put {one}"), claimed, standing)
            if one == claimed - 1:  # a fenced writer flushes nothing when it closes
                yield from self._from((*path, f"close {one}"), claimed, standing - {one})


def lived(template: str, folder: Path, history: tuple[str, ...]) -> tuple[int, int]:
    """One history on a copy of a table; how many late puts were refused, and how many accepted.

    In the end all writers wake, the oldest first, then all close, and the next reader must find every row
    that was acknowledged.
    """
    uri = str(folder / "t.lance")
    shutil.copytree(template, uri)
    writers: dict[int, Any] = {}
    acknowledged: set[int] = set()
    row = 1000
    outcome = [0, 0]

    def put(number: int) -> None:
        nonlocal row
        row += 1
        try:
            writers[number].put(rows(row, row + 1))
        except (OSError, RuntimeError) as error:
            assert "fenced" in str(error), error
            outcome[0] += 1
        else:
            acknowledged.add(row)
            outcome[1] += 1

    for step in history:
        what, _, number = step.partition(" ")
        if what == "gc":
            collect(uri, IMMEDIATE)
        elif what == "claim":
            writers[max(writers, default=-1) + 1] = writer(uri)
        elif what == "put":
            put(int(number))
        else:
            writers[int(number)].close()
            writers[int(number)] = None
    for number in sorted(number for number, one in writers.items() if one is not None):
        put(number)
    for number in sorted((number for number, one in writers.items() if one is not None), reverse=True):
        with contextlib.suppress(OSError, RuntimeError):
            writers[number].close()
    with writer(uri) as after:
        there = set(after.lsm_scanner().to_table()["id"].to_pylist())
    assert acknowledged <= there, (history, sorted(acknowledged - there))
    shutil.rmtree(folder)
    return outcome[0], outcome[1]


@pytest.fixture(scope="module")
def flushed_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A region whose first writer wrote three entries, flushed them and closed."""
    uri = make(tmp_path_factory.mktemp("flushed"), rows(0, 1), btree=False)
    with writer(uri) as first:
        for one in (10, 11, 12):
            first.put(rows(one, one + 1))
    return uri


@pytest.mark.req("S0-209")
@pytest.mark.parametrize("part", range(4))
def test_every_order_of_pylance_writers(tmp_path: Path, flushed_table: str, part: int) -> None:
    """All histories of five steps of three writers and gc; then everybody wakes."""
    refused = believed = 0
    for number, history in enumerate(Histories(writers=3, steps=5)):
        if number % 4 == part:
            one, other = lived(flushed_table, tmp_path / str(number), history)
            refused, believed = refused + one, believed + other
    assert refused > 20
    assert believed > 20


@pytest.mark.req("S0-209")
def test_longer_histories_of_pylance_writers(tmp_path: Path, flushed_table: str) -> None:
    """Some of those with eight steps."""
    every = 499
    refused = 0
    for number, history in enumerate(Histories(writers=3, steps=8)):
        if number % every == 0:
            refused += lived(flushed_table, tmp_path / str(number), history)[0]
    assert refused > 20
