"""The public way to run a job: a URI or a table, options by name or as an object."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import memwal_ops
from memwal_ops.core.options import MaintenanceOptions, OptionError, Options, ValueType, describe
from memwal_ops.core.registry import all_job_specs
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.options import ExpireOptions, GcOptions, MaintainOptions, MergeOptions
from memwal_ops.memwal import RegionWriter
from tests.support.gc_options import IMMEDIATE
from tests.support.run_cli import contents
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.templates import copy_of
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    return copy_of(written, str(tmp_path / "t.lance"))


def written(uri: str) -> Workload:
    made = Workload(3, regions=2, base_rows=30).create(uri).step(12)
    made.close()
    return made


def test_a_job_by_its_name(table: Workload) -> None:
    report = memwal_ops.run_job(table.uri, "merge", max_bytes="64MiB", max_generations=3)
    assert report.decision == "merged"
    assert report.to_json()["decision"] == "merged"
    assert report.describe().startswith("merged: ")
    assert_same(read_base(table.uri), table.expected())


def test_deleting_jobs_only_plan_by_default(table: Workload) -> None:
    opened = memwal_ops.open_table(table.uri)
    memwal_ops.run_job(opened, "merge", MergeOptions())
    planned = memwal_ops.run_job(opened.newest(), "gc", GcOptions())
    assert planned.to_json()["apply"] is False
    assert memwal_ops.run_job(opened, "merge", apply=False).decision == "dry_run"


NOT_BOOLEANS = ["no", "false", "true", "True", "", "{{ params.apply }}", 0, 1, 1.0, [], {}]


@pytest.mark.parametrize("given", NOT_BOOLEANS, ids=repr)
def test_only_booleans_are_booleans(table: Workload, given: Any) -> None:
    """A text that is not empty counts as true in Python: ``apply="no"`` must not delete."""
    before = contents(table.uri)
    for job in ("gc", "expire", "merge", "maintain"):
        with pytest.raises(InvalidUsageError, match="apply must be True, False or None, not "):
            memwal_ops.run_job(table.uri, job, apply=given)
    for options in ({"apply": given}, {"dry_run": given}, {"gc": {"allow_unsafe": given}}):
        with pytest.raises(InvalidUsageError, match="must be True or False, not ") as refused:
            memwal_ops.run_job(table.uri, "maintain", options)
        assert "as a boolean" in refused.value.remedy
    for name in ("durable", "indexed", "tombstones"):
        with pytest.raises(InvalidUsageError, match=f"{name} must be True or False"):
            RegionWriter(table.uri, **{name: given})
    assert contents(table.uri) == before


def test_no_flag_of_any_job_takes_another_value() -> None:
    def flags(options: type[Options]) -> Iterator[tuple[type[Options], str]]:
        for option in describe(options):
            if option.group is not None:
                yield from flags(option.group)
            elif option.kind is ValueType.FLAG:
                yield options, option.name

    known = {flag for specs in all_job_specs().values() for spec in specs.values() for flag in flags(spec.options)}
    assert len(known) > 20
    for options, name in known:
        for given in ("no", 0, None):
            with pytest.raises(OptionError, match=f"{name} must be True or False, not "):
                options.read({name: given})
            with pytest.raises(OptionError, match=f"{name} must be True or False, not "):
                options(**{name: given})


def test_maintain_applies_what_its_command_applies(table: Workload) -> None:
    """``apply=True`` is ``--apply``; None acts and deletes nothing; False changes nothing."""
    careless = {"expire": ExpireOptions(timedelta(0), allow_unsafe=True), "gc": IMMEDIATE}

    def gc_step(**given: Any) -> dict[str, Any]:
        document = memwal_ops.run_job(table.uri, "maintain", **given).to_json()
        return next(step for step in document["steps"] if step["step"] == "gc")["report"]  # type: ignore[no-any-return]

    before = contents(table.uri)
    assert gc_step(apply=False, **careless)["apply"] is False
    assert gc_step(apply=False, options=MaintainOptions(apply=True, **careless))["apply"] is False  # type: ignore[arg-type]
    assert contents(table.uri) == before
    assert gc_step(**careless)["deleted"]["objects"] == 0
    assert gc_step(apply=True, **careless)["deleted"]["objects"] > 0
    assert gc_step(apply=True, options=MaintainOptions())["apply"] is True
    assert gc_step(options=MaintainOptions(apply=True))["apply"] is True
    assert_same(read_base(table.uri), table.expected())
    with pytest.raises(InvalidUsageError, match="contradict"):
        memwal_ops.run_job(table.uri, "maintain", MaintainOptions(dry_run=True), apply=True)


def test_maintain_takes_the_options_of_all_formats(table: Workload) -> None:
    report = memwal_ops.run_job(table.uri, "maintain", MaintenanceOptions(dry_run=True))
    assert report.decision == "dry_run"


def test_classes_of_one_name_are_distinguished(table: Workload) -> None:
    @dataclass(frozen=True)
    class MergeOptions(Options):
        """Another format's."""

    with pytest.raises(InvalidUsageError, match=r"lance\.options\.MergeOptions, not .*test_run_job"):
        memwal_ops.run_job(table.uri, "merge", MergeOptions())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("job", "given", "says"),
    [
        ("compost", {}, "compost does not apply to .*, a lance table"),
        ("merge", {"max_byte": 3}, "There is no option 'max_byte'; there are: regions, engine, max_bytes"),
        ("merge", {"max_bytes": "3 furlongs"}, "max_bytes: '3 furlongs'"),
        ("merge", {"max_bytes": 0}, "max_bytes must be at least 1B, not 0"),
        ("merge", {"options": GcOptions()}, "The options of merge are MergeOptions, not GcOptions"),
        ("merge", {"options": MergeOptions(), "max_bytes": 3}, "as an object or by name, not both"),
    ],
)
def test_what_is_refused(table: Workload, job: str, given: dict[str, object], says: str) -> None:
    version = memwal_ops.open_table(table.uri).revision
    with pytest.raises(InvalidUsageError, match=says):
        memwal_ops.run_job(table.uri, job, **given)  # type: ignore[arg-type]
    assert memwal_ops.open_table(table.uri).revision == version


def test_a_refusal_names_the_options_as_python_spells_them(table: Workload) -> None:
    for given in ({"max_byte": 3}, {"max_bytes": "many"}, {"options": {"max_bytes": "many"}}):
        with pytest.raises(memwal_ops.InvalidUsageError) as refused:
            memwal_ops.run_job(table.uri, "merge", **given)  # type: ignore[arg-type]
        assert "--" not in refused.value.remedy
        assert refused.value.remedy.startswith("The options of merge: regions, engine, max_bytes, ")


def test_options_as_a_configuration_file_has_them(table: Workload) -> None:
    report = memwal_ops.run_job(table.uri, "maintain", {"merge": {"max_bytes": "64MiB"}, "gc": {"max_deletes": 3}})
    assert report.decision == "maintained"
    assert_same(read_base(table.uri), table.expected())
