"""Turns: what is urgent, missed or worth most comes first, and nothing waits for longer than the stated bound."""

from __future__ import annotations

from hypothesis import given, strategies as st

from memwal_ops.core.worth import ASKED, SHARE, Due, Missed, Turns, Worth


def due(name: str, since: float, saves: float = 0.0, costs: float = 1.0, **more: object) -> Due:
    urgent = int(more.pop("urgent", 0))  # type: ignore[call-overload]  # a number
    return Due((name, "job"), since, Worth(saves, costs, **more), urgent)  # type: ignore[arg-type]  # of Worth


def in_order(waiting: list[Due]) -> list[Due]:
    """All of them, in the order of their turns."""
    turns, chosen = Turns(), []
    for job in waiting:
        turns.put(job)
    while (job := turns.choose()) is not None:
        turns.begin(job, oldest=job is turns.oldest)
        turns.discard(job.key)
        chosen.append(job)
    assert not turns
    return chosen


def names(found: list[Due]) -> str:
    return "".join(one.key[0] for one in found)


def test_the_order() -> None:
    """Urgent; then missed objectives, by how far; then what saves most for its cost."""
    waiting = [
        due("a", 0.0, saves=1.0),
        due("b", 1.0, saves=3.0),
        due("c", 2.0, saves=4.0, costs=4.0),
        due("d", 3.0, saves=2.0, weight=2.0),
        due("e", 4.0, missed=Missed("max_fragments", 20.0, 10.0)),
        due("f", 5.0, missed=Missed("max_fragments", 90.0, 10.0)),
        due("g", 6.0, urgent=1),
        due("h", 7.0, urgent=2),
    ]
    assert names(in_order(waiting)) == "hgfedbac"
    assert Turns().choose() is None


def test_the_budget_is_what_counts_where_there_is_one() -> None:
    """A dear run that hardly uses the budget comes before a cheap one that uses it up."""
    dear, cheap = due("a", 0.0, saves=1.0, costs=9.0, share=0.01), due("b", 0.0, saves=1.0, share=0.5)
    assert names(in_order([cheap, dear])) == "ab"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)), max_size=60))
def test_what_changes_is_in_its_place(changes: list[tuple[int, int, int, int]]) -> None:
    """The orders that are kept are those that sorting gives, whatever became due, changed or started before."""
    turns, known = Turns(), dict[str, Due]()
    for name, saves, costs, urgent in changes:
        job = due(str(name), float(saves), saves=float(saves), costs=float(costs), urgent=urgent)
        if known.get(str(name)) == job:
            turns.discard(job.key)
            del known[str(name)]
        else:
            turns.put(job)
            known[str(name)] = job
        waiting = known.values()
        assert turns.oldest == min(waiting, key=lambda job: job.age, default=None)
        assert turns.first == min(waiting, key=lambda job: (job.urgent < ASKED, *job.age), default=None)
        expected = min((job for job in waiting if job.urgent), key=lambda job: (-job.urgent, *job.age), default=None)
        assert turns.choose() == (expected or min(waiting, key=lambda job: job.rank, default=None)), "no credit"


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 9), st.floats(0, 1000), st.floats(0.01, 50), st.booleans()), min_size=1, max_size=80
)


@given(ARRIVALS, st.integers(1, 4))
def test_nothing_waits_for_longer_than_the_bound(arrivals: list[tuple[int, float, float, bool]], every: int) -> None:
    """Over random histories: tables become due again and again, dear and cheap ones, many with missed objectives."""
    turns, waiting, spent, largest = Turns(), dict[str, Due](), 0.0, 0.0
    entered: dict[str, tuple[float, float]] = {}

    def start() -> None:
        nonlocal spent, largest
        one = turns.choose()
        assert one is not None
        turns.begin(one, oldest=one.age == min(other.age for other in waiting.values()))
        turns.discard(one.key)
        del waiting[one.key[0]]
        before, ahead = entered.pop(one.key[0])
        # What was due before it, itself, and one run more.
        assert spent - before <= SHARE * (ahead + one.worth.effort) + largest + 1e-6
        spent += one.worth.effort
        largest = max(largest, one.worth.effort)

    for number, (table, saves, costs, missed) in enumerate(arrivals):
        if str(table) not in waiting:
            objective = Missed("max_fragments", 9.0, 1.0) if missed else None
            entered[str(table)] = (spent, sum(one.worth.effort for one in waiting.values()))
            waiting[str(table)] = due(str(table), float(number), saves, costs, missed=objective)
            turns.put(waiting[str(table)])
        if number % every == 0:
            start()
    while waiting:
        start()


def test_what_is_worth_nothing_has_its_turn_beside_a_stream_of_missed_objectives() -> None:
    turns, spent = Turns(), 0.0
    poor = due("poor", 0.0, costs=3.0)
    for number in range(1, 100):
        rich = due("rich", float(number), saves=9.0, missed=Missed("max_fragments", 9.0, 1.0))
        turns.put(poor)
        turns.put(rich)
        one = turns.choose()
        assert one is not None
        turns.begin(one, oldest=one is poor)
        if one is poor:
            break
        spent += one.worth.effort
    assert spent == SHARE * poor.worth.effort
