"""What pylance does beside a collector: asserted AS IT IS, as in test_landmines.py.

A failure after an upgrade says that a guard of the collector may be needed no longer, or has to change.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import lance
import pytest
from lance.mem_wal import ShardWriter

from tests.integration.contracts.small import REGION, make, rows, upsert, writer
from tests.support.tables import wire
from tests.support.tables.files import Files

Keep = Callable[[int], bool]


def log(uri: str) -> dict[int, Path]:
    """The WAL entries, by number."""
    return {wire.from_bit_reversed(path.name): path for path in Path(uri, "_mem_wal", REGION, "wal").glob("*.arrow")}


def collect_log(uri: str, keep: Keep) -> None:
    """Delete what is flushed, except what is to be kept."""
    replay_after = wire.region_manifest(Files(uri), REGION).replay_after
    for number, path in log(uri).items():
        if number <= replay_after and not keep(number):
            path.unlink()


def heard(one: ShardWriter, key: int) -> str:
    """What a writer says to a durable put."""
    try:
        one.put(rows(key, key + 1))
    except (OSError, RuntimeError) as error:
        assert "fenced" in str(error), error
        return "refused"
    return "acknowledged"


def there(uri: str, key: int) -> bool:
    """Whether the next writer finds a key; the base table has 0 alone."""
    with writer(uri) as one:
        return key in one.lsm_scanner().to_table()["id"].to_pylist()


def let_go(one: ShardWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        one.close()


@pytest.mark.parametrize(
    ("keep", "said", "found"),
    [(lambda _: False, "acknowledged", False), (lambda number: number in {1, 3}, "refused", False)],
    ids=["none", "first entries"],
)
def test_03_the_put_of_a_stalled_writer_succeeds_if_its_position_is_free(
    tmp_path: Path, keep: Keep, said: str, found: bool
) -> None:
    """For us: the first entry of every epoch is a fence post."""
    uri = make(tmp_path, rows(0, 1))
    stalled = writer(uri)
    for key in (10, 11):
        stalled.put(rows(key, key + 1))
    with writer(uri) as newer:
        for key in (20, 21, 22):
            newer.put(rows(key, key + 1))
    assert sorted(log(uri)) == [1, 2, 3, 4, 5, 6]  # 3 is the newer one's sentinel
    collect_log(uri, keep)
    assert heard(stalled, 99) == said
    let_go(stalled)
    assert there(uri, 99) is found


@pytest.mark.parametrize(
    ("keep", "sentinel", "said"),
    [
        (lambda _: True, 7, "refused"),
        (lambda number: number == 1, 3, "acknowledged"),
        (lambda number: number in {1, 5}, 7, "refused"),
    ],
    ids=["all", "first entries", "first entries and the last"],
)
def test_03_sentinels_stand_too_low_where_the_last_entry_is_gone(
    tmp_path: Path, keep: Keep, sentinel: int, said: str
) -> None:
    """A claim puts its sentinel behind `wal_id_last_seen` where that entry stands, else behind the highest
    name in `wal/`; replay and writes go on behind `replay_after` all the same. So with the last entry gone
    the sentinel is put among what is collected, and fences no writer: the writer before it, with no stall
    longer than the claim, is acknowledged, and the newer one flushes past its row.

    For us: the last entry of a log is never collected.
    """
    uri = make(tmp_path, rows(0, 1))
    with writer(uri) as first:
        for key in range(10, 15):
            first.put(rows(key, key + 1))
    collect_log(uri, keep)
    older = writer(uri)
    newer = writer(uri)
    assert sentinel in log(uri)
    assert heard(older, 98) == said
    assert heard(newer, 99) == "acknowledged"
    newer.close()
    let_go(older)
    assert not there(uri, 98), "whatever it was told, the row is not there"
    assert there(uri, 99)


def drained(uri: str) -> None:
    """Take all generations off the list, as the next manifest version, and delete them."""
    files = Files(uri)
    found = wire.region_manifest(files, REGION)
    fields = [one for one in found.fields if one.number not in {1, 8}]
    message = wire.encode([wire.Field(1, found.version + 1, 0), *fields])
    files.put_new(f"_mem_wal/{REGION}/manifest/{wire.bit_reversed(found.version + 1)}.binpb", message)
    for name in found.generations.values():
        shutil.rmtree(Path(uri, "_mem_wal", REGION, name))


def test_26_an_open_writer_scans_what_was_collected_until_it_writes_its_manifest(tmp_path: Path) -> None:
    """Its scan goes by the manifest that it read last; a flush that loses the next version reads it again.
    Its base table stays the version at which it was opened: from then on its scan lacks, without a word,
    what was merged since and drained.

    For us: a generation goes only when no base version without it may be opened, and expiring the version
    that a living writer was opened at breaks that writer's own scans; its puts are never affected.
    """
    uri = make(tmp_path, rows(0, 1))
    with writer(uri) as first:
        first.put(rows(10, 13))
    one = writer(uri, max_memtable_rows=4)
    upsert(lance.dataset(uri), rows(10, 13), 1)
    drained(uri)
    with pytest.raises((OSError, ValueError), match=r"(?i)not found"):
        one.lsm_scanner().to_table()
    found: set[int] = set()
    for key in range(20, 500):
        one.put(rows(key, key + 1))
        with contextlib.suppress(OSError, ValueError):
            found = set(one.lsm_scanner().to_table()["id"].to_pylist())
            break
    assert found, "a flush came, and it read the manifest again"
    assert not found & {10, 11, 12}
    one.close()
    assert min(wire.region_manifest(Files(uri), REGION).generations) == 2
    assert there(uri, 20)
    assert there(uri, 10)


@pytest.mark.parametrize("hint", [None, b'{"version": 1}', b'{"version": 2}', b"torn"])
def test_a_writer_opens_where_old_manifests_are_collected_and_the_hint_is_useless(
    tmp_path: Path, hint: bytes | None
) -> None:
    """For us: the collector makes the hint valid first; a writer without one lists the folder."""
    uri = make(tmp_path, rows(0, 1))
    for key in (10, 20, 30):
        with writer(uri) as one:
            one.put(rows(key, key + 1))
    newest = wire.region_manifest(Files(uri), REGION)
    folder = Path(uri, "_mem_wal", REGION, "manifest")
    for path in folder.glob("*.binpb"):
        if wire.from_bit_reversed(path.name) < newest.version - 1:
            path.unlink()
    (folder / "version_hint.json").unlink()
    if hint is not None:
        (folder / "version_hint.json").write_bytes(hint)
    with writer(uri) as one:
        one.put(rows(40, 41))
    after = wire.region_manifest(Files(uri), REGION)
    assert after.epoch == newest.epoch + 1
    assert after.version > newest.version
    assert set(after.generations) == {1, 2, 3, 4}
    assert there(uri, 40)
