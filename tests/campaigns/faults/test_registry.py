"""The matrix itself: nothing is left out of it, its faults are what they say, its tables have work for every job."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

import memwal_ops.formats.lance.jobs
from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import StoreUnavailableError
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.storage.api import Store
from tests.campaigns.faults.jobs import JOBS
from tests.campaigns.faults.plan import Fault, FaultStore, Plan
from tests.campaigns.faults.tables import LAYOUTS, Layout, scan
from tests.support.dying_store import Killed
from tests.support.gc_options import PATIENT

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from tests.campaigns.faults.cells import Matrix


def test_every_job_is_registered() -> None:
    """A module of the format's jobs that has an ``apply`` of its own stands in tests/campaigns/faults/jobs.py."""
    package = memwal_ops.formats.lance.jobs
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    jobs = {one.__name__ for one in modules if getattr(getattr(one, "apply", None), "__module__", "") == one.__name__}
    elsewhere = {spec.load for spec in job_specs("lance").values() if spec.reads_only}
    # Killed after every write in tests of their own.
    elsewhere |= {f"{package.__name__}.{name}" for name in ("adopt", "erase.job", "migrate.layout", "migrate.store")}
    # Not of the legacy layout, whose jobs have their own: tests/integration/formats/lance/jobs/legacy.
    elsewhere |= {name for name in jobs if name.startswith(f"{package.__name__}.legacy.")}
    assert {job.module for job in JOBS.values()} & jobs
    assert jobs - elsewhere <= {job.module for job in JOBS.values()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_work_on_its_table(matrix: Matrix, name: str, layout: Layout) -> None:
    assert any(point.effect and "clock" not in point.name for point in matrix.trail(JOBS[name], layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_is_every_kind_of_garbage(matrix: Matrix, layout: Layout) -> None:
    prepared = matrix.prepared(JOBS["gc"], layout)
    prepared.restore()
    report = gc.plan(open_table(prepared.uri), PATIENT)
    there = {kind for kind, counter in report.counts.items() if counter[Verdict.DELETE]}
    assert there == set(CandidateKind) - {CandidateKind.UNKNOWN, CandidateKind.BASE, CandidateKind.QUARANTINE}
    held = {kind for kind, counter in report.counts.items() if counter[Verdict.HELD]}
    assert held >= {
        CandidateKind.GENERATION,
        CandidateKind.WAL_ENTRY,
        CandidateKind.REGION_MANIFEST,
        CandidateKind.SNAPSHOT,
    }
    assert report.drainable
    assert [item for item in report.items[Verdict.DELETE] if item.kind is CandidateKind.GENERATION], (
        "none that was drained"
    )


def test_a_write_without_a_name_is_found(matrix: Matrix) -> None:
    prepared = matrix.prepared(JOBS["hold"], "shard")
    prepared.restore()

    def job(table: Table) -> None:
        table.store.get("_versions/latest_version_hint.json")
        with open(f"{prepared.uri}/unnamed", "wb"):
            pass
        table.store.list_level("")

    with pytest.raises(AssertionError, match=r"between store\.get:version hint and store\.list_level:table"):
        Plan(scan=lambda: scan(prepared.uri)).run(job, prepared.uri)


def test_every_storage_call_is_a_point(matrix: Matrix) -> None:
    prepared = matrix.prepared(JOBS["hold"], "shard")
    prepared.restore()
    calls: dict[str, tuple[Any, ...]] = {
        "get": ("_versions/latest_version_hint.json",),
        "get_range": ("_versions/latest_version_hint.json", 0, 2),
        "head": ("data",),
        "list_level": ("",),
        "put": ("new", b""),
        "put_if_absent": ("new", b""),
        "put_back": ("newer", b""),
        "delete_many": (["new"],),
    }
    verbs = {name for name in vars(Store) if not name.startswith("_")} - {"root"}
    assert verbs == {*calls, "list", "compare_and_swap", "get_with_tag"}, "the last two are of no job here"

    def job(table: Table) -> None:
        assert isinstance(table.store, FaultStore)
        for name, arguments in calls.items():
            getattr(table.store, name)(*arguments)
        assert [*table.store.list("_versions")]

    plan = Plan()
    plan.run(job, prepared.uri)
    assert [point.name.split(":")[0] for point in plan.trail] == [f"store.{name}" for name in (*calls, "list")]


@pytest.mark.parametrize(
    ("fault", "raised", "done", "goes_on"),
    [
        (Fault.CRASH_BEFORE, Killed, False, False),
        (Fault.CRASH_AFTER, Killed, True, False),
        (Fault.TOLD_BEFORE, Killed, False, True),
        (Fault.TOLD_AFTER, Killed, True, True),
        (Fault.ERROR, StoreUnavailableError, False, True),
        (Fault.LOST_ANSWER, StoreUnavailableError, True, True),
        (Fault.OUTAGE, StoreUnavailableError, True, False),
        (Fault.TOLD_EXISTS, None, True, True),
        (Fault.BESIDE, None, True, True),
    ],
)
def test_a_fault_is_what_it_says(
    matrix: Matrix, fault: Fault, raised: type[BaseException] | None, done: bool, goes_on: bool
) -> None:
    prepared = matrix.prepared(JOBS["hold"], "shard")
    prepared.restore()
    seen: list[Any] = []

    def job(table: Table) -> None:
        try:
            seen.append(table.store.put_if_absent("first", b""))
        except BaseException as error:
            seen.append(type(error))
        try:
            table.store.put("second", b"")
        except (Killed, StoreUnavailableError) as error:
            seen.append(type(error))

    Plan(1, fault, lambda: seen.append("beside")).run(job, prepared.uri)
    answer = raised or (fault is not Fault.TOLD_EXISTS)
    assert seen == [*(["beside"] if fault is Fault.BESIDE else []), answer, *([] if goes_on else [raised])]
    assert ("first" in scan(prepared.uri)) is done
    assert ("second" in scan(prepared.uri)) is goes_on
