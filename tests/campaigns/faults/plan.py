"""A fault plan: at the n-th point of a run something happens, and everything else goes on as it is.

Nothing here is random and no thread is involved: the product's thread pools run their tasks one after the
other while a plan is active, so that the n-th point of two runs on equal tables is the same point.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import lance
from lance.fragment import LanceFragment
from lance.optimize import Compaction, CompactionTask

from memwal_ops import open_table
from memwal_ops.errors import StoreUnavailableError
from memwal_ops.formats.lance.indexes import index_faults
from memwal_ops.storage.api import DeleteReport
from memwal_ops.storage.wrapper import StoreWrapper
from tests.campaigns.faults.points import store_point
from tests.support.calm import calm
from tests.support.dying_store import Killed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.formats.lance.table import Table


class Fault(StrEnum):
    """What happens at a point."""

    CRASH_BEFORE = "crash-before"  # the process is gone, nothing was done there
    CRASH_AFTER = "crash-after"  # it was done, and the process is gone
    TOLD_BEFORE = "told-to-end-before"  # as by Ctrl-C or SIGTERM: handlers on the way out still reach the store
    TOLD_AFTER = "told-to-end-after"
    ERROR = "error"  # refused for the moment, beyond all retries; nothing was done
    LOST_ANSWER = "lost-answer"  # done, and the answer is an error
    OUTAGE = "outage"  # done, and from then on nothing is answered
    TOLD_EXISTS = "told-exists"  # done, but the repeated request is told that the object exists
    BESIDE = "beside"  # others run there to their end, before it is done


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a recorded run.

    Attributes:
        name: see tests.campaigns.faults.points.
        effect: whether it changed any file.
        nested: whether pylance was waiting for it in the middle of a call of its own.
        occurrence: how many of that name were before it.
        inner: whether it is one of a row of equal reads, and neither the first nor the last.
        near: whether something is about to be changed, there or soon after.
        first: whether nothing was changed before it.
    """

    name: str
    effect: bool = False
    nested: bool = False
    occurrence: int = 0
    inner: bool = False
    near: bool = False
    first: bool = False

    @property
    def kind(self) -> str:
        """What it is about; nothing in particular where pylance is called."""
        return self.name.partition(":")[2]

    @property
    def key(self) -> tuple[str, int]:
        """By this it is the same point in the other layout."""
        return self.name, self.occurrence

    @property
    def faults(self) -> list[Fault]:
        """The faults that differ here: what cannot differ from another cell is not run twice.

        A dead process leaves what is on the store and nothing else: a crash is another one only after each
        change, and before the first. An answer is lost only where something was done, and so on.
        """
        found = [Fault.ERROR]
        if self.effect:
            found += [Fault.CRASH_AFTER, Fault.TOLD_BEFORE, Fault.TOLD_AFTER, Fault.LOST_ANSWER, Fault.OUTAGE]
        if self.effect and self.first:
            found.append(Fault.CRASH_BEFORE)
        if self.effect and self.name.startswith(_CREATES):
            found.append(Fault.TOLD_EXISTS)
        return found


_CREATES = ("store.put_if_absent", "store.put_back")
#: So many calls ahead a change is near.
SOON = 6


def described(trail: list[Point]) -> list[Point]:
    """A recorded run's points with what follows from their order."""
    seen: dict[str, int] = {}
    found = []
    for at, point in enumerate(trail):
        occurrence = seen[point.name] = seen.get(point.name, -1) + 1
        near = any(one.effect for one in trail[at : at + SOON])
        first = not any(one.effect for one in trail[:at])
        found.append(replace(point, occurrence=occurrence, inner=_inner(trail, at), near=near, first=first))
    return found


def _inner(trail: list[Point], at: int) -> bool:
    """Whether the same reads, one or two to an object, come before it and after it."""
    for length in (1, 2):
        around = trail[max(0, at - length) : at + length + 1]
        if len(around) == 2 * length + 1 and not any(one.effect for one in around):
            names = [one.name for one in around]
            if names[0] == names[length] == names[-1] and names[:length] == names[length:-1]:
                return True
    return False


def unreachable() -> NoReturn:
    """What pylance raises where a store does not answer."""
    raise OSError("LanceError(IO): Generic S3 error: error sending request: connection reset by peer")


class OtherPointError(Exception):
    """The point of that number is not what it was when the run was recorded: what happens there means nothing."""


class Plan:
    """Counts the points of one run, and does at one of them what it is told.

    Args:
        at: number of the point, from 1 on; 0: none.
        fault: what happens there.
        others: for Fault.BESIDE.
        scan: looks at all files; given for a recorded run, which learns what each point changes.
    """

    def __init__(
        self,
        at: int = 0,
        fault: Fault | None = None,
        others: Callable[[], None] | None = None,
        scan: Callable[[], object] | None = None,
    ) -> None:
        self._at, self._fault, self._others, self._scan = at, fault, others, scan
        self._inside = 0
        self._active = False
        self._dead = self._down = False
        self._last: object = None
        self.struck = False
        self.outcome = ""
        self.trail: list[Point] = []

    def run(self, job: Callable[[Table], Any], uri: str) -> Any:
        """Run a job on the newest version of a table, inside of :func:`pylance_points`."""
        index_faults._KNOWN.clear()  # else a version that an earlier run read is no point of this one
        table = open_table(uri)
        _current.append(self)
        self._active = True
        try:
            self._mark(None)
            result = job(replace(table, store=FaultStore(table.store, self)))
            self._unnamed("the end")
        finally:
            self._active = False
            _current.remove(self)
        return result

    def point(self, name: str, call: Callable[[], Any], *, failed: Callable[[], Any]) -> Any:
        """Pass through a point; ``failed`` raises or gives what a failed call there does."""
        if not self._active:
            return call()
        if self._dead:
            raise Killed
        number = len(self.trail) + 1
        nested = self._inside > 0
        self._unnamed(name)
        self.trail.append(Point(name, nested=nested))
        here = self._fault if number == self._at else None
        self.struck |= here is not None
        if here is Fault.TOLD_EXISTS and not name.startswith(_CREATES):
            raise OtherPointError(f"point {number} is {name}, and cannot be told that the object exists")
        if here in {Fault.CRASH_BEFORE, Fault.TOLD_BEFORE}:
            self._dead = here is Fault.CRASH_BEFORE
            raise Killed
        if self._down or here is Fault.ERROR:
            return failed()
        if here is Fault.BESIDE and self._others is not None:
            self._active = False
            try:
                self._others()
            finally:
                self._active = True
        self._inside += name.startswith("pylance.")
        try:
            return self._answer(here, call, failed)
        finally:
            self._inside -= name.startswith("pylance.")
            self._mark(number)

    def _answer(self, fault: Fault | None, call: Callable[[], Any], failed: Callable[[], Any]) -> Any:
        """What the caller hears of a call that reaches its end; some raise and were carried out all the same."""
        try:
            result = call()
        except Exception:
            if fault not in {Fault.CRASH_AFTER, Fault.TOLD_AFTER, Fault.LOST_ANSWER, Fault.OUTAGE}:
                raise
            result = None
        if fault in {Fault.CRASH_AFTER, Fault.TOLD_AFTER}:
            self._dead = fault is Fault.CRASH_AFTER
            raise Killed
        if fault in {Fault.LOST_ANSWER, Fault.OUTAGE}:
            self._down = fault is Fault.OUTAGE
            return failed()
        return False if fault is Fault.TOLD_EXISTS else result

    # -- what a recorded run learns

    def _mark(self, number: int | None) -> None:
        if self._scan is not None and self._active:
            now = self._scan()
            if number is not None and now != self._last:
                self.trail[number - 1] = replace(self.trail[number - 1], effect=True)
            if not self._inside:
                self._last = now

    def _unnamed(self, what: str) -> None:
        """Fail where something was written since the last point: that has no name yet."""
        if self._scan is not None and self._active and not self._inside:
            assert self._scan() == self._last, (
                f"files were changed between {self.trail[-1].name if self.trail else 'the start'} and {what}"
            )


_current: list[Plan] = []
# Opened and closed by ours, which translates what it raises.
_WRITER = "pylance.mem_wal_writer"


@contextmanager
def pylance_points() -> Iterator[None]:
    """Give pylance's calls their points, and let thread pools run one task after the other; for many runs."""
    inside = sys.modules["lance.dataset"]
    with ExitStack() as stack:
        for owner, attribute, name in (
            (lance.LanceDataset, "commit", "pylance.commit"),
            (lance.LanceDataset, "create_index", "pylance.create_index"),
            (lance.LanceDataset, "create_scalar_index", "pylance.create_scalar_index"),
            (lance.LanceDataset, "alter_columns", "pylance.alter_columns"),
            (lance.LanceDataset, "update_field_metadata", "pylance.update_field_metadata"),
            (lance.LanceDataset, "cleanup_old_versions", "pylance.cleanup_old_versions"),
            (LanceFragment, "delete_rows", "pylance.delete_rows"),
            (inside.DatasetOptimizer, "optimize_indices", "pylance.optimize_indices"),
            (
                sys.modules["memwal_ops.formats.lance.engines.merge.rewrite"],
                "write_fragments",
                "pylance.write_fragments",
            ),
            (sys.modules["memwal_ops.formats.lance.log.region_seal"], "_by_pylance", _WRITER),
            (CompactionTask, "execute", "pylance.compaction.execute"),
            (Compaction, "commit", "pylance.compaction.commit"),
            # These only read; but what they read is what others change.
            (lance, "dataset", "pylance.open"),
            (lance.LanceDataset, "latest_version", "pylance.latest_version"),
            (inside.Tags, "list", "pylance.tags"),
            (inside.Branches, "list", "pylance.branches"),
            (Compaction, "plan", "pylance.compaction.plan"),
        ):
            wrapped = _wrapped(inspect.getattr_static(owner, attribute), getattr(owner, attribute), name)
            stack.enter_context(mock.patch.object(owner, attribute, wrapped))
        stack.enter_context(calm())
        yield


def _wrapped(static: object, real: Callable[..., Any], name: str) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        if not _current:
            return real(*arguments, **named)
        failed = _no_answer if name == _WRITER else unreachable
        return _current[-1].point(name, lambda: real(*arguments, **named), failed=failed)

    if isinstance(static, property) and static.fget is not None:
        return property(_wrapped(static.fget, static.fget, name))
    is_method = (inspect.isfunction(static) or inspect.ismethoddescriptor(static)) and not isinstance(
        static, staticmethod | classmethod
    )
    return call if is_method else staticmethod(call)


class FaultStore(StoreWrapper):
    """A store whose calls are the points of a plan."""

    def __init__(self, store: Any, plan: Plan) -> None:
        super().__init__(store)
        self._plan = plan

    def _call(self, verb: str, method: Any, /, path: str = "", *arguments: Any, **named: Any) -> Any:
        """A call about one path that fails by raising: all but those below."""
        return self._plan.point(
            store_point(verb, [path]), lambda: method(path, *arguments, **named), failed=lambda: _no_answer(path)
        )

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[Any]:
        """The point is where the listing is read, not where it is asked for."""
        yield from self._plan.point(
            store_point("list", [prefix]),
            lambda: [*self._inner.list(prefix, after=after)],
            failed=lambda: _no_answer(prefix),
        )

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        """Says of each object whether it failed, and raises nothing."""
        wanted = [*paths]
        report = self._plan.point(
            store_point("delete_many", wanted),
            lambda: self._inner.delete_many(wanted),
            failed=lambda: DeleteReport(0, dict.fromkeys(wanted, "connection reset by peer")),
        )
        assert isinstance(report, DeleteReport)
        return report


def _no_answer(path: str = "") -> NoReturn:
    raise StoreUnavailableError(f"{path or 'The table'}: connection reset by peer.")
