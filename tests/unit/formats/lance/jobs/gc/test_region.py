"""What gc finds in one region: every kind of candidate with its gates, from a listing and manifests in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.errors import RegionManifestGapError
from memwal_ops.formats.lance.generations.generation_files import FileState, RegionContents
from memwal_ops.formats.lance.jobs.gc import region as module
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.jobs.gc.region import RegionView, read_region_view
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError, RegionManifestGoneError
from memwal_ops.formats.lance.wire.names import bit_reversed
from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration
from tests.unit.formats.lance.jobs.regions import (
    BASE_POINTS,
    FOLDER,
    FREE,
    HOUR,
    NOW,
    REGION,
    Given,
    Manifests,
    directory,
    evidence_of,
    listing,
    manifest,
    view,
)


def folder(kind: CandidateKind, number: int, *gates: Gate, drain: bool = False) -> LanceCandidate:
    return LanceCandidate(kind, f"{FOLDER}/{directory(number)}", 30, 3, gates, drain, REGION, number)


# -- generations that are listed


def one_listed(grace: timedelta = HOUR, **evidence: Any) -> tuple[RegionView, LanceCandidate]:
    manifests = Manifests(manifest(4, [2]))
    made = view(
        manifests, listing(manifests, **{directory(2): HOUR}), evidence_of(manifests, reader_grace=grace, **evidence)
    )
    [found] = made.directories()
    assert made.revalidate(found) == found
    return made, found


@pytest.mark.req("S0-060", "S0-183")
def test_a_listed_generation_is_drained_first() -> None:
    made, found = one_listed()
    text = (
        "listed by region manifest version 4: gc --apply removes it from the list, and deletes it --reader-grace later"
    )
    assert found == folder(CandidateKind.GENERATION, 2, FREE, FREE, Gate(met=False, text=text), drain=True)
    assert made.drainable() == (2,)


def test_a_listed_generation_without_a_grace() -> None:
    made, found = one_listed(timedelta())
    dropped = Gate(met=True, text="the region manifest drops it first")
    assert found == folder(CandidateKind.GENERATION, 2, FREE, FREE, dropped, drain=True)
    assert found.verdict is Verdict.DELETE
    assert made.drainable() == (2,)


@pytest.mark.parametrize("grace", [timedelta(), HOUR])
def test_a_listed_generation_that_is_needed(grace: timedelta) -> None:
    made, found = one_listed(grace, needed=[2])
    assert found == folder(CandidateKind.GENERATION, 2, FREE, Gate(met=False, text="2 is needed"))
    assert made.drainable() == ()


@pytest.mark.parametrize("grace", [timedelta(), HOUR])
def test_a_listed_generation_below_files_of_the_base(grace: timedelta) -> None:
    made, found = one_listed(grace, points=True)
    assert found == folder(CandidateKind.GENERATION, 2, BASE_POINTS, FREE, FREE)
    assert made.drainable() == ()


def test_drained_are_those_that_are_free() -> None:
    """Also one without files: its entry in the list is of no use."""
    manifests = Manifests(manifest(4, [1, 2, 3]))
    made = view(manifests, listing(manifests, **{directory(2): HOUR}), evidence_of(manifests, needed=[2]))
    assert made.drainable() == (1, 3)


def test_of_two_generations_in_one_directory_the_later_counts() -> None:
    flushed = (FlushedGeneration(3, directory(1)), FlushedGeneration(2, directory(1)))
    manifests = Manifests(replace(manifest(4), flushed_generations=flushed))
    [found] = view(manifests, listing(manifests, **{directory(1): HOUR})).directories()
    assert found.generation == 3


# -- generations that were listed


@pytest.mark.parametrize(("ago", "verdict"), [(1.0, Verdict.DELETE), (0.9, Verdict.HELD)])
def test_a_drained_generation_waits_for_readers(ago: float, verdict: Verdict) -> None:
    """By the age of the version that dropped it, the first one behind the last that lists it."""
    manifests = Manifests(manifest(3, [2]), manifest(4, [2]), manifest(5), manifest(6))
    contents = listing(manifests, {5: ago * HOUR, 6: timedelta()}, **{directory(2): timedelta()})
    [found] = view(manifests, contents, evidence_of(manifests, reader_grace=HOUR)).directories()
    age = "1 h" if ago == 1 else "54 min"
    dropped = Gate(met=ago == 1, text=f"removed from the list by region manifest version 5, {age} ago; kept for 1 h")
    assert found == folder(CandidateKind.GENERATION, 2, FREE, FREE, dropped)
    assert found.verdict is verdict


def test_a_generation_that_was_drained_since_the_listing() -> None:
    """Version 5 was published after the listing; 6, which is the newest, dropped the generation."""
    manifests = Manifests(manifest(4))
    contents = listing(manifests, **{directory(2): 9 * HOUR})
    manifests.standing |= {5: manifest(5, [2]), 6: manifest(6)}
    [found] = view(manifests, contents).directories()
    dropped = Gate(met=False, text="removed from the list by region manifest version 6, just now")
    assert found == folder(CandidateKind.GENERATION, 2, FREE, FREE, dropped)


def test_a_broken_version_may_have_listed_it_too() -> None:
    manifests = Manifests(manifest(3, [2]), manifest(4), 5, manifest(6))
    contents = listing(manifests, {6: timedelta(minutes=5)}, **{directory(2): 9 * HOUR})
    [found] = view(manifests, contents).directories()
    assert found.why == "removed from the list by region manifest version 6, 5 min ago; kept for 15 min"


@pytest.mark.parametrize("points", [False, True])
def test_a_drained_generation_that_is_needed_again(points: bool) -> None:
    manifests = Manifests(manifest(3, [2]), manifest(4))
    contents = listing(manifests, **{directory(2): HOUR})
    [found] = view(manifests, contents, evidence_of(manifests, needed=[2], points=points)).directories()
    assert found.verdict is Verdict.HELD
    assert found.gates[: 2 + points] == ((BASE_POINTS,) if points else ()) + (FREE, Gate(met=False, text="2 is needed"))


# -- orphans


def orphan(
    number: int, *, age: timedelta = 3 * 24 * HOUR, before: Collection[Any] = (), **evidence: Any
) -> LanceCandidate:
    """A directory that no version lists; generation 5 is listed under another name, 6 is the current one."""
    listed = replace(manifest(4, current=6), flushed_generations=(FlushedGeneration(5, "elsewhere"),))
    manifests = Manifests(*before, listed)
    made = view(manifests, listing(manifests, **{directory(number): age}), evidence_of(manifests, **evidence))
    [found] = made.directories()
    assert made.revalidate(found) == found
    return found


NEVER = Gate(met=True, text="not listed by any existing region manifest version")
OLD = Gate(met=True, text="a flush may be in progress: last written, 3 d ago; kept for 3 d")


@pytest.mark.req("S0-187")
@pytest.mark.parametrize(
    ("number", "why"),
    [
        (6, "its flush was never published, and its rows are still in the log"),
        (7, "its flush was never published, and its rows are still in the log"),
        (5, "the generation was published from another directory"),
        (4, "its generation is merged, and no longer needed"),
    ],
)
def test_an_orphan_is_deleted_if_its_rows_are_elsewhere(number: int, why: str) -> None:
    found = orphan(number, needed=[5, 6, 7])
    assert found == folder(CandidateKind.ORPHAN, number, NEVER, Gate(met=True, text=why), OLD)
    assert found.verdict is Verdict.DELETE


def test_an_orphan_may_be_the_only_copy_of_its_rows() -> None:
    found = orphan(4, needed=[4])
    assert found.why == "generation 4 is not listed, and 4 is needed"
    assert found.verdict is Verdict.HELD


def test_every_reason_for_which_an_orphan_may_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = (FREE, *(Gate(met=False, text=text) for text in ("not merged", "index a lacks it")))
    monkeypatch.setattr(Given, "generation_gates", lambda *_: gates)
    assert orphan(4).why == "generation 4 is not listed, and not merged; index a lacks it"


def test_an_orphan_of_a_flush_that_may_be_under_way() -> None:
    found = orphan(6, age=2 * 24 * HOUR)
    assert found.why == "a flush may be in progress: last written, 2 d ago; kept for 3 d"


def test_an_orphan_that_a_broken_version_may_list() -> None:
    found = orphan(6, before=[2, 3])
    assert found.why == "region manifest version 3 cannot be read, and may list it"


def test_an_orphan_below_files_of_the_base() -> None:
    assert orphan(6, points=True).gates[0] == BASE_POINTS


def test_a_directory_with_another_name_is_kept() -> None:
    manifests = Manifests(manifest(4))
    [found] = view(manifests, listing(manifests, backup=HOUR)).directories()
    why = Gate(met=False, text="its name is not that of a generation, and no region manifest lists it")
    assert found == LanceCandidate(CandidateKind.UNKNOWN, f"{FOLDER}/backup", 30, 3, (why,), region_id=REGION)


# -- strays, and writes that were not published


@pytest.mark.parametrize(("days", "verdict"), [(3, Verdict.DELETE), (2, Verdict.HELD)])
def test_a_write_that_was_not_published(days: int, verdict: Verdict) -> None:
    manifests = Manifests(manifest(4))
    contents = listing(manifests)
    path = f"{FOLDER}/wal/{bit_reversed(5)}.arrow.tmp.{'a' * 32}"
    contents.strays[path] = FileState(8, NOW - timedelta(days=days))
    made = view(manifests, contents)
    [found] = made.strays()
    gates = (
        Gate(met=True, text="a writer wrote it under a temporary name, and ended before it published it"),
        Gate(met=days == 3, text=f"a write may be in progress: written, {days} d ago; kept for 3 d"),
    )
    assert found == LanceCandidate(CandidateKind.LEFTOVER, path, 8, 1, gates, region_id=REGION)
    assert found.verdict is verdict
    assert made.revalidate(found) == found


def test_strays_are_kept() -> None:
    manifests = Manifests(manifest(4))
    contents = listing(manifests)
    for name in ("b", "a"):
        contents.strays[f"{FOLDER}/{name}"] = FileState(8, NOW - 900 * HOUR)
    why = (Gate(met=False, text="not a part of a region; it is kept"),)
    assert [*view(manifests, contents).strays()] == [
        LanceCandidate(CandidateKind.UNKNOWN, f"{FOLDER}/{name}", 8, 1, why, region_id=REGION) for name in ("a", "b")
    ]


# -- manifest versions


@pytest.mark.req("S0-186")
def test_manifest_versions() -> None:
    """Five are kept; a reader may follow version 8 and the later ones."""
    manifests = Manifests(*(manifest(version, current=1) for version in (12, *range(3, 12))))
    made = view(manifests, listing(manifests), evidence_of(manifests, manifest_retention=5), settled=6)
    found = [*made.manifests()]
    assert [candidate.verdict.value for candidate in found] == ["delete"] * 3 + ["held"] * 7
    follow = Gate(met=False, text="a reader that began less than --reader-grace (15m) ago may follow it")
    past = Gate(met=True, text="version_hint.json names a later version, or is advanced first")
    enough = "{} newer versions exist, 5 are kept"
    one_of = Gate(met=False, text="one of the newest 5 versions")
    assert [candidate.gates for candidate in found[2:6]] == [
        (Gate(met=True, text=enough.format(7)), past),
        (Gate(met=True, text=enough.format(6)), follow),
        (Gate(met=True, text=enough.format(5)), follow),
        (one_of, follow),
    ]
    gates = (Gate(met=True, text=enough.format(9)), past)
    lost = view(Manifests(*(manifest(version) for version in range(3, 13))), made.contents, made.evidence, settled=12)
    shows = Gate(met=False, text="it may show what another program merged, and dropped")
    assert all(shows in candidate.gates for candidate in lost.manifests())
    assert found[0] == LanceCandidate(CandidateKind.REGION_MANIFEST, manifests.path(3), 103, 1, gates, region_id=REGION)
    assert [made.revalidate(candidate) for candidate in found] == found
    assert made.revalidate(replace(found[0], path=f"{FOLDER}/manifest/other")) is None


def test_manifest_versions_that_every_reader_may_follow() -> None:
    manifests = Manifests(*(manifest(version) for version in range(1, 9)))
    found = view(manifests, listing(manifests), evidence_of(manifests, manifest_retention=2)).manifests()
    assert {candidate.verdict for candidate in found} == {Verdict.HELD}


# -- the history of the manifest


def test_each_version_is_read_once() -> None:
    manifests = Manifests(manifest(3, [1, 2], epoch=4), 4, manifest(5, [2], epoch=4), manifest(6, epoch=5))
    contents = listing(manifests)
    del manifests.standing[3]
    contents.manifests[2] = FileState(1, NOW)
    made = view(manifests, contents)
    history = made.history()
    assert made.history() is history
    assert manifests.read_versions == [2, 3, 4, 5], "6 is at hand; 2 and 3 were deleted since the listing"
    assert history.listed == {directory(2): 5}
    assert (history.broken, history.read_to) == (4, 6)
    assert history.claims == {4: manifest(5, epoch=4), 5: manifest(6, epoch=5)}
    manifests.standing |= {7: manifest(7, [3], epoch=5), 8: manifest(8, [2], epoch=6)}
    evidence = evidence_of(manifests, needed=[2])
    newer = made.with_evidence(evidence)
    assert newer.evidence is evidence
    assert (newer.newest.version, newer.contents) == (8, contents)
    assert newer.history() is history
    assert manifests.read_versions[4:] == [7]
    assert history.listed == {directory(2): 8, directory(3): 7}
    assert history.read_to == 8
    assert [one.version for one in history.claims.values()] == [5, 6, 8]


def test_the_history_of_a_listing_without_manifests() -> None:
    """The newest one was published after it."""
    manifests = Manifests(manifest(4))
    contents = listing(manifests)
    contents.manifests.clear()
    history = view(manifests, contents).history()
    assert (manifests.read_versions, history.listed, history.read_to) == ([], {}, 4)


def test_a_claim_is_kept_without_what_it_lists() -> None:
    manifests = Manifests(replace(manifest(3, [1]), source=b"large"))
    claim = view(manifests, listing(manifests)).history().claims[1]
    assert (claim.version, claim.flushed_generations, claim.source) == (3, (), b"")


@pytest.mark.parametrize("listed", [[1, 2], [1]])
def test_the_history_is_only_read_for_directories_that_are_not_listed(listed: list[int]) -> None:
    manifests = Manifests(manifest(3), manifest(4, listed))
    made = view(manifests, listing(manifests, **{directory(1): HOUR, directory(2): HOUR}))
    made.prepare()
    assert manifests.read_versions == ([] if len(listed) == 2 else [3])


# -- reading a region


def read(monkeypatch: pytest.MonkeyPatch, manifests: Manifests, contents: RegionContents, **options: Any) -> RegionView:
    checked: list[Any] = []

    def contents_of(*arguments: Any) -> RegionContents:
        assert arguments == ("the store", REGION, "the layout")
        return contents

    monkeypatch.setattr(module.generation_files, "read_region_contents", contents_of)
    monkeypatch.setattr(module, "check_identity", lambda *arguments: checked.append(arguments))
    evidence = evidence_of(manifests, **options)
    made = read_region_view(evidence, REGION)
    assert checked == [(evidence.table, made.newest)]
    assert (made.evidence, made.contents) == (evidence, contents)
    return made


@pytest.mark.parametrize(
    ("ages", "settled", "reads"),
    [
        ((5, 4, 3), 6, []),
        ((5, 4, 1), 6, []),
        ((5, 1, 0.9), 5, [5]),
        ((1, 0.9, 0.5), 4, [4]),
        ((0.9, 0.5, 0.1), None, []),
    ],
)
def test_the_settled_version(
    monkeypatch: pytest.MonkeyPatch, ages: tuple[float, ...], settled: int | None, reads: list[int]
) -> None:
    """The newest one that is as old as a reader may be."""
    manifests = Manifests(*(manifest(version) for version in (4, 5, 6)), hint=6)
    contents = listing(manifests, {version: age * HOUR for version, age in zip((4, 5, 6), ages, strict=True)})
    made = read(monkeypatch, manifests, contents, reader_grace=HOUR)
    assert made.newest.version == 6
    assert (None if made.settled is None else made.settled.version) == settled
    assert manifests.probed_from == [6], "one request, not one for each version"
    assert manifests.read_versions == reads


def test_without_a_grace_the_newest_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = Manifests(manifest(4), manifest(5))
    made = read(monkeypatch, manifests, listing(manifests, {5: -HOUR}), reader_grace=timedelta())
    assert made.settled is made.newest
    assert made.newest.version == 5


def test_a_version_that_was_published_since_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = Manifests(manifest(4), manifest(5))
    contents = listing(manifests)
    manifests.standing[6] = manifest(6)
    manifests.hinted = 6
    made = read(monkeypatch, manifests, contents, reader_grace=HOUR)
    assert made.newest.version == 6
    assert made.settled is not None
    assert made.settled.version == 5


@pytest.mark.parametrize(
    ("versions", "hint", "error", "text"),
    [
        ((), None, NoRegionManifestError, "has no manifest"),
        ((3, 5), None, RegionManifestGapError, "version 4 is missing, although version 5 exists"),
        ((3, 4, 6, 8), None, RegionManifestGapError, "version 5 is missing, although version 8 exists"),
        ((3, 4), 5, RegionManifestGapError, "version 5 is missing, although the region's hint names it"),
    ],
)
def test_a_region_with_a_gap_is_not_collected(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, ...], hint: int | None, error: type[Exception], text: str
) -> None:
    manifests = Manifests(*(manifest(version) for version in versions), hint=hint)
    with pytest.raises(error, match=text):
        read(monkeypatch, manifests, listing(manifests))


@pytest.mark.parametrize("fault", [RegionManifestGapError("gap"), RegionManifestGoneError("gone")])
@pytest.mark.parametrize("times", [2, 3])
def test_a_listing_is_not_a_snapshot(monkeypatch: pytest.MonkeyPatch, fault: Exception, times: int) -> None:
    """Other collectors delete the oldest versions while it runs: it is listed again, three times in all."""
    outcomes: list[Any] = [*[fault] * times, "the view"]

    def tried(*_: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(module, "_read_region_view", tried)
    if times == 2:
        assert read_region_view(evidence_of(Manifests()), REGION) == "the view"
    else:
        with pytest.raises(type(fault)):
            read_region_view(evidence_of(Manifests()), REGION)
    assert outcomes == ([] if times == 2 else ["the view"])
