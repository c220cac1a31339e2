"""The state machine of legacy MemWALs: what each transition needs, does, and conflicts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memwal_ops import legacy
from memwal_ops.errors import InvalidUsageError, WriterFencedError
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.legacy import Change, MemWal, MemWalId, Other, State

A0, A1, B0 = MemWalId("a", 0), MemWalId("a", 1), MemWalId("b", 0)


def one(mem_wal_id: MemWalId = A0, state: State = State.OPEN, owner: str = "x", version: int = 1) -> MemWal:
    place = f"{mem_wal_id.region}/{mem_wal_id.generation}"
    return MemWal(mem_wal_id, f"memory://{place}", f"wal/{place}", state=state, owner_id=owner,
                  last_updated_dataset_version=version)  # fmt: skip


def opened(before: list[MemWal], **more: str | None) -> Change:
    given = {"mem_table_location": "m", "wal_location": "w", "owner_id": "y", **more}
    return legacy.advance(before, "a", **given)  # type: ignore[arg-type]


@pytest.mark.req("S1-008", "S1-014", "S1-017")
def test_the_first_generation_is_0_open_and_empty() -> None:
    (made,) = opened([one(B0)]).applied([], 7)
    assert (made.id, made.state, made.owner_id, made.wal_entries.count) == (A0, State.OPEN, "y", 0)
    assert made.last_updated_dataset_version == 7
    with pytest.raises(InvalidUsageError, match="has no MemWAL"):
        opened([one(B0)], expected_owner_id="x")


@pytest.mark.req("S1-008", "S1-009", "S1-018", "S1-024")
def test_advance_seals_the_one_before_in_the_same_change() -> None:
    change = opened([one(), one(B0)], expected_owner_id="x")
    found = {each.id: each for each in change.applied([one(), one(B0)], 9)}
    assert {key: each.state for key, each in found.items()} == {A0: State.SEALED, A1: State.OPEN, B0: State.OPEN}
    assert {key: each.last_updated_dataset_version for key, each in found.items()} == {A0: 9, A1: 9, B0: 1}
    assert change.removed == (one(),), "the image before"
    assert legacy.disorder([*found.values()], "a") is None


def test_advance_leaves_one_that_is_not_open() -> None:
    change = opened([one(state=State.FLUSHED)], expected_owner_id="x")
    assert (change.updated, change.removed) == ((), ())
    assert [each.id for each in change.added] == [A1]


@pytest.mark.req("S1-012", "S1-022")
@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({}, InvalidUsageError, "expected_owner_id must be its owner"),
        ({"expected_owner_id": "z"}, WriterFencedError, "owned by 'x' now"),
        ({"expected_owner_id": "x", "wal_location": "wal/a/0"}, InvalidUsageError, "of its own"),
        ({"expected_owner_id": "x", "mem_table_location": "memory://a/0"}, InvalidUsageError, "of its own"),
    ],
)
def test_advance_is_refused(more: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opened([one()], **more)


STEPS: list[tuple[Callable[..., Change], State, State]] = [
    (legacy.seal, State.OPEN, State.SEALED),
    (legacy.flush, State.SEALED, State.FLUSHED),
    (legacy.merge, State.FLUSHED, State.MERGED),
]


@pytest.mark.req("S1-017", "S1-018", "S1-019", "S1-020", "S1-022")
@pytest.mark.parametrize(("step", "before", "after"), STEPS)
@pytest.mark.parametrize("state", State)
def test_each_step_has_one_state_before_it(
    step: Callable[..., Change], before: State, after: State, state: State
) -> None:
    listed = [one(state=state)]
    with pytest.raises(WriterFencedError):
        step(listed, A0, "z")
    with pytest.raises(InvalidUsageError, match="no MemWAL"):
        step(listed, B0, "x")
    if state is not before:
        with pytest.raises(InvalidUsageError, match=f"is {state.name}, and must be {before.name}"):
            step(listed, A0, "x")
        return
    change = step(listed, A0, "x")
    assert change.removed == tuple(listed)
    assert change.applied(listed, 5) == (one(state=after, version=5),)


@pytest.mark.req("S1-004", "S1-015", "S1-016")
def test_entries_rise_and_holes_are_recorded() -> None:
    listed: tuple[MemWal, ...] = (one(),)
    for number in (0, 1, 3):
        listed = legacy.append_entry(listed, A0, number, "x").applied(listed, number + 2)
    assert listed[0].wal_entries.holes == ((2, 2),)
    with pytest.raises(InvalidUsageError, match="not above"):
        legacy.append_entry(listed, A0, 3, "x")
    with pytest.raises(WriterFencedError):
        legacy.append_entry(listed, A0, 4, "z")
    with pytest.raises(InvalidUsageError, match="is SEALED"):
        legacy.append_entry([one(state=State.SEALED)], A0, 0, "x")


@pytest.mark.req("S1-022", "S1-023", "S1-025")
def test_a_claim_fences_the_owner_before() -> None:
    (claimed,) = legacy.set_owner([one()], A0, "new", mem_table_location="memory://new").applied([one()], 2)
    assert (claimed.owner_id, claimed.mem_table_location) == ("new", "memory://new")
    for late in (
        lambda: legacy.append_entry([claimed], A0, 0, "x"),
        lambda: legacy.seal([claimed], A0, "x"),
        lambda: opened([claimed], expected_owner_id="x"),
        lambda: legacy.set_owner([claimed], A0, "x", expected_owner_id="x"),
    ):
        with pytest.raises(WriterFencedError, match="another writer claimed it"):
            late()
    for state in State:
        assert legacy.set_owner([one(state=state)], A0, "new").updated[0].state is state
    with pytest.raises(InvalidUsageError, match="owns"):
        legacy.set_owner([one()], A0, "x")
    with pytest.raises(InvalidUsageError, match="MemTable of its own"):
        legacy.set_owner([one()], A0, "new", mem_table_location="memory://a/0")


def indexes(*entries: tuple[str, int]) -> table_pb2.IndexSection:
    return table_pb2.IndexSection(
        indices=[table_pb2.IndexMetadata(name=name, dataset_version=version) for name, version in entries]
    )


@pytest.mark.req("S1-020", "S1-029")
def test_trim_waits_for_every_index() -> None:
    listed = [one(state=State.MERGED, version=5), one(A1, State.FLUSHED, version=2), one(B0, State.MERGED, version=7)]
    section = indexes(("i", 4), ("i", 6), ("k", 9), ("__lance_mem_wal", 1))
    assert legacy.covered_version(section) == 6
    assert [each.id for each in legacy.trim(listed, 6).removed] == [A0]
    assert legacy.covered_version(indexes(("__lance_mem_wal", 1))) is None
    assert legacy.covered_version(None) is None
    assert [each.id for each in legacy.trim(listed, None).removed] == [A0, B0]
    assert legacy.trim(listed, 6).applied(listed, 8) == tuple(listed[1:])


def test_a_change_survives_its_transaction() -> None:
    change = opened([one()], expected_owner_id="x") | legacy.merge([one(B0, State.FLUSHED)], B0, "x")
    found = Change.of(change.message(4))
    assert found.ids == {A0, A1, B0}
    assert found.removed == change.removed
    assert found.updated == tuple(replace(each, last_updated_dataset_version=4) for each in change.updated)


STATE = legacy.seal([one()], A0, "x")
OTHER_GENERATION = legacy.create([], A1, "m", "w", "x")
OTHER_REGION = legacy.create([], B0, "m", "w", "x")
TRIM = legacy.trim([one(state=State.MERGED)], None)


@pytest.mark.parametrize(
    ("other", "theirs", "lost"),
    [
        (Other.STATE, STATE, True),
        (Other.STATE, OTHER_GENERATION, False),
        (Other.STATE, OTHER_REGION, False),
        (Other.STATE, TRIM, False),
        (Other.MERGE, legacy.merge([one(state=State.FLUSHED)], A0, "x"), True),
        (Other.MERGE, OTHER_REGION, False),
        (Other.DATA, None, True),
        (Other.INDEPENDENT, None, False),
    ],
)
def test_what_conflicts(other: Other, theirs: Change | None, lost: bool) -> None:
    assert legacy.conflicts(STATE, other, theirs) is lost
    if other is Other.STATE:
        assert legacy.conflicts(TRIM, other, theirs) is False


@pytest.mark.req("S1-009")
def test_disorder_is_named() -> None:
    assert "2 OPEN generations (0, 1)" in str(legacy.disorder([one(), one(A1)], "a"))
    assert "generation 1 is FLUSHED" in str(legacy.disorder([one(state=State.SEALED), one(A1, State.FLUSHED)], "a"))
    assert legacy.disorder([one(state=State.MERGED), one(A1)], "a") is None
