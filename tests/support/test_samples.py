"""What of a test's cases make test runs, and that nothing is left out of both suites."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from tests.support.samples import left_out
from tests.support.tables.layouts import LAYOUTS

SEEDS = range(12)


class Case(SimpleNamespace):
    """As much of a pytest item as is asked for."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def cases(marks: dict[str, pytest.Mark], **values: list[object]) -> list[Case]:
    made: list[Case] = []
    for indices in product(*(range(len(options)) for options in values.values())):
        by_name = dict(zip(values, indices, strict=True))
        # As pytest 9 has it where each parameter has a mark of its own: no index of a value.
        numbers = dict.fromkeys(values, len(made))
        spec = SimpleNamespace(indices=numbers, params={name: values[name][at] for name, at in by_name.items()})
        made.append(Case(nodeid=f"tests/test_it.py::test_it{indices}".replace("(", "["), callspec=spec, marks=marks))
    return made


def sampled(*most: int) -> dict[str, pytest.Mark]:
    return {"sampled": pytest.mark.sampled(*most).mark}


def test_each_value_of_each_parameter_is_in_one_case() -> None:
    for seed in SEEDS:
        values: dict[str, list[object]] = {"kind": [*LAYOUTS], "job": ["merge", "gc", "expire"], "fault": [*"abcdef"]}
        every = cases(sampled(), **values)
        kept = set(every) - left_out(every, seed)
        assert len(kept) == 6
        covered = {pair for case in kept for pair in case.callspec.params.items()}
        assert covered == {(name, value) for name, options in values.items() for value in options}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_so_many_cases_and_each_one_for_some_seed(most: int) -> None:
    seen = set()
    for seed in SEEDS:
        every = cases(sampled(most), job=["merge", "gc", "expire"], store=["local", "s3"])
        kept = [case.nodeid for case in every if case not in left_out(every, seed)]
        assert len(kept) == most
        seen |= set(kept)
    assert seen == {case.nodeid for case in every}


def test_on_one_layout_each_and_on_the_other_for_another_seed() -> None:
    every = cases({}, kind=LAYOUTS, job=["merge", "gc", "expire"])
    first, second = ({case.nodeid for case in every if case not in left_out(every, seed)} for seed in (0, 1))
    assert len(first) == len(second) == 3
    assert first | second == {case.nodeid for case in every}


@pytest.mark.parametrize("mark", [None, "long", "campaign", "spark"])
def test_whatever_else_is_parametrized_runs_as_it_is_marked(mark: str | None) -> None:
    marks = {} if mark is None else sampled(1) | {mark: getattr(pytest.mark, mark).mark}
    assert left_out(cases(marks, job=["merge", "gc"]), 0) == set()
