"""The document of every job's report holds JSON types alone, in plans and in runs, of whole and of damaged tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import GenerationMissingError
from tests.support.gc_options import AT_ONCE
from tests.support.json_types import assert_json
from tests.support.tables.workload import Workload

# With these a report says most.
VALUES: dict[str, dict[str, Any]] = {
    "adopt": {"answer": "unmerged"},
    "erase": {"where": "id = 1", "older_than": "0s", "allow_unsafe": True},
    "expire": {"older_than": "0s", "allow_unsafe": True},
    "gc": AT_ONCE,
    "maintain": {"gc": AT_ONCE, "expire": {"older_than": "0s", "allow_unsafe": True}},
}


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Generations that are merged, some that wait, one index behind."""
    made = Workload(3, base_rows=60).create(str(tmp_path_factory.mktemp("reports") / "t.lance")).step(15)
    made.close()
    run_job(made.uri, "merge", max_generations=1)
    made.step(15)
    made.close()
    return made


@pytest.mark.sampled(6)
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("apply", [False, True], ids=["plan", "apply"])
@pytest.mark.parametrize("job", sorted(job_specs("lance")))
def test_the_document_of_a_report(waiting: Workload, tmp_path: Path, job: str, apply: bool, damaged: bool) -> None:
    uri = str(tmp_path / "t.lance")
    shutil.copytree(waiting.uri, uri)
    region = open_table(uri).regions.region_ids[0]
    if damaged:
        generation = max((tmp_path / "t.lance/_mem_wal" / str(region)).glob("*_gen_*"), key=lambda one: one.name[9:])
        shutil.rmtree(generation)
    values = {"target": str(region)} if job == "why" else VALUES.get(job, {})
    spec = job_specs("lance")[job]
    if damaged and job == "expire":  # its versions may be all that has the rows
        with pytest.raises(GenerationMissingError):
            run_job(uri, job, apply=apply, **values)
        return
    report = run_job(uri, job, apply=None if spec.reads_only else apply, **values)
    assert type(report.exit_code) is int
    assert_json(report.to_json())
