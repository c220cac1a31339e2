"""The same steps under Hypothesis, which chooses them, shrinks what fails, and prints it as a script.

Each rule takes one number, from which the step draws all that it chooses: so a step keeps its
meaning when others are left out, and a failing history shrinks to the steps that it takes.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.campaigns.sim.driver import CALLS, JOBS, WEIGHTS
from tests.campaigns.sim.fault_steps import MOST_WRITES, OVERTAKEN
from tests.campaigns.sim.steps import Steps, make_table
from tests.support.calm import calm

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBERS = st.integers(0, 999)
_STEPS = 40
# To shrink takes minutes, and what comes out may be another failure than the one that was found.
_SHRINK = [Phase.shrink] if "SIM_SHRINK" in os.environ else []


class TableMachine(RuleBasedStateMachine):
    """One table."""

    effects: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.steps: Steps | None = None
        self.whole = True

    @initialize(number=st.integers(0, 63))
    def begin(self, number: int) -> None:
        """The table: its layout, regions, index, row ids."""
        self.steps = Steps(make_table(f"{self.folder.name}/t.lance", number), random.Random(number))

    @invariant()
    def everything_holds(self) -> None:
        if self.steps is not None:
            with self.watched():
                self.steps.look()

    def take(self, step: str, n: int, **arguments: Any) -> None:
        assert self.steps is not None
        self.steps.rng.seed(n)
        self.steps.made.rng.seed(n)
        self.steps.leases.rng.seed(n)
        with self.watched():
            self.steps.do(step, **arguments)

    def watched(self) -> _Watch:
        return _Watch(self)

    def teardown(self) -> None:
        if self.steps is None:
            return
        try:
            if self.whole:
                self.steps.end(posts=True, go_on=True)
                type(self).effects += self.steps.effects
                type(self).effects["histories"] += 1
        finally:
            self.steps.close()
            self.folder.cleanup()


class _Watch:
    """A history that failed is not brought to its end."""

    def __init__(self, machine: TableMachine) -> None:
        self.machine = machine

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.machine.whole &= kind is None


def _rule(kind: str) -> Callable[..., None]:
    def step(self: TableMachine, n: int) -> None:
        self.take(kind, n)

    step.__name__ = kind
    may = precondition(lambda self: self.steps is not None and self.steps.may(kind))
    return may(rule(n=_NUMBERS)(step))


def _crash() -> Callable[..., None]:
    @rule(n=_NUMBERS, job=st.sampled_from(JOBS), at=st.integers(1, max(CALLS.values())), after=st.booleans())
    def crash(self: TableMachine, n: int, job: Any, at: int, after: bool) -> None:
        self.take("crash", n, job=job, at=1 + at % CALLS[job], after=after)

    return crash


def _overtaken() -> Callable[..., None]:
    @rule(n=_NUMBERS, job=st.sampled_from(OVERTAKEN), at=st.integers(1, max(CALLS.values())), writes=st.booleans())
    def overtaken(self: TableMachine, n: int, job: Any, at: int, writes: bool) -> None:
        self.take("overtaken", n, job=job, at=1 + at % (MOST_WRITES if writes else CALLS[job]), writes=writes)

    return overtaken


_WITH_ARGUMENTS = {"crash": _crash, "overtaken": _overtaken}
# Hypothesis draws rules evenly: what makes a table's day has several.
for _kind, _weight in WEIGHTS.items():
    for _number in range(-(-_weight // 3)):
        _made = _WITH_ARGUMENTS[_kind]() if _kind in _WITH_ARGUMENTS else _rule(_kind)
        setattr(TableMachine, f"{_kind}_{_number}" if _number else _kind, _made)


def run_machine(histories: int, first: int = 0) -> Counter[str]:
    """As many histories, others for another ``first``; how often each step had an effect."""
    TableMachine.effects.clear()
    chosen = settings(
        max_examples=histories,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        derandomize=not first,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *_SHRINK],
        report_multiple_bugs=False,
    )
    machine: Any = seed(first)(TableMachine) if first else TableMachine
    with calm():
        run_state_machine_as_test(machine, settings=chosen)
    return TableMachine.effects
