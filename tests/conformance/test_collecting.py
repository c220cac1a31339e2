"""gc of every format: what its report counts, its limits, and a table that another one took the place of."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.core import collector
from memwal_ops.errors import TableReplacedError
from tests.conformance.formats import FormatUnderTest, Snapshot, TableUnderTest, opened
from tests.conformance.test_running import run, run_job, steps_of
from tests.support.run_cli import contents

if TYPE_CHECKING:
    from pathlib import Path

    from memwal_ops.core.candidates import CollectionReport

KEYS = {
    *("decision", "apply", "counts", "bytes_reclaimable", "deleted", "delete", "held", "unknown", "truncated"),
    *("failed", "drained", "limited", "replaced", "warnings", "seconds", "run_id"),
}


@pytest.fixture
def collectable(kind: FormatUnderTest, made: TableUnderTest) -> TableUnderTest:
    """A table on which all jobs ran but gc."""
    for job in steps_of(opened(made)):
        if job != "gc":
            assert run(kind, opened(made), job).exit_code == 0
    return made


def collect(
    kind: FormatUnderTest, made: TableUnderTest, *, apply: bool = True, **options: Any
) -> CollectionReport[Any]:
    table = opened(made)
    report: Any = run_job(table, "gc", replace(kind.options_of(table, "gc"), **options), apply=apply)
    return report  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
def test_the_report_counts_what_went(kind: FormatUnderTest, collectable: TableUnderTest, tmp_path: Path) -> None:
    file = tmp_path / "plan.jsonl"
    planned = collect(kind, collectable, apply=False, plan_file=str(file), limit=10_000).to_json()
    assert planned.keys() >= KEYS
    assert planned["decision"] == "planned"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = Counter((line["kind"], line["verdict"]) for line in lines)
    assert told == {
        (name, verdict): count
        for name, verdicts in planned["counts"].items()
        for verdict, count in verdicts.items()
        if count
    }
    assert len(lines) == sum(len(planned[verdict]) for verdict in ("delete", "held", "unknown"))
    for one in planned["delete"]:
        assert one["proof"], one
    for one in (*planned["held"], *planned["unknown"]):
        assert one["because"], one
    assert planned["bytes_reclaimable"] == sum(one["bytes"] for one in planned["delete"]) > 0
    before = contents(collectable.uri)
    done = collect(kind, collectable).to_json()
    gone = before.keys() - contents(collectable.uri).keys()
    assert done["decision"] == "deleted"
    assert done["deleted"] == {"objects": len(gone), "bytes": sum(len(before[path][1]) for path in gone)}
    again = collect(kind, collectable).to_json()
    assert (again["decision"], again["deleted"]["objects"]) == ("nothing_to_delete", 0)
    assert collectable.read() == collectable.expected()


@pytest.mark.sampled(3)
def test_no_more_is_deleted_than_allowed(kind: FormatUnderTest, collectable: TableUnderTest) -> None:
    for _ in range(1000):
        before = contents(collectable.uri)
        report = collect(kind, collectable, max_deletes=2)
        gone = before.keys() - contents(collectable.uri).keys()
        assert len(gone) == report.deleted_objects <= 2
        assert report.deleted_bytes == sum(len(before[path][1]) for path in gone)
        assert collectable.read() == collectable.expected()
        if not report.limited:
            break
        assert "--max-deletes ended this run" in " ".join(report.describe().split())
    assert collect(kind, collectable).decision == "nothing_to_delete"


@pytest.mark.sampled(3)
def test_a_table_that_took_its_place_is_left_alone(
    kind: FormatUnderTest, made: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup from before the merge is restored after gc has proven its first batch, and before it deletes it."""
    backup = Snapshot.of(made)
    for job in steps_of(opened(made)):
        if job != "gc":
            run(kind, opened(made), job)
    real = collector.delete_proven
    stood: dict[str, Any] = {}

    def overtaken(*arguments: Any) -> Any:
        if not stood:
            shutil.rmtree(made.uri)
            shutil.copytree(backup.backup, made.uri, copy_function=shutil.copy)
            stood.update(contents(made.uri))
        return real(*arguments)

    monkeypatch.setattr(collector, "delete_proven", overtaken)
    report = collect(kind, made)
    assert stood
    assert (report.decision, report.exit_code) == ("incomplete", TableReplacedError.exit_code)
    assert report.deleted_objects == 0
    assert stood.keys() <= contents(made.uri).keys()
    assert made.read() == made.expected()
