"""Random histories of a namespace: writers, compactors that are overtaken or killed, sleepers, collectors, old readers.

Everything is decided by a seed. After each step a reader that shares no code with the jobs must see the last write of
every id, and readers that began earlier must still see what they began on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from memwal_ops import open_table
from memwal_ops.core.context import RunContext
from memwal_ops.errors import MemwalOpsError, StoreUnavailableError
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.lease import read_lease
from memwal_ops.formats.zeppelin.ledger import ledger_path
from memwal_ops.formats.zeppelin.options import GcOptions, MergeOptions
from memwal_ops.formats.zeppelin.wire.lease import LeaseRecord, encode_lease
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.overtaken import Overtaken
from tests.support.zeppelin.independent import Reader, Rows
from tests.support.zeppelin.namespace import NamespaceUnderTest

# No beat comes in time to matter: whether a lease still stands is a step of the history.
LONG = timedelta(minutes=5)


class LostAnswers(StoreWrapper):
    """A store of which some writes are carried out, and their answers lost."""

    def __init__(self, store: Any, dice: random.Random) -> None:
        super().__init__(store)
        self._dice = dice

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if verb in {"put_if_absent", "compare_and_swap"} and self._dice.random() < 0.15:
            raise StoreUnavailableError(f"{arguments[0]}: connection reset by peer.")
        return result


class History:
    """One namespace, and what happens to it."""

    def __init__(self, folder: Path, seed: int, dialect: str) -> None:
        self.dice = random.Random(seed)
        self.made = NamespaceUnderTest(str(folder / "ns"), dialect, seed)
        self.said: list[str] = []
        self.old: list[tuple[bytes, Rows, int]] = []
        self.time = 0

    def run(self, steps: int) -> None:
        """Take steps; raises AssertionError where something is lost."""
        # Power does not fail here, and syncing costs more than all the rest.
        with calm(), mock.patch.object(os, "fsync"):
            for _ in range(steps):
                step = self.dice.choices(
                    [self.append, self.compact, self.collect, self.begin_reading, self.pass_time],
                    [5, 4, 2, 2, 2],
                )[0]
                self.said.append(step.__name__)
                step()
                self.check()
            self.expire()
            merge.apply(self.opened(), MergeOptions(lease_ttl=LONG))
            self.check()

    def check(self) -> None:
        """What must hold after each step."""
        where = ", ".join(self.said[-8:])
        assert self.made.read() == self.made.expected(), where
        manifest = json_of(self.made)
        assert manifest >= self.time, f"the token went down: {where}"
        self.time = manifest
        for data, rows, _ in self.old:
            try:
                assert Reader(self.made.uri, data).read() == rows, where
            except FileNotFoundError as error:
                raise AssertionError(f"a reader of an old manifest misses {error.filename}: {where}") from error

    def opened(self, store: Any = None) -> Any:
        table: Any = open_table(self.made.uri)
        return table if store is None else replace(table, store=store(table.store))

    def append(self) -> None:
        ids = [f"v{self.dice.randrange(12)}" for _ in range(self.dice.randrange(4))]
        gone = tuple({f"v{self.dice.randrange(12)}" for _ in range(self.dice.randint(1, 2))} - {*ids})
        if ids or gone:
            self.made.put(*dict.fromkeys(ids), deletes=gone)

    def compact(self) -> None:
        """Alone; overtaken by others, its lease expired or not; killed; or without answers."""
        how = self.dice.randrange(4)
        at = self.dice.randint(1, 14)
        options = MergeOptions(
            lease_ttl=LONG,
            max_bytes=self.dice.choice([1, 1 << 28]),
            clusters=self.dice.choice([None, 2]),
            retrain=self.dice.random() < 0.3,
        )
        try:
            if how == 0:
                merge.apply(self.opened(), options)
            elif how == 1:
                merge.apply(self.opened(lambda store: Overtaken(store, at, self.others, writes=True)), options)
            elif how == 2:
                after = self.dice.random() < 0.5
                merge.apply(self.opened(lambda store: DyingStore(store, 2 * at, after=after)), options)
            else:
                merge.apply(self.opened(lambda store: LostAnswers(store, self.dice)), options)
        except Killed:
            pass
        except MemwalOpsError as error:
            assert error.reason in {"busy", "store_unavailable", "commit_conflict"}, repr(error)

    def others(self) -> None:
        """What happens while a compactor sleeps."""
        for _ in range(self.dice.randint(1, 3)):
            kind = self.dice.randrange(4)
            self.said.append(f"meanwhile {kind}")
            if kind == 0:
                self.append()
            elif kind == 1:
                self.expire()
            elif kind == 2:
                self.pass_time()
                self.collect()
            else:
                self.expire()
                self.append()
                merge.apply(self.opened(), MergeOptions(lease_ttl=LONG))

    def collect(self) -> None:
        """With readers' time over, but for those that hold their manifest."""
        grace = timedelta(0) if not self.old else timedelta(minutes=15)
        options = GcOptions(reader_grace=grace, orphan_min_age=timedelta(days=7), keep_revisions=1)
        self.expire()
        report = gc.apply(self.opened(), options, RunContext())
        assert report.exit_code == 0, report.describe()

    def begin_reading(self) -> None:
        """A reader takes the manifest; another one is done."""
        data = Path(self.made.uri, "manifest.json").read_bytes()
        self.old.append((data, self.made.expected(), 0))
        if len(self.old) > 2:
            self.old.pop(0)

    def pass_time(self) -> None:
        """A day: leases expire, orphans that were noted grow old, readers are done."""
        self.expire()
        self.old.clear()
        path = Path(self.made.uri, ledger_path(self.made.dialect))
        if path.exists():
            document = json.loads(path.read_text())
            for one in document["candidates"]:
                since = datetime.fromisoformat(one["first_seen_unreachable_at"]) - timedelta(days=1)
                one["first_seen_unreachable_at"] = since.isoformat()
            path.write_text(json.dumps(document))

    def expire(self) -> None:
        """The lease that stands ends now."""
        table = self.opened()
        standing = read_lease(table)
        if standing is not None:
            past = datetime.now(UTC) - timedelta(seconds=1)
            record = LeaseRecord(standing[0].holder, standing[0].token, past, past)
            Path(self.made.uri, "lease.json").write_bytes(encode_lease(record, self.made.dialect))


def json_of(made: NamespaceUnderTest) -> int:
    """The token of the live manifest."""
    token: int = Reader(made.uri).manifest["fencing_token"]
    return token


def run_history(folder: Path, seed: int, dialect: str, steps: int = 30) -> None:
    """One history, in a folder of its own that is removed afterwards."""
    place = folder / f"{dialect}-{seed}"
    place.mkdir()
    try:
        History(place, seed, dialect).run(steps)
    finally:
        shutil.rmtree(place, ignore_errors=True)
