"""Which entries of a region's log gc may delete, from a log, manifests and references in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.jobs.gc import wal as module
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.jobs.gc.wal import Claim, EpochRun, WalView
from memwal_ops.formats.lance.wire.names import wal_entry_name
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
from memwal_ops.storage.api import ObjectMeta
from tests.unit.formats.lance.jobs.regions import (
    BASE_POINTS,
    FOLDER,
    HOUR,
    NOW,
    REGION,
    Manifests,
    directory,
    evidence_of,
    listing,
    manifest,
    view,
)

OWN_FILES = Gate(met=True, text="generations have files of their own")
NO_ROWS = Gate(met=True, text="no remaining generation has rows in it")
NO_POST = Gate(met=True, text="not a fence post: no fenced writer may write here")
DAY = 24 * HOUR
LONG_AGO = 40 * DAY


@pytest.fixture
def log_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a log: epoch and age of each entry from 1 on, the manifests, and which entries each directory refers to."""

    def made(
        epochs: Iterable[int | None],
        *manifests: RegionManifest | int,
        settled: int | None = None,
        merged: int = 0,
        in_log: Mapping[str, Collection[int] | None] | None = None,
        folders: Collection[str] = (),
        ages: Mapping[int, timedelta] | None = None,
        sentinels: bool = False,
        **evidence: Any,
    ) -> WalView:
        standing = Manifests(*manifests)
        contents = listing(standing, **dict.fromkeys(folders, HOUR))
        of_entry = dict(enumerate(epochs, 1))
        for number in of_entry:
            written = NOW - (ages or {}).get(number, LONG_AGO)
            contents.wal.add(number, ObjectMeta("", 10 * number, written, None))
        contents.wal.sort()
        given = evidence_of(standing, **evidence)
        layout = SimpleNamespace(generations_in_log=in_log is not None, claims_with_entry=sentinels, wal_suffix="arrow")
        vars(given.table).update(layout_of=lambda _: layout, index=SimpleNamespace(merged_generations={REGION: merged}))
        read: list[int] = []

        def epoch_of(table: Any, region_id: Any, entry_id: int) -> int:
            assert (table, region_id) == (given.table, REGION)
            read.append(entry_id)
            epoch = of_entry[entry_id]
            if epoch is None:
                raise InvalidFormatError("broken")
            return epoch

        def references(store: Any, path: str) -> frozenset[int]:
            assert store == given.table.store
            found = (in_log or {})[path.removeprefix(f"{FOLDER}/")]
            if found is None:
                raise InvalidFormatError("broken")
            return frozenset(found)

        monkeypatch.setattr(module, "read_writer_epoch", epoch_of)
        monkeypatch.setattr(module, "wal_references", references)
        return WalView(view(standing, contents, given, settled))

    return made


def whys(log: WalView) -> dict[int, str]:
    """Per entry why it is held; empty where it is deletable. Judged again, each is judged the same."""
    found = [*log.entries()]
    names = {wal_entry_name(number, "arrow"): number for number in log.view.contents.wal.ids}
    assert [names[candidate.name] for candidate in found] == [*log.view.contents.wal.ids], "ascending"
    for candidate in found:
        again = log.revalidate(candidate)
        assert again is not None
        assert again.verdict is candidate.verdict
        if candidate.verdict is Verdict.DELETE:
            assert again == candidate
    return {names[candidate.name]: "" if candidate.verdict is Verdict.DELETE else candidate.why for candidate in found}


def replayed(number: int | None, **fields: Any) -> dict[str, Any]:
    return {"replay_after_wal_id": number, "current": 1, **fields}


@pytest.mark.req("S0-185")
def test_an_entry_that_no_writer_replays_is_deleted(log_of: Any) -> None:
    log = log_of([1] * 6, manifest(4, **replayed(4)), settled=4)
    first = "fence post: the first entry of writer epoch 1, one of the newest two"
    waits = "not flushed: a writer replays from 5 on"
    assert whys(log) == {1: first, 2: "", 3: "", 4: "", 5: waits, 6: waits}
    flushed = Gate(met=True, text="flushed: replay starts at 5")
    path = f"{FOLDER}/wal/{wal_entry_name(3, 'arrow')}"
    assert [*log.entries()][2] == LanceCandidate(
        CandidateKind.WAL_ENTRY, path, 30, 1, (flushed, OWN_FILES, NO_POST), region_id=REGION
    )


@pytest.mark.parametrize(
    ("newest", "settled", "young"),
    [(4, 2, [3, 4]), (4, None, [1, 2, 3, 4]), (2, 4, []), (None, 4, []), (4, 0, [1, 2, 3, 4])],
)
def test_an_entry_that_a_reader_may_replay_stays(
    log_of: Any, newest: int | None, settled: int | None, young: list[int]
) -> None:
    manifests = [manifest(3, **replayed(settled)), manifest(4, **replayed(newest))]
    found = whys(log_of([2, *[3] * 5], *manifests, settled=None if settled is None else 3))
    grace = "flushed less than --reader-grace (15m) ago"
    assert [number for number, why in found.items() if why == grace] == young
    waits = [number for number, why in found.items() if why.startswith("not flushed")]
    assert waits == [*range((newest or 0) + 1, 7)]


def test_no_log_and_no_flush(log_of: Any) -> None:
    assert whys(log_of([], manifest(4, **replayed(4)), settled=4)) == {}
    log = log_of([1], manifest(4, **replayed(None)), settled=4)
    [found] = log.entries()
    assert found.gates[0] == Gate(met=True, text="flushed: replay starts at 1")


@pytest.mark.req("S0-190")
@pytest.mark.parametrize(
    ("listed", "folders", "merged", "why"),
    [
        ([2, 3], [2, 3], 1, None),
        ([2, 3], [2], 2, "generation 3 is missing"),
        ([2, 3], [3], 2, None),
        ([2], [2, 3], 1, "generation 3 is neither merged nor listed"),
        ([3], [3], 1, "generation 2 is neither merged nor listed"),
        ([], [], 3, None),
        ([], [], 4, None),
    ],
)
def test_the_log_may_be_the_only_copy(
    log_of: Any, listed: list[int], folders: list[int], merged: int, why: str | None
) -> None:
    """Generations up to 3 were flushed: those that are not merged must be listed, and be there."""
    newest = manifest(4, listed, **replayed(3, current=4))
    log = log_of([1] * 4, newest, settled=4, merged=merged, folders=[directory(number) for number in folders])
    found = whys(log)
    if why is None:
        assert found[2] == found[3] == ""
    else:
        assert found[1] == found[2] == found[3] == f"{why}: the log may be the only copy of its rows"
    assert found[4] == "not flushed: a writer replays from 4 on"


def test_the_log_below_files_of_the_base(log_of: Any) -> None:
    log = log_of([1] * 4, manifest(4, **replayed(3)), settled=4, points=True)
    for candidate in log.entries():
        assert candidate.gates[1] == BASE_POINTS


# -- generations whose rows are in the log


def references(log_of: Any, refers: dict[int, Collection[int] | None], **options: Any) -> WalView:
    """Generations 1 to 3 are listed, and 2 is needed; without a grace the others are deletable."""
    newest = manifest(4, [1, 2, 3], **replayed(6, current=4))
    folders = {directory(number): refers.get(number, ()) for number in (1, 2, 3)} | options.pop("more", {})
    return log_of(  # type: ignore[no-any-return]
        [1] * 7,
        newest,
        settled=4,
        merged=3,
        in_log=folders,
        folders=folders,
        **{"needed": [2], "reader_grace": timedelta(), **options},
    )


@pytest.mark.req("S0-209")
def test_an_entry_with_rows_of_a_remaining_generation_stays(log_of: Any) -> None:
    log = references(log_of, {1: [2], 2: [3, 5], 3: [4, 5]})
    found = whys(log)
    rows = f"generation {directory(2)} has its rows in it"
    assert {number: why for number, why in found.items() if 1 < number < 7} == {2: "", 3: rows, 4: "", 5: rows, 6: ""}
    assert [*log.entries()][1].gates[1] == NO_ROWS


def test_a_generation_that_could_not_be_deleted_keeps_its_entries(log_of: Any) -> None:
    log = references(log_of, {1: [2], 2: [3], 3: [4]})
    log.view.undeleted.add(directory(3))
    found = whys(log)
    assert found[4] == f"generation {directory(3)} has its rows in it"
    assert found[2] == ""


def test_what_a_remaining_generation_refers_to_may_not_be_readable(log_of: Any) -> None:
    found = whys(references(log_of, {1: [2], 2: None, 3: [4]}))
    unknown = f"generation {directory(2)} cannot be read, and may have its rows in it"
    assert {found[number] for number in range(2, 7)} == {unknown}
    found = whys(references(log_of, {1: [2], 2: None, 3: [4]}, needed=[2, 3]))
    assert found[4] == f"generation {directory(3)} has its rows in it"
    assert found[5] == unknown


def test_a_flush_that_was_not_published_has_its_rows_behind_replay_after(log_of: Any) -> None:
    found = whys(references(log_of, {2: [3]}, more={directory(4): None, "backup": None}))
    assert [number for number in range(2, 7) if found[number]] == [3]


def test_a_deletable_generation_that_cannot_be_read_keeps_nothing(log_of: Any) -> None:
    found = whys(references(log_of, {1: None, 2: [3]}))
    assert [number for number in range(2, 7) if found[number]] == [3]


def test_what_was_read_of_the_log_is_not_read_again(log_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = references(log_of, {2: [3]})
    posts = log.prepare().fence_posts()
    monkeypatch.setattr(module, "wal_references", None)
    monkeypatch.setattr(module, "read_writer_epoch", None)
    newer = log.under(log.view)
    assert (newer.view, newer.fence_posts()) == (log.view, posts)
    assert len([*newer.entries()]) == 7
    newer.view.undeleted.add(directory(1))
    assert whys(newer)[3] == f"generation {directory(2)} has its rows in it"


def test_nothing_is_read_of_a_log_of_which_nothing_is_settled(log_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of([1] * 3, manifest(4, **replayed(None)), settled=4)
    monkeypatch.setattr(module, "read_writer_epoch", None)
    assert log.prepare() is log
    assert all(why.startswith("not flushed") for why in whys(log).values())


# -- judged again


def test_judged_again_by_newer_manifests(log_of: Any) -> None:
    """A table was restored, with a manifest that replays from 3 on: what was planned is needed again."""
    log = log_of([1] * 6, manifest(4, **replayed(5)), settled=4)
    planned = [*log.entries()]
    assert planned[3].verdict is Verdict.DELETE
    log.view.newest = manifest(5, **replayed(2))
    again = log.under(log.view)
    needed = Gate(met=False, text="its place in the log is needed again")
    assert [needed in again.revalidate(candidate).gates for candidate in planned] == [False, False] + [True] * 4
    assert again.revalidate(planned[1]).verdict is Verdict.DELETE
    lost = log.under(log.view)
    lost.view.newest = manifest(5, **replayed(5, current=3))
    assert lost.revalidate(planned[1]).why.startswith("generation 1 is neither merged nor listed")
    assert lost.revalidate(LanceCandidate(CandidateKind.WAL_ENTRY, f"{FOLDER}/wal/other", 1, 1, ())) is None


# -- fence posts


@pytest.mark.req("S0-190")
def test_the_first_entry_of_each_epoch_is_kept_until_the_next_is_old(log_of: Any) -> None:
    """Epochs 1 to 4 wrote two entries each; the first of 3 was written 31 days ago, that of 4 yesterday."""
    ages = {5: 31 * DAY, 6: 31 * DAY, 7: DAY, 8: DAY}
    log = log_of([1, 1, 2, 2, 3, 3, 4, 4], manifest(4, epoch=4, **replayed(8)), settled=4, ages=ages)
    found = whys(log)
    assert {number for number, why in found.items() if why} == {5, 7, 8}
    log = log_of(
        [1, 1, 2, 2, 3, 3, 4, 4],
        manifest(4, epoch=4, **replayed(8)),
        settled=4,
        ages={**ages, 5: 29 * DAY},
    )
    assert whys(log)[3] == (
        "fence post: the first entry of writer epoch 2; the next epoch's was written, 29 d ago; kept for 30 d"
    )


def test_an_entry_that_cannot_be_read_is_a_post(log_of: Any) -> None:
    found = whys(log_of([1, None, 2, 2], manifest(4, epoch=2, **replayed(4)), settled=4))
    assert found[2] == "fence post: the first entry of an unknown epoch"


def test_entries_behind_the_hint_stay(log_of: Any) -> None:
    found = whys(log_of([1] * 6, manifest(4, **replayed(6, wal_id_last_seen=3)), settled=4))
    hint = "fence post: a writer searches for the end of the log after entry 3"
    assert [found[number] for number in (2, 3, 4, 5)] == ["", "", hint, hint]


@pytest.mark.parametrize("days", [29, 30])
def test_a_claim_whose_writer_wrote_nothing(log_of: Any, days: int) -> None:
    """Epoch 2 claimed at entry 2 and wrote nothing; epoch 3 wrote after it."""
    claimed = manifest(2, epoch=2, **replayed(2))
    newest = manifest(3, epoch=3, **replayed(6))
    ages = dict.fromkeys(range(4, 8), timedelta(minutes=1))
    log = log_of([1, 1, 1, 3, 3, 3, 3], manifest(1, **replayed(None)), claimed, newest, settled=3, ages=ages)
    log.view.contents.manifests[2] = SimpleNamespace(bytes=1, modified=NOW - days * DAY)
    found = whys(log)
    text = f"fence post: writer epoch 2 may write here, no entry of it was found; claimed, {days} d ago; kept for 30 d"
    assert found[5] == (text if days < 30 else "")
    assert found[2] == ""


@pytest.mark.parametrize("sentinels", [True, False])
def test_a_writer_that_wrote_only_its_sentinel(log_of: Any, sentinels: bool) -> None:
    """It may still search for the end of the log, from its claim to its own entry."""
    ages = dict.fromkeys(range(5, 9), DAY)
    manifests = [
        manifest(1, **replayed(None)),
        manifest(2, epoch=2, **replayed(1)),
        manifest(3, epoch=3, **replayed(8)),
    ]
    found = whys(log_of([1, 1, 1, 1, 2, 3, 3, 3], *manifests, settled=3, ages=ages, sentinels=sentinels))
    reads = (
        "fence post: writer epoch 2 may still have to read this, it wrote one entry; claimed, 2 h ago; kept for 30 d"
    )
    assert [found[number] for number in (2, 3, 4)] == [reads if sentinels else ""] * 3


@pytest.mark.parametrize(("age", "stalls"), [(30 * DAY, False), (30 * DAY - HOUR, True)])
def test_no_writer_stalls_for_longer_than_the_retention(log_of: Any, age: timedelta, stalls: bool) -> None:
    """Epoch 2 claimed and wrote nothing; epoch 3 wrote after it, so long ago."""
    manifests = [
        manifest(1, **replayed(None)),
        manifest(2, epoch=2, **replayed(1)),
        manifest(3, epoch=3, **replayed(5)),
    ]
    found = whys(log_of([1, 1, 3, 3, 3], *manifests, settled=3, ages=dict.fromkeys((3, 4, 5), age)))
    assert bool(found[2]) is stalls


def claim(log: WalView, epoch: int, *runs: EpochRun) -> Claim | None:
    return log._claim(epoch, runs)


def test_when_a_claim_was_made(log_of: Any) -> None:
    """Manifests 5 (epoch 3), 6 (epoch 5) and 7 exist: 4 was never claimed, 3 and older ones before 5 was written."""
    manifests = [
        manifest(5, epoch=3, **replayed(9)),
        manifest(6, epoch=5, **replayed(7, wal_id_last_seen=4)),
        manifest(7, epoch=6, **replayed(3, wal_id_last_seen=8)),
    ]
    log = log_of([1] * 3, *manifests, settled=7, ages={2: 5 * HOUR, 3: 3 * HOUR})
    for version, hours in ((5, 4), (6, 2), (7, 1)):
        log.view.contents.manifests[version] = SimpleNamespace(bytes=1, modified=NOW - hours * HOUR)
    assert claim(log, 2) == Claim(0, NOW - 4 * HOUR)
    assert claim(log, 3) == Claim(0, NOW - 4 * HOUR)
    assert claim(log, 3, EpochRun(3, 1, 2), EpochRun(4, 2, 3)) == Claim(0, NOW - 4 * HOUR)
    assert claim(log, 1, EpochRun(1, 0, 1), EpochRun(2, 1, 2), EpochRun(None, 2, 3)) == Claim(0, NOW - 5 * HOUR)
    assert claim(log, 4) is None
    assert claim(log, 5) == Claim(4, NOW - 2 * HOUR)
    assert claim(log, 6) == Claim(3, NOW - HOUR)
    assert claim(log, 7) == Claim(0, NOW), "not known yet: it was made after the history was read"


def test_when_a_claim_was_made_where_a_manifest_is_broken(log_of: Any) -> None:
    log = log_of([1], manifest(5, epoch=3), 6, manifest(7, epoch=6), settled=7)
    log.view.contents.manifests[5] = SimpleNamespace(bytes=1, modified=NOW - 4 * HOUR)
    assert claim(log, 3) == Claim(0, NOW - 4 * HOUR)
    assert claim(log, 4) == Claim(0, NOW)
    assert claim(log, 6) == Claim(0, NOW)


def test_a_claim_by_the_first_manifest(log_of: Any) -> None:
    log = log_of([1], manifest(1, epoch=1, **replayed(None)), manifest(2, epoch=2), settled=2)
    log.view.contents.manifests[1] = SimpleNamespace(bytes=1, modified=NOW - 9 * HOUR)
    assert claim(log, 1) == Claim(0, NOW - 9 * HOUR)
    assert claim(log, 2) == Claim(0, NOW - 2 * HOUR)


def test_a_claim_whose_manifest_was_deleted_since(log_of: Any) -> None:
    log = log_of([1], manifest(5, epoch=3), manifest(6, epoch=5), manifest(7, epoch=6), settled=7)
    log.view.history()
    del log.view.contents.manifests[6]
    assert claim(log, 5) == Claim(0, NOW)
    del log.view.contents.manifests[5]
    assert claim(log, 3) == Claim(0, NOW)
