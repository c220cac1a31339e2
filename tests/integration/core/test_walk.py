"""A reader who follows a job opens few modules: what it enters on a table with a log and an index only falls."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.tables.workload import Workload
from tools.walk import walk

# Modules that are entered, and functions that are called. A change that needs fewer lowers them.
BOUNDS = {"merge": (50, 445), "inspect": (45, 342), "compact": (45, 368), "catchup": (34, 185), "expire": (41, 300)}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    table = Workload(1, regions=1, base_rows=50).create(str(tmp_path_factory.mktemp("walk") / "t.lance"))
    table.put([*range(20)])
    table.flush()
    table.close()
    return table.uri


@pytest.mark.parametrize("job", BOUNDS)
def test_a_job_enters_few_modules(uri: str, tmp_path: Path, job: str) -> None:
    entered = walk(job, shutil.copytree(uri, str(tmp_path / "t.lance"))).to_json()
    modules, functions = BOUNDS[job]
    assert entered["modules"] <= modules, [step["module"] for step in entered["walk"]]
    assert entered["functions"] <= functions
