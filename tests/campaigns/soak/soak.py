"""One soak: a table, a cast of processes that are killed at random, and the judgement when all are down."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memwal_ops import open_table
from memwal_ops.errors import SchemaProjectionError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.retention.schema_history import SAME_COLUMNS
from tests.campaigns.soak import stand_in
from tests.campaigns.soak.account import Account
from tests.campaigns.soak.actors import Actor, Command, Endless, Writer, end, spawn
from tests.campaigns.soak.jobs import command
from tests.campaigns.soak.ledger import Operation, number, region_id
from tests.campaigns.soak.place import BLOCKED, OWNERS_REGION, OWNERS_ROWS, Place, check, look, read
from tests.campaigns.soak.writer import claim
from tests.support.s3_server import options_for, s3_client
from tests.support.tables import wire
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers import RealStore

_BUCKET = "soak"
_FAULT_RATE = 0.03
# So long the processes go on beyond their time until each kind of thing happened at least once.
_PATIENCE = 1800.0
# Seconds until a process has imported everything, on an idle machine.
_START = 0.8
# Lives are no longer than that times those on an idle machine, however busy this one is.
_BUSIEST = 2.5
_MOST_MEMORY = 700
_REGIONS = 3
_SIZES = (100, 2000)
_NOW = ["--reader-grace=0", "--orphan-min-age=0", "--fence-retention=0", "--manifest-retention=2"]
_NOW += ["--drain-after=0", "--allow-unsafe"]
_ENOUGH_RUNS = 6
# What gc may leave of a region's log: posts of two epochs, and the end.
_MOST_ENTRIES = 12
# The last operations of a run, by hand: above every incarnation's.
_LAST = 1 << 13


@dataclass(frozen=True)
class Form:
    """How long, where and how much.

    Attributes:
        on: ``local`` or ``s3``.
        native: pylance's own merges race with ours; it knows no tombstones, so that nothing is deleted.
        seconds: without the end, and so much longer as it takes until everything happened once.
    """

    on: str
    seconds: float
    seed: int = 1
    stable_row_ids: bool = False
    native: bool = False

    def grace(self, pace: float) -> float:
        """Long enough for every process that is not stalled, short enough for files to go meanwhile."""
        shortest, longest = (3.0, 15.0) if self.on == "local" else (5.0, 20.0)
        return round(min(pace, 1.5) * max(shortest, min(longest, self.seconds / 60)), 1)

    @property
    def rows_per_second(self) -> float:
        """About what the machine can do beside everything else."""
        return 1800.0 if self.on == "local" else 700.0


def _busy(folder: str) -> float:
    """How much longer things take than on an idle machine: a process should get past its imports before it dies."""
    began = time.monotonic()
    quiet = Path(folder) / "first.out"
    spawn([sys.executable, "-c", "import memwal_ops.cli.main, lance"], quiet, quiet).wait()
    return min(_BUSIEST, max(1.0, (time.monotonic() - began) / _START))


def soak(form: Form, folder: str, *, say: Callable[[str], None] = lambda _: None) -> Account:
    """Run one; everything stays in the folder where it fails.

    Raises:
        AssertionError: an invariant does not hold, or a process ended as it must not.
    """
    kinds = [form.on, *["stable row ids"] * form.stable_row_ids, *["pylance's own merges too"] * form.native]
    account = Account(", ".join(kinds))
    started = time.monotonic()
    Path(folder).mkdir(parents=True, exist_ok=True)
    busy = _busy(folder)
    with table_store(form, folder) as (uri, options, direct, quieten):
        place = Place(
            uri, options, folder, form.seed, _REGIONS, form.grace(busy), _SIZES, form.rows_per_second,
            form.stable_row_ids, not form.native,
        )  # fmt: skip
        place.save()
        judge = replace(place, options=direct)
        judge.create()
        _run(form, busy, place, judge, account, say)
        quieten(account)
        say("all processes are down; finishing and judging")
        _finish(judge, account)
    account.take_notes(folder)
    account.seconds = time.monotonic() - started
    over = {kind: peak for kind, peak in account.peaks.items() if peak > _MOST_MEMORY}
    assert not over, f"more than {_MOST_MEMORY} MiB: {over}"
    return account


Store = tuple[str, dict[str, str], dict[str, str], "Callable[[Account], None]"]


@contextmanager
def table_store(form: Form, folder: str, real: RealStore | None = None) -> Iterator[Store]:
    """Where the table is: URI, options by the faulty way, options by the direct one, and how to end the faults.

    Args:
        form: where, unless the store is given.
        folder: for what the store and the way to it say.
        real: a running store.
    """
    if form.on == "local":
        yield f"{folder}/table.lance", {}, {}, lambda _: None
        return
    with ExitStack() as stack:

        def start(what: str, *arguments: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
            said = Path(folder) / f"{what}.json"
            line = [sys.executable, "-m", "tests.campaigns.soak.stand_in", what, folder, *arguments]
            process = spawn(line, Path(folder) / f"{what}.out", Path(folder) / f"{what}.err")
            stack.callback(end, process)
            until(said.exists)
            return process, json.loads(said.read_text())

        bucket, direct = (real.uri, dict(real.options)) if real else _moto(start("server")[1]["endpoint"])
        (option,) = (name for name in direct if name.endswith("endpoint"))
        server = urlsplit(direct[option])
        process, proxy = start("proxy", f"http://{server.netloc}", str(form.seed), str(_FAULT_RATE))

        def quieten(account: Account) -> None:
            process.send_signal(signal.SIGUSR1)
            # What a killed process asked for may be carried out until then.
            time.sleep(stand_in.LONGEST_STALL)
            said = json.loads((Path(folder) / "proxy.json").read_text())
            account.faults.update(said["faults"])
            account.requests = said["requests"]

        faulty = {**direct, option: proxy["endpoint"] + server.path}
        yield f"{bucket}/table-{uuid.uuid4().hex[:8]}.lance", faulty, direct, quieten


def _moto(endpoint: str) -> tuple[str, dict[str, str]]:
    """An empty bucket, and the options that reach it."""
    options = options_for(endpoint)
    region = {"LocationConstraint": options["aws_region"]}
    s3_client(endpoint).create_bucket(Bucket=_BUCKET, CreateBucketConfiguration=region)
    return f"s3://{_BUCKET}", options


def _cast(form: Form, pace: float, place: Place, account: Account, rng: random.Random) -> Iterator[Actor]:
    short, long = (0.7 * pace, 4.0 * pace), (2.0 * pace, 10.0 * pace)
    for region in range(place.regions):
        yield Writer(place, account, rng, "writer", (3.0 * pace, 20.0 * pace), 1.0, region=region)
    for kind in ("merge command", "build command", "collect command"):
        yield Command(place, account, rng, kind, short, 0.5)
    loops = ["merge loop", "build loop", "collect loop", *(["owner loop"] if form.on == "local" else [])]
    if form.native:
        loops.append("native loop")
    for kind in loops:
        yield Endless(place, account, rng, kind, long, 1.0, module="tests.campaigns.soak.jobs", what=(kind,))
    yield Endless(place, account, rng, "reader", (5.0 * pace, 40.0 * pace), 1.0, module="tests.campaigns.soak.reader")


def _run(form: Form, busy: float, place: Place, judge: Place, account: Account, say: Callable[[str], None]) -> None:
    """Let them work and die until the time is over."""
    rng = random.Random(form.seed)
    pace = busy * (1.0 if form.on == "local" else 2.0)
    began = time.monotonic()
    progress: dict[str, int] = {}
    seen: set[str] = set()
    gone: set[str] = set()
    looks = stalls = began + 1
    says = began + 60
    with ExitStack() as stack:
        actors = []
        for actor in _cast(form, pace, place, account, rng):
            stack.callback(actor.stop)
            actors.append(actor)
        writers = [actor for actor in actors if isinstance(actor, Writer)]
        while (now := time.monotonic()) < began + form.seconds or (
            now < began + form.seconds + _PATIENCE and not (gone and progress)
        ):
            for actor in actors:
                # On a machine that is too busy for anything to end within a life, what is left to do is done in peace.
                actor.mortal = actor.mortal if now < began + form.seconds else 0.0
                actor.tend()
            if now > stalls and now < began + form.seconds:
                rng.choice(writers).stall(rng.uniform(0.2, 0.5) * place.grace)
                stalls = now + rng.uniform(2, 6) * pace
            if now > looks:
                progress = _look(judge, progress)
                standing = _generations(judge)
                gone |= seen - standing
                seen |= standing
                looks = now + max(1.0, form.seconds / 200)
            if now > says:
                ledgers = [place.ledger(region) for region in range(place.regions)]
                rows = sum(ledger.rows() for ledger in ledgers)
                say(
                    f"{(now - began) / 60:.0f} min: {rows:,} rows, {account.kills.total()} kills, {len(gone)} collected"
                )
                says = now + 60
            time.sleep(0.03)
        account.claims = sum(writer.incarnation for writer in writers)
    assert progress, "nothing was merged while they raced"
    assert gone, "nothing was collected while they raced"


def _look(judge: Place, before: dict[str, int]) -> dict[str, int]:
    """The progress of the newest version, which never falls."""
    while True:
        try:
            found = wire.progress(judge.files())
            break
        except (OSError, KeyError):
            continue  # the version that was the newest is expired already
    fallen = {region: (old, found.get(region, 0)) for region, old in before.items() if found.get(region, 0) < old}
    assert not fallen, f"merge progress went back: {fallen}"
    return found


def _generations(judge: Place) -> set[str]:
    return {path.rsplit("/", 1)[0].split("_gen_")[0] for path in judge.files().listing("_mem_wal") if "_gen_" in path}


# -- the end


def _finish(place: Place, account: Account) -> None:
    """Bring everything to its end with one of each, and judge what is there then."""
    for region in range(place.regions):
        claim(place, region).close()
    _merge_all(place)
    _all_there(place)
    _check_owner(place)
    for held in _must(place, "hold", "--list")["holds"]:
        if held["state"] == "standing":
            _must(place, "hold", "--release", str(held["id"]))
    _must(place, "compact")
    _must(place, "catchup")
    _must(place, "snapshot", "--inline-threshold=0")
    table = open_table(place.uri, place.options)
    stored = read_snapshot(table)
    assert stored is not None
    assert tuple(row.region_id for row in stored.regions) == table.regions.region_ids
    for name, index in base_indexes(table).items():
        assert coverage(index.covered, table.manifest).complete, name
        assert table.index.index_catchup.get(name) == table.index.merged_generations, name
    _must(place, "expire", "--older-than=0", "--allow-unsafe", "--keep=1", "--apply")
    before = place.files().listing("")
    # Files of commits that were killed before any version referred to them: pylance keeps those for seven days.
    place.dataset().cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    account.unverified = len(before) - len(place.files().listing(""))
    for run in count(1):
        report = _must(place, "gc", "--apply", *_NOW)
        account.objects_deleted += report["deleted"]["objects"]
        if report["decision"] == "nothing_to_delete":
            break
        assert run < _ENOUGH_RUNS, f"gc does not come to an end: {report}"
    assert report["unknown"] == [], report["unknown"]
    _all_there(place)
    _check_left(place, account)
    _count(place, account)
    _go_on(place)


def _merge_all(place: Place) -> None:
    """Merge everything. Where no version shows a generation's columns any more, do what the error says."""
    done = subprocess.run(command(place, "merge"), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    blocked = json.loads(done.stdout)["blocked"] if done.returncode == BLOCKED else []
    if blocked and all(one["reason"] == SchemaProjectionError.reason for one in blocked):
        dataset = place.dataset()
        dataset.update_config({SAME_COLUMNS: str(dataset.version)})  # no column was ever dropped
    _must(place, "merge")


def _must(place: Place, name: str, *arguments: str) -> Any:
    """A command without concurrent processes."""
    done = subprocess.run(command(place, name, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name} {arguments} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def _all_there(place: Place) -> None:
    """The base alone has the last write of every key."""
    view = look(place)
    assert not view.generations, f"not merged: {view.generations}"
    check(place, read(place, view), whole=True)
    dataset = place.dataset()
    for region in range(place.regions):
        puts = [one for one in place.ledger(region).operations() if one.kind == "put"]
        for one in puts[:: max(1, len(puts) // 5)]:
            key = int(one.keys(place.seed, region)[0])
            found = dataset.count_rows(f"id = {key}")
            assert found == len(dataset.to_table(filter=f"id + 0 = {key}")), f"the index on id is wrong for {key}"
            found = dataset.count_rows(f"seq = {one.seq}")
            assert found == len(dataset.to_table(filter=f"seq + 0 = {one.seq}", columns=["id"])), "index on seq"


def _check_owner(place: Place) -> None:
    """The owner's rows: none lost, none twice, all equal, and no update of theirs undone."""
    rows = place.dataset().to_table(filter=f"id >= {OWNERS_REGION << 44}")
    assert len(rows) == OWNERS_ROWS
    assert len(set(rows["id"].to_pylist())) == OWNERS_ROWS
    (value,) = set(rows["seq"].to_pylist())
    file = Path(place.folder) / "owner"
    said = file.read_text().split() if file.exists() else []
    assert said.count("done") <= value <= said.count("tried")


def _check_left(place: Place, account: Account) -> None:
    """What is on disk is what the newest version names, and what the collector's options keep."""
    files = place.files()
    dataset = place.dataset()
    fragments = [fragment.metadata for fragment in dataset.get_fragments()]
    named = {f"data/{file.path}" for fragment in fragments for file in fragment.files}
    deletions = sum(fragment.deletion_file is not None for fragment in fragments)
    manifest = wire.newest_manifest(files)[1]
    indexes = {wire.uuid_of(entry, 1) for entry in wire.sub(wire.decode(manifest.index or b""), 1)}
    left = files.listing("")
    account.objects_left = len(left)
    account.bytes_left = sum(files.size(path) for path in left)
    strays = []
    kinds: dict[str, list[str]] = {}
    for path in left:
        kind = path.split("/")[0]
        if kind == "_mem_wal":
            kind = "/".join(path.split("/")[:3])
        kinds.setdefault(kind, []).append(path)
        match kind.split("/")[0]:
            case "data":
                wanted = path in named
            case "_indices":
                wanted = path.split("/")[1] in indexes
            case "_mem_wal":
                wanted = "_gen_" not in path
            case folder:
                wanted = folder in {"_versions", "_transactions", "_deletions", "_mem_wal_ops", "_refs"}
        if not wanted:
            strays.append(path)
    assert not strays, f"{len(strays)} files that nothing needs: {strays[:10]}"
    assert len(kinds.get("_deletions", [])) == deletions
    assert len([path for path in kinds["_versions"] if path.endswith(".manifest")]) == 1
    assert len(kinds.get("_transactions", [])) <= 1, kinds["_transactions"]
    for region in range(place.regions):
        of = f"_mem_wal/{region_id(region)}"
        assert len([path for path in kinds[f"{of}/manifest"] if path.endswith(".binpb")]) <= 2
        assert len(kinds[f"{of}/wal"]) <= _MOST_ENTRIES, f"{len(kinds[f'{of}/wal'])} WAL entries"


def _count(place: Place, account: Account) -> None:
    """The figures of the page."""
    ledgers = [place.ledger(region) for region in range(place.regions)]
    account.rows = sum(ledger.rows() for ledger in ledgers)
    acknowledged = [ledger.tried[seq].kind for ledger in ledgers for seq in ledger.acknowledged]
    account.puts, account.deletes = acknowledged.count("put"), acknowledged.count("delete")
    account.uncertain = sum(len(ledger.tried) - len(ledger.acknowledged) for ledger in ledgers)
    account.rows_at_end = place.dataset().count_rows()
    account.versions = int(place.dataset().version)
    account.generations = sum(wire.progress(place.files()).values())


def _go_on(place: Place) -> None:
    """It is a table like any other: one more put and delete in each region, merged."""
    for region in range(place.regions):
        ledger = place.ledger(region)
        old = min(one.seq for one in ledger.operations() if one.kind == "put")
        with claim(place, region) as writer:
            put = Operation(number(_LAST, 1), "put", 300, (old,))
            ledger.begin(put)
            writer.put(put.table(place.seed, region))
            ledger.acknowledge(put)
            delete = Operation(number(_LAST, 2), "delete", 20, (put.seq,))
            ledger.begin(delete)
            writer.delete(delete.table(place.seed, region))
            ledger.acknowledge(delete)
    _must(place, "merge")
    _all_there(place)


def remove(folder: str) -> None:
    """After a soak in which all was right."""
    shutil.rmtree(folder)
