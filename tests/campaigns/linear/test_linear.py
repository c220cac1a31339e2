"""Writers that fence each other, readers and jobs on a store that delays, repeats and drops: calls are linearizable.

On moto's S3, Azurite and Ceph RGW. Twenty seconds by default; ``WRITER_SECONDS=3600`` is an hour. Processes are killed
at random and started again.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops.memwal import create_mem_wal
from tests.campaigns.linear.process import SCHEMA
from tests.campaigns.linear.register import Call, contradiction
from tests.campaigns.soak.account import Account
from tests.campaigns.soak.actors import end, spawn
from tests.campaigns.soak.soak import Form, table_store
from tests.support.seeds import CAMPAIGN_SEED

if TYPE_CHECKING:
    from tests.support.servers import RealStore

SECONDS = float(os.environ.get("WRITER_SECONDS", "20"))
CAST = {"writer": 4, "reader": 3, "jobs": 1}
REGIONS = [f"00000000-0000-4000-8000-0000000000{number:02x}" for number in (1, 2)]
#: Of each kind so many calls must have returned; a busy machine gets more time for them.
ENOUGH = 25
_PATIENCE = 600
#: Not seconds: on a busy machine, a process would die before its first call.
_CALLS_BETWEEN_KILLS = (5, 30)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([], None),
        ([Call(1, True, 7, 0, 1), Call(1, False, 7, 2, 3)], None),
        ([Call(1, False, None, 0, 1), Call(1, True, 7, 0, 5), Call(1, False, 7, 2, 3)], None),
        ([Call(1, True, 7, 0), Call(1, False, None, 5, 6), Call(1, False, 7, 8, 9)], None),
        ([Call(1, True, 7, 0, 3), Call(1, True, 8, 1, 4), Call(1, False, 7, 5, 6), Call(1, False, 7, 7, 8)], None),
        ([Call(1, True, 7, 0, 1), Call(1, False, None, 2, 3)], "over while None"),
        ([Call(1, True, 7, 0), Call(1, False, 7, 1, 2), Call(1, False, None, 3, 4)], "over while None"),
        ([Call(1, True, 7, 0, 1), Call(1, True, 8, 2, 3), Call(1, False, 7, 4, 5)], "over while 7"),
        ([Call(1, True, 7, 0, 3), Call(1, True, 8, 1, 4), Call(1, False, 7, 5, 6), Call(1, False, 8, 7, 8),
          Call(1, False, 7, 9, 10)], "both stand"),
        ([Call(1, False, 7, 0, 1), Call(1, True, 7, 2, 3)], "before it was written"),
        ([Call(1, False, 7, 0, 1)], "never written"),
    ],
)  # fmt: skip
def test_the_check(calls: list[Call], why: str | None) -> None:
    found = contradiction(calls)
    assert (found is None) if why is None else (found is not None and why in found), found


def calls_of(folder: Path) -> list[Call]:
    """All calls of all processes; a read that did not return says nothing."""
    found = []
    for path in folder.glob("*.calls"):
        begun: dict[int, dict[str, int]] = {}
        for text in path.read_text().split("\n")[:-1]:
            line = json.loads(text)
            if "began" in line:
                begun[line["call"]] = line
                continue
            before = begun.pop(line["call"])
            writes = before["value"] is not None
            value = before["value"] if writes else line["found"]
            found.append(Call(before["key"], writes, value, before["began"], line["ended"]))
        open_ = [line for line in begun.values() if line["value"] is not None]
        found += [Call(line["key"], True, line["value"], line["began"], math.inf) for line in open_]
    return found


def contradictions(calls: list[Call]) -> dict[int, str]:
    """Of each key whose calls have no order, why."""
    by_key: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    found = {key: contradiction(own) for key, own in sorted(by_key.items())}
    return {key: why for key, why in found.items() if why is not None}


def returned(calls: list[Call]) -> Counter[str]:
    return Counter("write" if call.writes else "read" for call in calls if call.ended < math.inf)


@pytest.mark.req("S0-116", "S0-152", "S0-154")
@pytest.mark.timeout(SECONDS + 2 * _PATIENCE)
@pytest.mark.parametrize("on", ["s3", *(pytest.param(one, marks=pytest.mark.real_store) for one in ("azurite", "rgw"))])
def test_all_calls_are_linearizable(request: pytest.FixtureRequest, tmp_path: Path, on: str) -> None:
    real = None if on == "s3" else request.getfixturevalue(on)
    calls, said = play(on, SECONDS, tmp_path, real=real)
    sys.stdout.write(f"{said}\n")
    assert not contradictions(calls), f"{said}: {contradictions(calls)}"


@pytest.mark.timeout(2 * _PATIENCE)
def test_writes_that_are_acknowledged_too_early_are_found(tmp_path: Path) -> None:
    calls, said = play("local", 5, tmp_path, bug="acknowledged before the put")
    assert contradictions(calls), said


def play(
    on: str, seconds: float, folder: Path, *, real: RealStore | None = None, bug: str | None = None
) -> tuple[list[Call], str]:
    """Let processes write, read, merge and collect, and be killed; their calls, and what happened in figures."""
    rng = random.Random(CAMPAIGN_SEED)
    account = Account("linear")
    with table_store(Form(on, seconds, CAMPAIGN_SEED), str(folder), real) as (uri, options, direct, quieten):
        lance.write_dataset(SCHEMA.empty_table(), uri, storage_options=direct)
        create_mem_wal(uri, storage_options=direct)
        place = {"uri": uri, "options": options, "regions": REGIONS, "bug": bug}
        (folder / "place.json").write_text(json.dumps(place))
        alive = {}

        def start(kind: str, number: int) -> None:
            stem = folder / f"{kind}-{number}"
            line = [sys.executable, "-m", "tests.campaigns.linear.process", kind, str(folder), str(number)]
            alive[kind, number] = spawn(line, stem.with_suffix(".out"), stem.with_suffix(".err"))

        try:
            for kind, many in CAST.items():
                for number in range(many):
                    start(kind, number)
            began = time.monotonic()
            next_kill = _CALLS_BETWEEN_KILLS[1]
            while (passed := time.monotonic() - began) < seconds + _PATIENCE:
                time.sleep(0.5)
                for (kind, number), process in alive.items():
                    assert process.poll() is None, (folder / f"{kind}-{number}.err").read_text()[-3000:]
                so_far = returned(calls_of(folder))
                if passed > seconds and min(so_far["write"], so_far["read"]) >= ENOUGH:
                    break
                if so_far.total() < next_kill:
                    continue
                kind, number = rng.choice([*alive])
                end(alive[kind, number])
                account.kills[kind] += 1
                start(kind, number)
                next_kill = so_far.total() + rng.randint(*_CALLS_BETWEEN_KILLS)
        finally:
            for process in alive.values():
                end(process)
        quieten(account)
    calls = calls_of(folder)
    done = returned(calls)
    said = (
        f"{on}, seed {CAMPAIGN_SEED}, {seconds:.0f} s: {done['write']} writes and {done['read']} reads returned, "
        f"{len(calls) - done.total()} writes did not; {account.kills.total()} kills, {account.faults.total()} faults "
        f"in {account.requests} requests"
    )
    assert min(done["write"], done["read"]) >= ENOUGH, said
    return calls, said
