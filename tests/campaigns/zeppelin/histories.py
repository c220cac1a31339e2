"""Random histories of a namespace: writers, compactors that are overtaken or killed, sleepers, collectors, old readers.

Everything is decided by a seed. After each step a reader that shares no code with the jobs must see the last write of
every id, and readers that began earlier must still see what they began on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from memwal_ops import open_table
from memwal_ops.core.context import RunContext
from memwal_ops.errors import MemwalOpsError, StoreUnavailableError, UnsupportedFeatureError
from memwal_ops.formats.zeppelin import writer
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.lease import LeaseRecord, encode_lease, read_lease
from memwal_ops.formats.zeppelin.roots import ledger_path
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions, ZeppelinMergeOptions
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI
from memwal_ops.storage.wrapper import StoreWrapper
from tests.campaigns.zeppelin.witness import Watched, Witness
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.overtaken import Overtaken
from tests.support.stores import beside
from tests.support.zeppelin.independent import Reader
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.support.zeppelin.server import append_later_version, compact_carrying, fence, hide, ulid

# No beat comes in time to matter: whether a lease still stands is a step of the history.
MERGE = ZeppelinMergeOptions(lease_ttl=timedelta(minutes=5))
# Where others matter most: a lease that is taken, and inputs that are read and not yet replaced.
PLACES = [
    ("put_if_absent", "lease.json"), ("put", "lease.json"), ("compare_and_swap", "lease.json"),
    ("put_if_absent", "/training/"), ("put_if_absent", "/training/"), ("put_if_absent", "/training/"),
]  # fmt: skip


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
        self.witness = Witness(self.made.uri)
        self.said: list[str] = []
        steps = {
            self.append: 4, self.append_by_slow_clock: 2, self.compact: 5, self.collect: 2, self.begin_reading: 2,
            self.pass_time: 2, self.lose_lease: 1, self.others_compact if dialect == NATIVE else self.hide: 2,
        }  # fmt: skip
        self.steps, self.weights = [*steps], [*steps.values()]

    def run(self, steps: int) -> None:
        """Take steps; raises AssertionError where something is lost."""
        # Power does not fail here, and syncing costs more than all the rest.
        with calm(), mock.patch.object(os, "fsync"):
            try:
                for _ in range(steps):
                    step = self.dice.choices(self.steps, self.weights)[0]
                    self.said.append(step.__name__)
                    step()
                    self.witness.check(self.made.expected())
                self.end()
            except Exception as error:
                error.add_note(f"after {', '.join(self.said[-8:])}")
                raise

    def end(self) -> None:
        """All is compacted; natively a fragment of a later version and the namespace's deletion come then."""
        self.expire()
        merge.apply(self.opened(), MERGE)
        self.witness.check(self.made.expected())
        if self.made.dialect == NATIVE:
            self.later_version()
            self.deletion()

    def opened(self, store: Any = None) -> Any:
        table: Any = open_table(self.made.uri)
        watched = Watched(table.store, self.witness)
        return replace(table, store=watched if store is None else store(watched))

    def append(self) -> None:
        ids = [f"v{self.dice.randrange(12)}" for _ in range(self.dice.randrange(4))]
        gone = tuple({f"v{self.dice.randrange(12)}" for _ in range(self.dice.randint(1, 2))} - {*ids})
        if ids or gone:
            self.made.put(*dict.fromkeys(ids), deletes=gone)

    def append_by_slow_clock(self) -> None:
        """Another program, whose ULIDs come from its own clock alone; it is hours behind."""
        behind = -3600.0 * self.dice.randint(1, 9)
        with mock.patch.object(writer, "new_ulid", lambda _: ulid(behind)):
            self.append()

    def compact(self) -> None:
        """Alone; overtaken by others, its lease expired or not; killed; or without answers."""
        how = self.dice.randrange(5)
        at = self.dice.randint(1, 14)
        options = replace(
            MERGE,
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
            elif how == 3:
                merge.apply(self.opened(beside(*self.dice.choice(PLACES), self.others)), options)
            else:
                merge.apply(self.opened(lambda store: LostAnswers(store, self.dice)), options)
        except Killed:
            pass
        except MemwalOpsError as error:
            assert error.reason in {"busy", "store_unavailable", "commit_conflict"}, repr(error)
            assert error.reason != "busy" or self.is_leased(), f"nobody has the lease: {error}"

    def others(self) -> None:
        """What happens while a compactor sleeps."""
        for _ in range(self.dice.randint(1, 3)):
            kind = self.dice.randrange(7)
            self.said.append(f"meanwhile {kind}")
            if kind == 0:
                self.append()
            elif kind == 1:
                self.expire()
            elif kind == 2:
                self.collect()
                self.pass_time()
                self.collect()
            elif kind == 3:
                self.append_by_slow_clock()
            elif kind in {4, 5} and self.made.dialect == WIKI:
                self.hide()
            else:
                self.expire()
                self.append()
                merge.apply(self.opened(), MERGE)

    def others_compact(self) -> None:
        """A server, if the lease is free, and soon after we trained; it takes a token of its own."""
        if self.is_leased():
            return
        merge.apply(self.opened(), replace(MERGE, clusters=4, retrain=True))
        self.made.put(f"v{self.dice.randrange(12)}")
        lease = self.witness.lease()
        token = 1 + max(Reader(self.made.uri).manifest["fencing_token"], lease["fencing_token"] if lease else 0)
        if compact_carrying(self.made.uri, token):
            past = datetime.now(UTC) - timedelta(seconds=1)
            record = LeaseRecord("server", token, past, past)
            Path(self.made.uri, "lease.json").write_bytes(encode_lease(record, self.made.dialect))
            self.witness.lease_written()

    def hide(self) -> None:
        """Another program excludes an id from the results of queries."""
        name = self.dice.choice(sorted(self.made.model) or ["v0"])
        hide(self.made.uri, name)
        self.made.model.pop(name, None)

    def lose_lease(self) -> None:
        """An operator removes the lease; its token has reached the manifest."""
        lease = self.witness.lease()
        if lease is not None and lease["fencing_token"] <= Reader(self.made.uri).manifest["fencing_token"]:
            Path(self.made.uri, "lease.json").unlink()

    def collect(self) -> None:
        """With readers' time over, but for those that hold their manifest."""
        grace = timedelta(0) if not self.witness.readers else timedelta(minutes=15)
        options = ZeppelinGcOptions(
            reader_grace=grace, orphan_min_age=timedelta(days=7), keep_revisions=1, allow_unsafe=True
        )
        self.expire()
        report = gc.apply(self.opened(), options, RunContext())
        assert report.exit_code == 0, report.describe()

    def begin_reading(self) -> None:
        """A reader takes the manifest; another one is done."""
        data = Path(self.made.uri, "manifest.json").read_bytes()
        self.witness.readers.append((data, self.made.expected()))
        if len(self.witness.readers) > 2:
            self.witness.readers.pop(0)

    def pass_time(self) -> None:
        """A day: leases expire, orphans that were noted grow old, readers are done."""
        self.expire()
        self.witness.readers.clear()
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

    def is_leased(self) -> bool:
        """Whether anybody has the lease now."""
        lease = self.witness.lease()
        return lease is not None and datetime.fromisoformat(lease["expires_at"]) > datetime.now(UTC)

    def later_version(self) -> None:
        """A fragment of a version that we do not know: the log is compacted up to it, and it stays listed."""
        self.append()
        name = append_later_version(self.made.uri, "v0")
        self.append()
        with suppress(MemwalOpsError):
            merge.apply(self.opened(), MERGE)
        listed = [one["id"] for one in Reader(self.made.uri).manifest["fragments"]]
        assert listed[:1] == [name], "its content was guessed"

    def deletion(self) -> None:
        """A server begins to delete the namespace while a job sleeps: its manifest stays as it is."""
        job: Any = self.dice.choice(
            [
                lambda table: merge.apply(table, MERGE),
                lambda table: writer.Writer(table).append(deletes=["v0"]),
                lambda table: gc.apply(
                    table, ZeppelinGcOptions(reader_grace=timedelta(0), allow_unsafe=True), RunContext()
                ),
            ]
        )
        at = self.dice.randint(1, 8)
        fenced: list[bytes] = []
        uri = self.made.uri
        with suppress(UnsupportedFeatureError):
            job(self.opened(lambda store: Overtaken(store, at, lambda: fenced.append(fence(uri)), writes=True)))
        if not fenced:
            fenced.append(fence(self.made.uri))
        with suppress(UnsupportedFeatureError):
            job(self.opened())
        assert Path(uri, "manifest.json").read_bytes() == fenced[0], "published in spite of the fence"


def run_history(folder: Path, seed: int, dialect: str, steps: int = 30) -> None:
    """One history, in a folder of its own that is removed afterwards."""
    place = folder / f"{dialect}-{seed}"
    place.mkdir()
    try:
        History(place, seed, dialect).run(steps)
    finally:
        shutil.rmtree(place, ignore_errors=True)
