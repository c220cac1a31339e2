"""The lease: one compactor at a time, and a zombie that ignores it cannot commit."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import run_job
from memwal_ops.errors import BusyError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.zeppelin.jobs import merge
from memwal_ops.formats.zeppelin.lease import LeaseRecord, claim, encode_lease, held_lease, read_lease
from memwal_ops.formats.zeppelin.namespace import FencedError, retried
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents
from tests.support.waiting import until
from tests.support.zeppelin.merging import FAST, expire, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace


@pytest.mark.sampled(1)
@pytest.mark.req("S4-041", "S4-042", "S4-044", "S4-047")
def test_a_zombie_does_not_win(made: NamespaceUnderTest) -> None:
    """It sleeps right before its commit; its lease expires, and another one compacts what came since."""
    table = opened(made)
    calls: list[str] = []
    Overtaken(table.store, 1 << 30, lambda: None)

    def others() -> None:
        expire(made)
        made.put("f5", "b")
        calls.append(str(run_job(made.uri, "merge", FAST).decision))

    for at in range(1, 12):
        made.write()
        table, calls = opened(made), []
        store = Overtaken(table.store, at, others, writes=True)
        report = merge.apply(replace(table, store=store), FAST)
        assert made.read() == made.expected(), at
        if calls:
            assert report.decision in {"superseded", "merged", "nothing_to_merge"}
    assert made.read() == made.expected()


@pytest.mark.req("S4-042", "S4-044")
def test_the_lost_fragment_of_two_layers(made: NamespaceUnderTest) -> None:
    """A (5) reads F1 to F5; B (6) reads F1 to F4 before; A publishes; B's retry must not replace A's segment."""
    slow = opened(made)
    with held_lease(slow, timedelta(minutes=5)) as first:
        slow = claim(slow, first)
        expire(made)
        with held_lease(opened(made), timedelta(minutes=5)) as second:
            table = claim(opened(made), second)
            assert table.manifest.token == second.token > first.token
            with pytest.raises(FencedError):
                claim(slow.newest(), first)
            with pytest.raises(FencedError):
                retried(slow.newest(), lambda live: _commit_of(live, first.token))
    assert made.read() == made.expected()


def _commit_of(live: Namespace, token: int) -> None:
    if live.manifest.token != token:
        raise FencedError("as every attempt of a commit asks")


@pytest.mark.req("S4-026", "S4-039", "S4-045", "S4-046", "S4-048")
def test_the_lease(made: NamespaceUnderTest) -> None:
    table = opened(made)
    assert read_lease(table) is None
    with held_lease(table, ZeppelinMergeOptions().lease_ttl) as lease:
        record = json.loads(Path(made.uri, "lease.json").read_text())
        names = {"holder" if made.dialect == "wiki" else "holder_id", "fencing_token", "acquired_at", "expires_at"}
        assert record.keys() == names
        span = datetime.fromisoformat(record["expires_at"]) - datetime.fromisoformat(record["acquired_at"])
        assert span == timedelta(minutes=5)
        with pytest.raises(BusyError, match=rf"token {lease.token}"):
            run_job(made.uri, "merge")
    after = json.loads(Path(made.uri, "lease.json").read_text())
    assert datetime.fromisoformat(after["expires_at"]) < datetime.now(UTC), "expired, not deleted"
    with held_lease(table, timedelta(minutes=5)) as following:
        assert following.token == lease.token + 1
    Path(made.uri, "lease.json").unlink()
    retried(opened(made), lambda live: live.manifest.changed(token=99))
    with held_lease(opened(made), timedelta(minutes=5)) as anew:
        assert anew.token == 100, "above the manifest's, though the lease was removed"


def test_a_lease_is_renewed_while_it_is_held(made: NamespaceUnderTest) -> None:
    table = opened(made)
    with held_lease(table, timedelta(seconds=1)) as lease:
        first = read_lease(table)
        assert first is not None
        now = until(lambda: (found := read_lease(table)) != first and found)
        assert now[0].expires > first[0].expires
        assert now[0].token == lease.token
        assert now[0].acquired == first[0].acquired, "a renewal is no acquisition"
        Path(made.uri, "lease.json").write_bytes(
            encode_lease(LeaseRecord("another", 77, datetime.now(UTC), datetime.now(UTC)), made.dialect)
        )
        assert lease.lost.wait(600)
        with pytest.raises(FencedError):
            lease.check()
    standing = read_lease(table)
    assert standing is not None
    assert standing[0].token == 77, "what is another's is not released"


def test_a_released_lease_does_not_end_before_it_was_acquired(made: NamespaceUnderTest) -> None:
    with held_lease(opened(made), timedelta(minutes=5)):
        pass
    standing = read_lease(opened(made))
    assert standing is not None
    assert standing[0].acquired <= standing[0].expires <= datetime.now(UTC)


@pytest.mark.parametrize("place", ["lease", "manifest"])
def test_there_is_no_token_above_the_highest(made: NamespaceUnderTest, place: str) -> None:
    if place == "manifest":
        retried(opened(made), lambda live: live.manifest.changed(token=2**64 - 1))
    else:
        past = datetime.now(UTC) - timedelta(days=1)
        record = LeaseRecord("another", 2**64 - 1, past, past)
        Path(made.uri, "lease.json").write_bytes(encode_lease(record, made.dialect))
    before = contents(made.uri)
    with pytest.raises(UnsupportedFeatureError, match="18446744073709551615"):
        run_job(made.uri, "merge", FAST)
    assert {path for path, state in contents(made.uri).items() if before.get(path) != state} <= {
        "_mem_wal_ops/swap.lock"
    }
    assert made.read() == made.expected()


@pytest.mark.parametrize(("days", "says"), [(3, "clock"), (0, "compacts")])
def test_a_lease_in_the_future(made: NamespaceUnderTest, days: int, says: str) -> None:
    now = datetime.now(UTC)
    record = LeaseRecord("node-abc", 7, now + timedelta(days=days), now + timedelta(days=days, minutes=4))
    Path(made.uri, "lease.json").write_bytes(encode_lease(record, made.dialect))
    with pytest.raises(BusyError, match=says):
        run_job(made.uri, "merge")
    Path(made.uri, "lease.json").write_text("{")
    with pytest.raises(TableCorruptError):
        run_job(made.uri, "merge")
    assert made.read() == made.expected()
