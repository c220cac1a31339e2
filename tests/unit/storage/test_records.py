"""Records beside a table: earlier formats are read, unknown keys ignored, later formats refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from memwal_ops.core import certificate, holds, leases, quarantine
from memwal_ops.core.erasure import read_followers, record_follower
from memwal_ops.errors import HistoryError, UnsupportedFeatureError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.version_manifest import RECORDS, check_readable
from memwal_ops.formats.lm_diskann import copies
from memwal_ops.formats.zeppelin.segments import Training, read_training, training_bytes, training_path
from memwal_ops.storage.api import Store
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.records import decode_record, encode_record
from memwal_ops.supervisor.membership.records import MemberRecord, MemberRecords
from memwal_ops.supervisor.state.history import History

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = leases.Holder("instance", "me@here")
LATER = "was written by a newer release of memwal-ops: it has format 2, and this one reads up to 1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(resolve(str(tmp_path)))


def change(store: Store, path: str, **more: object) -> None:
    """Rewrite a record as another release writes it."""
    store.put(path, json.dumps({**json.loads(store.get(path)), **more}).encode())


def test_a_record_has_its_format_and_reads_without() -> None:
    stored = encode_record({"a": "\ud800 é"})
    assert json.loads(stored) == {"format": 1, "a": "\ud800 é"}
    assert decode_record(stored, "p") == {"a": "\ud800 é"}
    assert decode_record(b'{"a": 1, "b": 2}', "p") == {"a": 1, "b": 2}
    assert decode_record(b'{"format": 2}', "p", newest=3) == {}
    assert decode_record(b"[1]", "p") == [1]
    with pytest.raises(UnsupportedFeatureError, match="p " + LATER) as refused:
        decode_record(b'{"format": 2}', "p")
    assert "do not delete the file" in refused.value.remedy
    for bad in (b'{"format": "2"}', b'{"format": true}', b'{"format": 0}', b'{"format": null}', b""):
        with pytest.raises(ValueError, match=r"format|Expecting"):
            decode_record(bad, "p")


def test_a_lease(store: Store) -> None:
    taken, _ = leases.acquire(store, "merge", HOLDER)
    assert taken is not None
    path = f"{leases.LEASES_FOLDER}/merge/{1:020}.json"
    change(store, path, later=[1])
    read = leases.read_lease(store, "merge")
    assert read is not None
    assert (read.token, read.holder, read.ttl) == (taken.token, HOLDER, taken.ttl)
    change(store, path, format=2)
    for act in (lambda: leases.acquire(store, "merge", HOLDER), lambda: leases.list_leases(store)):
        with pytest.raises(UnsupportedFeatureError, match=LATER):
            act()


def test_a_hold(store: Store) -> None:
    added = holds._add(store, holds.HOLDS_FOLDER, (5,), leases.DEFAULT_TTL, "")
    path = f"{holds.HOLDS_FOLDER}/{1:020}.json"
    change(store, path, later=[1])
    assert [one.versions for one in holds.holds_in_force(store, added.until - leases.DEFAULT_TTL)] == [(5,)]
    change(store, path, format=2)
    with pytest.raises(UnsupportedFeatureError, match=LATER):
        holds.holds_in_force(store, added.until)


def test_an_announced_expiry(store: Store) -> None:
    with holds.announced_expiry(store, [4, 5]):
        path = f"{holds.EXPIRIES_FOLDER}/{1:020}.json"
        change(store, path, later=[1])
        assert [one.versions for one in holds._entries(store, holds.EXPIRIES_FOLDER)] == [(4, 5)]
        change(store, path, format=2)
        with pytest.raises(UnsupportedFeatureError, match=LATER):
            holds._entries(store, holds.EXPIRIES_FOLDER)


def test_an_index_that_follows_a_table(store: Store) -> None:
    record_follower(store, "u", "/index", 3)
    (follower,) = read_followers(store)
    change(store, follower.path, later=[1])
    assert [*read_followers(store)] == [follower]
    change(store, follower.path, format=2)
    with pytest.raises(UnsupportedFeatureError, match=LATER):
        [*read_followers(store)]


def test_a_copy_of_an_index(store: Store) -> None:
    line = json.dumps({"release": 2, "files": {"written": "differently"}}).encode()
    store.put(copies.COPY, b"%b\n%b\n" % (line, copies.digest(line).encode()))
    with pytest.raises(UnsupportedFeatureError, match="a later release of the format"):
        copies.read_manifest(store)


def test_a_certificate(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text(json.dumps({"kind": certificate._KIND, "format": 2}))
    with pytest.raises(UnsupportedFeatureError, match="has format 2, and this release reads 1"):
        certificate._read(str(tmp_path / "proof.json"))


def test_the_record_of_a_repair(store: Store) -> None:
    kept = quarantine.keep(store, "hint", "object:x", b"before", b"after")
    assert quarantine.read_record(store, kept.id) == kept
    path = f"{kept.folder}/record.json"
    change(store, path, format=2)
    with pytest.raises(UnsupportedFeatureError, match=LATER):
        quarantine.read_record(store, kept.id)


def test_a_member_of_a_later_release_lives_and_only_its_figures_are_unknown(store: Store) -> None:
    written = MemberRecord("p", "instance", "h", "2", "now", 7, 9, "", {"used": 1})
    records = MemberRecords(store, "later")
    records.begin(records.listed())
    records.beat(written)
    path = f"members/later/{1:020}.json"
    change(store, path, more=[1])
    assert MemberRecords(store, "this").read("later", 1) == written
    change(store, path, format=2)
    assert MemberRecords(store, "this").read("later", 1) is None
    assert MemberRecords(store, "this").listed().newest == {"later": 1}


def test_a_training_is_only_a_hint(store: Store) -> None:
    store.put(training_path("s"), training_bytes(Training(7, 1.5)))
    assert read_training(store, "s") == Training(7, 1.5)
    change(store, training_path("s"), format=2)
    assert read_training(store, "s") is None


def test_records_in_a_manifest() -> None:
    manifest = table_pb2.Manifest(version=4)
    check_readable(manifest)
    manifest.config[RECORDS] = "1"
    check_readable(manifest)
    for later in ("2", "1.5", ""):
        manifest.config[RECORDS] = later
        with pytest.raises(UnsupportedFeatureError, match=f"version 4: its records have format {later}, and this one"):
            check_readable(manifest)


def test_the_history(tmp_path: Path) -> None:
    path = str(tmp_path / "history.sqlite")
    History.open(path).close()
    opened = History.open(path)
    opened._connection.execute("PRAGMA user_version=2")
    opened.close()
    for opening in (History.open, History.open_to_read):
        with pytest.raises(HistoryError, match="written by a newer release: it has format 2") as refused:
            opening(path)
        assert "state_dir of its own" in refused.value.remedy
