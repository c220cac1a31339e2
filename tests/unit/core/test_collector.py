"""What gc of any format deletes, keeps and reports: a family of objects in memory, batches of four."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from memwal_ops.core import collector as module
from memwal_ops.core.anchors import Anchor
from memwal_ops.core.candidates import Candidate, CollectionReport, Gate, Verdict, unrecognized
from memwal_ops.core.collector import Collector, PartReplacedError, Stage, collect, plan
from memwal_ops.core.context import NullListener, Progress, RunContext, StopRequested
from memwal_ops.core.options import CollectOptions
from memwal_ops.errors import StorageError, TableReplacedError
from memwal_ops.storage.api import DeleteReport, ObjectMeta

WRITTEN = datetime(2026, 11, 21, tzinfo=UTC)
ANCHOR = "anchor"
NOT_DONE = module._NOT_DONE


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_OBJECTS", 4)


@dataclass
class MemoryStore:
    """Objects of one size each; ``log`` has every request: the path of a HEAD, the paths of a delete."""

    sizes: dict[str, int]
    refused: set[str] = field(default_factory=set)
    log: list[str | list[str]] = field(default_factory=list)
    tag: str = "first"

    def head(self, path: str) -> ObjectMeta:
        self.log.append(path)
        return ObjectMeta(path, 1, WRITTEN, self.tag)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        wanted = [*paths]
        self.log.append(wanted)
        gone = [path for path in wanted if path not in self.refused]
        for path in gone:
            self.sizes.pop(path, None)
        return DeleteReport(len(gone), {path: "locked" for path in wanted if path in self.refused})

    @property
    def deleted(self) -> list[list[str]]:
        return [entry for entry in self.log if isinstance(entry, list)]


class Family(Collector[Candidate]):
    """Candidates given by the test; ``now`` has what :meth:`revalidate` finds instead of a planned candidate."""

    def __init__(self, store: MemoryStore, *stages: Stage[Candidate], part: object = None) -> None:
        self.store: Any = store
        self.part = part
        self.given = stages
        self.now: dict[str, Candidate | None] = {}
        self.calls: list[Any] = []
        self.fault: Candidate | None = None
        self.on_revalidate: Callable[[], None] = lambda: None

    @property
    def anchors(self) -> Sequence[Anchor]:
        return (Anchor("the table", ObjectMeta(ANCHOR, 1, WRITTEN, "first")),)

    def stages(self) -> Iterator[Stage[Candidate]]:
        yield from self.given

    def revalidate(self, batch: Sequence[Candidate]) -> list[Candidate]:
        self.calls.append([candidate.path for candidate in batch])
        self.on_revalidate()
        found = [self.now.get(candidate.path, candidate) for candidate in batch]
        return [candidate for candidate in found if candidate is not None]

    def drain(self) -> int:
        self.calls.append("drain")
        return 3

    def objects(self, candidate: Candidate) -> Iterable[tuple[str, int]]:
        return [(path, size) for path, size in self.store.sizes.items() if path.split("/")[0] == candidate.path]

    def not_deleted(self, candidate: Candidate) -> None:
        self.calls.append(("left", candidate.path))

    def unreadable(self, error: Exception) -> Candidate | None:
        self.calls.append(("unreadable", str(error)))
        return self.fault


def one(path: str, *, met: bool = True, objects: int = 1) -> Candidate:
    return Candidate("data", path, 10 * objects, objects, (Gate(met=met, text="expired"),))


def held(path: str) -> Candidate:
    return one(path, met=False)


@dataclass
class Run:
    report: CollectionReport[Candidate]
    context: RunContext
    settled: list[Candidate]

    @property
    def verdicts(self) -> dict[str, str]:
        return {candidate.path: candidate.verdict.value for candidate in self.settled}

    @property
    def reasons(self) -> dict[str, str]:
        return {candidate.path: candidate.why for candidate in self.settled if candidate.verdict is not Verdict.DELETE}


def ran(*families: Family, apply: bool = True, context: RunContext | None = None, **options: Any) -> Run:
    run = Run(CollectionReport(applied=apply), context or RunContext(), [])
    job = collect if apply else plan
    report = job(families, run.report, CollectOptions(**options), run.context, run.settled.append)
    assert report is run.report
    return run


def shelf(*names: str) -> MemoryStore:
    return MemoryStore({f"{name}/0": 10 for name in names})


def family(*names: str, part: object = None, in_order: str | None = None) -> Family:
    return Family(shelf(*names), Stage([one(name) for name in names], in_order), part=part)


def test_a_plan_only_reads(tmp_path: Any) -> None:
    file = tmp_path / "plan.jsonl"
    data = Family(shelf("a", "b", "c"), Stage([one("a"), held("b")]), Stage([unrecognized("c", 5, "not ours")]))
    run = ran(data, family("d"), apply=False, plan_file=str(file), limit=1)
    assert data.calls == data.store.log == []
    assert run.verdicts == {"a": "delete", "b": "held", "c": "unknown", "d": "delete"}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"kind": "data", "path": "a", "bytes": 10, "objects": 1, "proof": "expired", "verdict": "delete"},
        {"kind": "data", "path": "b", "bytes": 10, "objects": 1, "because": "expired", "verdict": "held"},
        {"kind": "unknown", "path": "c", "bytes": 5, "objects": 1, "because": "not ours", "verdict": "unknown"},
        {"kind": "data", "path": "d", "bytes": 10, "objects": 1, "proof": "expired", "verdict": "delete"},
    ]
    assert run.report.plan_file == str(file)
    assert [candidate.path for candidate in run.report.items[Verdict.DELETE]] == ["a"]
    assert run.report.truncated
    assert 0 < run.report.seconds < 60


@pytest.mark.parametrize("apply", [False, True])
def test_progress_and_a_stop_after_each_candidate(apply: bool) -> None:
    """What was done before the stop stays done; nothing is done after it."""

    seen: list[Progress] = []

    class Stopping(NullListener):
        def progress(self, progress: Progress) -> None:
            seen.append(progress)

        def checkpoint(self) -> None:
            if len(seen) == 2:
                raise StopRequested

    first, second = family("a"), family("b", "c", "d")
    with pytest.raises(StopRequested):
        ran(first, second, apply=apply, context=RunContext(Stopping()))
    assert seen == [Progress("collecting", "candidates", done) for done in (1, 2)]
    assert first.store.deleted == ([["a/0"]] if apply else [])
    assert second.store.deleted == ([["b/0", "c/0", "d/0"]] if apply else [])


def test_only_what_is_still_deletable_is_deleted() -> None:
    """Between plan and delete, ``b`` became needed and ``c`` was deleted by another run."""
    data = Family(shelf("a", "b", "c", "d", "e"), Stage([one("a"), one("b"), one("c"), held("d"), one("e")]))
    data.now = {"b": held("b"), "c": None}
    run = ran(data)
    assert run.verdicts == {"a": "delete", "b": "held", "d": "held", "e": "delete"}
    assert data.store.deleted == [["a/0", "e/0"]]
    assert data.calls == ["drain", ["a", "b", "c", "e"]]
    assert (run.report.deleted_objects, run.report.deleted_bytes, run.report.drained) == (2, 20, 3)
    assert not run.report.limited
    assert run.context.figures == {"bytes_collected": 20, "objects_collected": 2, "delete_requests": 1}


def test_the_anchors_are_checked_before_each_request() -> None:
    names = [f"f{number}" for number in range(10)]
    data = family(*names)
    run = ran(data)
    assert data.calls == ["drain", names[:4], names[4:8], names[8:]]
    batches = [[f"{name}/0" for name in batch] for batch in (names[:4], names[4:8], names[8:])]
    assert data.store.log == [entry for batch in batches for entry in (ANCHOR, batch)]
    assert run.context.figures["delete_requests"] == 3
    assert data.store.sizes == {}


def test_a_batch_has_so_many_objects_not_candidates() -> None:
    store = MemoryStore({f"{name}/{number}": 10 for name in "abc" for number in range(3)})
    data = Family(store, Stage([one(name, objects=3) for name in "abc"]))
    run = ran(data)
    assert data.calls == ["drain", ["a", "b"], ["c"]]
    assert [len(paths) for paths in store.deleted] == [4, 2, 3]
    assert (run.report.deleted_objects, run.report.deleted_bytes) == (9, 90)
    assert run.verdicts == dict.fromkeys("abc", "delete")


def test_a_large_candidate_is_deleted_in_parts() -> None:
    store = MemoryStore({f"big/{number}": 10 + number for number in range(9)} | {"small/0": 1})
    data = Family(store, Stage([one("big", objects=9), one("small")]))
    run = ran(data)
    assert [len(paths) for paths in store.deleted] == [4, 4, 1, 1]
    assert run.verdicts == {"big": "delete", "small": "delete"}
    assert (run.report.deleted_objects, run.report.deleted_bytes) == (10, sum(range(9)) + 91)


@pytest.mark.parametrize("objects", [2, 4, 9])
def test_a_candidate_of_which_a_part_is_refused(objects: int) -> None:
    store = MemoryStore({f"x/{number}": 10 for number in range(objects)} | {"y/0": 5}, refused={"x/1"})
    data = Family(store, Stage([one("x", objects=objects), one("y")]))
    run = ran(data)
    assert run.verdicts == {"x": "held", "y": "delete"}
    assert run.reasons == {"x": NOT_DONE}
    assert ("left", "x") in data.calls
    assert ("left", "y") not in data.calls
    assert run.report.failed == {"x/1": "locked"}
    assert store.sizes == {"x/1": 10}
    assert (run.report.deleted_objects, run.report.deleted_bytes) == (objects, 10 * objects - 5)
    assert not run.report.limited


@pytest.mark.parametrize("refused", [{"a/0"}, {"b/0"}])
def test_what_is_to_go_in_order_waits_for_what_is_in_front_of_it(refused: set[str]) -> None:
    data = family("a", "b", "c", in_order="a goes first")
    data.store.refused = refused
    run = ran(data)
    kept = ["a", "b", "c"][0 if "a/0" in refused else 1 :]
    assert run.reasons == {kept[0]: NOT_DONE, **dict.fromkeys(kept[1:], "a goes first")}
    assert [*data.store.sizes] == [f"{name}/0" for name in kept]
    assert run.report.failed.keys() == refused


def test_what_is_to_go_in_order_waits_for_what_became_needed() -> None:
    data = family("a", "b", "c", in_order="b goes first")
    data.now = {"b": held("b")}
    run = ran(data)
    assert run.reasons == {"b": "expired", "c": "b goes first"}
    assert data.store.deleted == [["a/0"]]


def test_in_order_each_has_a_request_of_its_own() -> None:
    data = family(*"abcdef", in_order="a goes first")
    assert ran(data).verdicts == dict.fromkeys("abcdef", "delete")
    assert data.store.deleted == [[f"{name}/0"] for name in "abcdef"]


@pytest.mark.parametrize("why", ["refused", "needed", "planned"])
def test_the_order_holds_from_one_batch_to_the_next(why: str) -> None:
    """Otherwise a region whose version 5 is locked loses version 1,001: a gap that makes it unreadable."""
    names = [f"v{number}" for number in range(10)]
    data = family(*names, in_order="v1 goes first")
    if why == "refused":
        data.store.refused = {"v1/0"}
    elif why == "needed":
        data.now = {"v1": held("v1")}
    else:
        data.given = (Stage([held(name) if name == "v1" else one(name) for name in names], "v1 goes first"),)
    run = ran(data)
    assert [*data.store.sizes] == [f"{name}/0" for name in names[1:]]
    assert run.reasons == {"v1": NOT_DONE if why == "refused" else "expired"} | dict.fromkeys(
        names[2:], "v1 goes first"
    )


def test_in_order_a_large_one_that_stays_keeps_the_rest() -> None:
    store = MemoryStore({f"big/{number}": 10 for number in range(5)} | {"small/0": 1}, refused={"big/4"})
    run = ran(Family(store, Stage([one("big", objects=5), one("small")], "big goes first")))
    assert run.reasons == {"big": NOT_DONE, "small": "big goes first"}
    assert [*store.sizes] == ["big/4", "small/0"]


@pytest.mark.parametrize("most", [1, 3, 4, 5, 7])
def test_no_more_than_allowed(most: int) -> None:
    store = MemoryStore({f"{name}/{number}": 10 for name in ("a", "b", "c", "d") for number in range(2)})
    data = Family(store, Stage([one(name, objects=2) for name in ("a", "b", "c", "d")]))
    later = family("e")
    run = ran(data, later, max_deletes=most)
    assert run.report.deleted_objects == most == 8 - len(store.sizes)
    assert run.report.deleted_bytes == 10 * most
    assert run.report.limited
    whole = most // 2
    assert [*run.reasons] == [*"abcd"[whole:], "e"]
    assert set(run.reasons.values()) == {NOT_DONE}
    assert later.store.log == []


def test_as_much_as_allowed() -> None:
    data = family("a", "b", "c")
    run = ran(data, max_deletes=3)
    assert run.verdicts == dict.fromkeys("abc", "delete")
    assert not run.report.limited
    after = ran(family("d"), family("e"), max_deletes=1)
    assert (after.verdicts, after.report.limited) == ({"d": "delete", "e": "held"}, True)


def test_the_limit_also_holds_for_a_large_one() -> None:
    store = MemoryStore({f"big/{number}": 10 for number in range(9)})
    data = Family(store, Stage([one("big", objects=9)]))
    run = ran(data, max_deletes=6)
    assert [len(paths) for paths in store.deleted] == [4, 2]
    assert (run.reasons, run.report.limited) == ({"big": NOT_DONE}, True)
    assert data.calls[-1] == ("left", "big")


def test_nothing_is_deleted_from_a_table_that_was_replaced() -> None:
    """The anchor has another tag at the second request: another table was restored. Later parts belong to it."""
    names = [f"f{number}" for number in range(9)]
    data, later = family(*names), family("z")

    def replaced() -> None:
        if len(data.store.deleted) == 1:
            data.store.tag = "second"

    data.on_revalidate = replaced
    run = ran(data, later)
    assert data.store.deleted == [[f"{name}/0" for name in names[:4]]]
    assert run.report.replaced == "the table is not the same object as before: the table was recreated or restored."
    assert run.reasons == dict.fromkeys([*names[4:], "z"], run.report.replaced)
    assert [call for call in data.calls if call[0] == "left"] == [("left", name) for name in names[4:8]]
    assert (later.calls, later.store.log) == ([], [])
    assert run.report.deleted_objects == 4


def test_a_table_that_revalidation_finds_replaced() -> None:
    data, later = family("a", "b", in_order="a goes first"), family("z")

    def replaced() -> None:
        raise TableReplacedError("another table")

    data.on_revalidate = replaced
    run = ran(data, later)
    assert run.report.replaced == "another table"
    assert run.reasons == dict.fromkeys(["a", "b", "z"], "another table")
    assert data.store.log == later.store.log == later.calls == []


def test_a_table_replaced_during_ordered_deletions() -> None:
    data = family("a", "b", "c", in_order="a goes first")
    data.on_revalidate = lambda: setattr(data.store, "tag", "second")
    run = ran(data)
    assert set(run.reasons.values()) == {run.report.replaced}
    assert data.store.deleted == []


@pytest.mark.parametrize("where", ["drain", "revalidate"])
def test_of_a_part_that_was_replaced_the_rest_is_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, later = family(*"abcdef", part="one"), family("z", part="two")

    def replaced(*_: Any) -> Any:
        raise PartReplacedError("another region")

    monkeypatch.setattr(data, where, replaced)
    run = ran(data, later)
    assert run.reasons == dict.fromkeys("abcdef", "another region")
    assert run.report.replaced is None
    assert (data.store.log, later.store.deleted) == ([], [["z/0"]])
    assert run.report.drained == (3 if where == "drain" else 6)


@pytest.mark.parametrize("granted", [None, 3])
def test_a_store_that_refuses_five_requests_in_a_row(granted: int | None) -> None:
    """One object alone may be locked; a store that deletes nothing is not asked a thousand times."""
    names = [f"f{number}" for number in range(8)]
    data, later = family(*names), family("z")
    data.given = tuple(Stage([one(name)]) for name in names)
    data.store.refused = {f"{name}/0" for number, name in enumerate(names) if number != granted}
    run = ran(data, later)
    asked = 5 if granted is None else 8
    assert len(data.store.deleted) == asked
    assert run.report.failed == {f"{name}/0": "locked" for name in names[:asked] if f"{name}/0" in data.store.refused}
    assert {run.reasons[name] for name in names if name in run.reasons} == {NOT_DONE}
    assert later.calls == ([] if granted is None else ["drain", ["z"]])
    assert run.report.drained == (3 if granted is None else 6)
    assert run.context.figures["delete_requests"] == asked + (granted is not None)


def test_a_request_of_which_a_part_is_refused_is_not_fruitless() -> None:
    names = [f"{letter}{number}" for number in range(6) for letter in "xy"]
    data = family(*names)
    data.given = tuple(Stage([one(f"x{number}"), one(f"y{number}")]) for number in range(6))
    data.store.refused = {f"x{number}/0" for number in range(6)}
    run = ran(data)
    assert [*data.store.sizes] == [f"x{number}/0" for number in range(6)]
    assert len(run.report.failed) == 6


@pytest.mark.parametrize("apply", [False, True])
def test_a_part_that_cannot_be_read_is_kept_as_a_whole(apply: bool) -> None:
    def stages() -> Iterator[Stage[Candidate]]:
        yield Stage([one("a")])
        raise StorageError("truncated")

    data, later = family("a", "b", part="one"), family("z", part="two")
    data.stages = stages  # type: ignore[method-assign]
    data.fault = held("one")
    run = ran(data, later, apply=apply)
    assert run.report.faults == {"one": "truncated"}
    assert [candidate.path for candidate in run.settled] == ["a", "one", "z"]
    assert data.calls[-1] == ("unreadable", "truncated")
    assert later.store.deleted == ([["z/0"]] if apply else [])
    data.fault = None
    with pytest.raises(StorageError, match="truncated"):
        ran(data, later, apply=apply)


def test_an_object_of_two_candidates_counts_once() -> None:
    data = Family(shelf("a"), Stage([one("a"), replace(one("a"), kind="index")]))
    run = ran(data)
    assert (run.report.deleted_objects, run.report.deleted_bytes) == (1, 10)
    assert [candidate.verdict for candidate in run.settled] == [Verdict.DELETE] * 2


def test_a_store_that_refuses_a_large_candidate_is_not_asked_on() -> None:
    store = MemoryStore({f"big/{number}": 10 for number in range(36)})
    store.refused = {*store.sizes}
    run = ran(Family(store, Stage([one("big", objects=36)])))
    assert len(store.deleted) == 5
    assert run.reasons == {"big": NOT_DONE}


def test_the_runs_guard_is_given_to_each_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that is a transaction checks it right before the commit."""
    given: list[Any] = []

    def delete(self: Family, paths: Sequence[str], guard: Any) -> DeleteReport:
        given.append(guard)
        return self.store.delete_many(paths)

    monkeypatch.setattr(Family, "delete", delete)
    context = RunContext()
    ran(family("a"), context=context)
    assert given == [context.guard]


def test_figures_add_up_over_the_jobs_of_a_run() -> None:
    context = RunContext()
    ran(family("a"), context=context)
    ran(family("b", "c"), context=context)
    assert context.figures == {"bytes_collected": 30, "objects_collected": 3, "delete_requests": 2}


def test_a_collector_without_lists_drains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Family, "drain")
    assert ran(family("a")).report.drained == 0
