"""Jobs of other packages: on every layout, in ``maintain`` where they ask for it, and named where they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import memwal_ops
from memwal_ops.core import registry
from memwal_ops.core.plugins import defect_of
from memwal_ops.errors import InvalidUsageError, JobPluginError, NotALanceTableError
from tests.support.tables.workload import Workload

PACKAGE = """
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import Options

WRECK = JobSpec(name="wreck", summary="Fail.", options=Options, load=__name__, in_maintain=True)
GUEST = JobSpec(name="guest", summary="Work.", options=Options, load=__name__)
PLAIN = JobSpec(name="plain", summary="Work.", options=Options, load=__name__, layouts=frozenset({"none"}),
                load_by_layout={"none": "foreign_jobs:OF_PLAIN"})

def plan(table, options, context):
    raise ZeroDivisionError("no rows")

apply = plan

class OF_PLAIN:
    apply = plan = staticmethod(plan)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "foreign_jobs.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = [
        EntryPoint(f"any.{name}", f"foreign_jobs:{name.upper()}", registry.JOBS) for name in ("wreck", "guest", "plain")
    ]
    installed_too(monkeypatch, *foreign)
    registry.clear_caches()
    yield
    monkeypatch.undo()
    registry.clear_caches()
    sys.modules.pop("foreign_jobs", None)


def installed_too(monkeypatch: pytest.MonkeyPatch, *more: EntryPoint) -> None:
    """As if packages with these entry points were installed."""
    groups = registry.FORMATS, registry.JOBS
    installed = [entry for group in groups for entry in entry_points().select(group=group)]
    monkeypatch.setattr(registry, "entry_points", lambda: EntryPoints([*installed, *more]))


FORMATS = """
class Complete:
    name, suffix, init, demo = "odd", "", None, None
    part_of = summarize = missing_of = None
    def detect(self, root): return any(meta.path == "odd.json" for meta in root.objects)
    def open(self, location, store): return object()

class Raises(Complete):
    def detect(self, root): raise KeyError(3)

class NoDetect:
    name, suffix, init, demo = "odd", "", None, None
"""


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("Raises()", "The table format 'odd' of foreign_formats.* raised KeyError: 3"),
        ("NoDetect()", None),
        (
            "Complete()",
            "A table of the format 'odd' of foreign_formats.* lacks format, location, store, jobs, revision",
        ),
        ("nothing", None),
    ],
)
def test_a_format_that_cannot_be_used_hides_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, says: str | None
) -> None:
    """It is named where it may matter, and tables of other formats are opened; it is never a bug of ours."""
    (tmp_path / "foreign_formats.py").write_text(f"{FORMATS}\nFORMAT = {attribute}\n")
    monkeypatch.delitem(sys.modules, "foreign_formats", raising=False)
    installed_too(monkeypatch, EntryPoint("odd", "foreign_formats:FORMAT", registry.FORMATS))
    registry.clear_caches()
    lance.write_dataset(pa.table({"k": range(5)}), tmp_path / "t.lance")
    assert memwal_ops.run_job(str(tmp_path / "t.lance"), "verify").decision == "healthy"
    assert ("odd" in registry.formats()) is (says is not None)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/odd.json").write_text("{}")
    with pytest.raises(JobPluginError if says else NotALanceTableError, match=says or "of no known format"):
        memwal_ops.open_table(str(tmp_path / "odd"))


@pytest.fixture(params=["plain", "shard"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    at = str(tmp_path / "t.lance")
    if request.param == "plain":
        lance.write_dataset(pa.table({"k": range(5)}), at)
    else:
        Workload(3, regions=1, base_rows=5).create(at).step(3).close()
    return at


def test_a_job_applies_to_every_layout_that_it_does_not_exclude(uri: str) -> None:
    table = memwal_ops.open_table(uri)
    assert {"wreck", "guest"} <= table.jobs.keys()
    assert ("plain" in table.jobs) is (table.layout.name == "none")
    if "plain" not in table.jobs:
        with pytest.raises(InvalidUsageError, match="plain does not apply"):
            memwal_ops.run_job(table, "plain")


def test_its_fault_is_that_of_its_package(uri: str) -> None:
    table = memwal_ops.open_table(uri)
    for job in table.jobs.keys() & {"wreck", "plain"}:
        with pytest.raises(JobPluginError, match=f"'{job}' of foreign_jobs.*no rows"):
            memwal_ops.run_job(table, job)


def test_a_step_that_raises_ends_alone(uri: str) -> None:
    report = memwal_ops.run_job(uri, "maintain").to_json()
    steps = {step["step"]: step for step in report["steps"]}
    assert "guest" not in steps
    assert steps["wreck"]["decision"] == "failed"
    assert steps["wreck"]["error"]["reason"] == JobPluginError.reason
    assert {name for name, step in steps.items() if step["decision"] == "failed"} == {"wreck"}
    assert report["decision"] == "incomplete"


def test_the_specs_of_this_package_are_without_defect() -> None:
    """They are not checked at each start, as those of other packages are."""
    built_in = [entry for entry in registry.job_entries() if registry.is_built_in(entry)]
    assert len(built_in) > 20
    assert {entry.name: why for entry in built_in if (why := defect_of(entry.load(), entry)) is not None} == {}
