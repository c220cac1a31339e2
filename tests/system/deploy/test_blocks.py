"""The blocks of docs/ and runbooks/ that can be run are run: here, or by the test that ``RUN_BY`` names.

``docs/answers`` has the pages that people come to from a search: what they copy must work.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import yaml

from memwal_ops import open_table, run_job
from memwal_ops.formats import zeppelin
from memwal_ops.memwal import read
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import discover
from tests.support.catalog_server import TOKEN, catalog_server
from tests.support.run_cli import run_here
from tests.support.runbook import commands
from tests.support.tables.legacy_table import LegacyTable, base_rows, rows, states_of
from tests.support.tables.plain import PlainTable
from tests.system.drills.error_pages import ROOT
from tests.system.drills.lines import run_line

HERE = "tests/system/deploy/test_blocks.py"
# Pages with blocks that can be run, and the tests that run them; else, why no test can.
RUN_BY = {
    "docs/adding-a-job.md": "tests/conformance/test_docs.py",
    "docs/airflow.md": "tests/system/airflow/test_docs.py",
    "docs/answers/disk-keeps-growing.md": HERE,
    "docs/answers/index-recall-after-append.md": HERE,
    "docs/answers/lance-compaction.md": HERE,
    "docs/answers/lancedb-optimize.md": HERE,
    "docs/api.md": "tests/unit/cli/test_api_page.py",
    "docs/coming-from.md": HERE,
    "docs/configuration.md": "tests/integration/supervisor/test_commands.py",
    "docs/erase.md": HERE,
    "docs/events.md": "tests/integration/supervisor/test_event_pages.py",
    "docs/formats/adding-one.md": "tests/conformance/test_docs.py",
    "docs/formats/dynamodb.md": "tests/integration/formats/lance/jobs/migrate/test_migrate_store.py",
    "docs/formats/lance.md": HERE,
    "docs/formats/lm-diskann-operation.md": HERE,
    "docs/formats/zeppelin.md": HERE,
    "docs/http.md": "needs a service that runs, and its token: tests/system/supervisor/test_http_api.py",
    "docs/index-answers.md": HERE,
    "docs/index.md": HERE,
    "docs/install.md": "tests/system/deploy/test_systemd.py",
    "docs/legacy-memwal.md": HERE,
    "docs/monitoring.md": "tests/system/deploy/test_monitoring.py",
    "docs/operations.md": "tests/system/deploy/test_pages.py",
    "docs/spark.md": "tests/system/spark/test_docs.py",
    "docs/supervisor.md": HERE,
    "docs/upstream.md": "tests/integration/contracts/test_upstream.py",
    "runbooks/README.md": "sets variables of the reader's own table",
}
URI = "/data/lancedb/docs.lance"


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [one for one in found if not languages or one[0] in languages]


def run_python(page: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """Run one Python block of a page; the names that it leaves."""
    (_, text) = blocks(page, "python")[number]
    exec(compile(text, page, "exec"), names)
    return names


def test_every_page_with_blocks_has_a_test_that_runs_them() -> None:
    """Runbooks: each page is named by a drill."""
    drills = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "runbooks").rglob("*.md")]:
        page = str(path.relative_to(ROOT))
        if not blocks(page, "sh", "python", "yaml", "toml", "ini", "console"):
            assert page not in RUN_BY
        elif page.startswith("docs/") or page in RUN_BY:
            by = RUN_BY[page]
            if by.startswith("tests/"):
                assert path.name in (ROOT / by).read_text(), page
        elif path.parent.name == "runbooks":
            assert path.stem in drills, page
        # Those of errors and alerts are all run: tests/system/drills/test_error_pages.py, test_alerts.py.


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainTable:
    """A LanceDB folder's table with indexes that are behind, and the variables of the pages."""
    made = PlainTable(str(tmp_path / "lancedb/docs.lance")).create(fragments=3, rows=300, index=True)
    made.dataset.create_index("vector", "IVF_PQ", num_partitions=2, num_sub_vectors=2)
    for _ in range(4):
        made.append(20)
    made.delete(3, 4)
    monkeypatch.setenv("FILE", next(iter(made.files("data"))).removeprefix("data/"))
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", [page for page in RUN_BY if page.startswith(("docs/answers/", "docs/index.md"))])
def test_what_people_copy_from_a_page_works(
    page: str, table: PlainTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Commands, Python and configurations, from top to bottom; and no row is lost by it."""
    for language, text in blocks(page, "sh", "python", "yaml"):
        here = text.replace("/data/lancedb", str(tmp_path / "lancedb"))
        if language == "python":
            exec(compile(here, page, "exec"), {})
            assert capfd.readouterr().out
        elif language == "yaml":
            (tmp_path / "memwal.yaml").write_text(here)
            assert run_here(capfd, "config", "check", str(tmp_path / "memwal.yaml")).code == 0
        else:
            for line in here.splitlines():
                outcome = run_line(capfd, line)
                assert outcome.code == 0, f"{line}\n{outcome}"
                assert outcome.out
    assert table.read() == table.model


@pytest.mark.long
def test_the_page_for_those_who_have_a_cron_job(
    table: PlainTable, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """docs/coming-from.md: the two looks, and the service with its configuration."""
    page = (ROOT / "docs/coming-from.md").read_text()
    database, by_catalog, service = commands(page)
    assert run_line(capfd, database.replace("/data/lancedb", str(tmp_path / "lancedb"))).code == 0
    with catalog_server() as server:
        server.tables["docs"] = table.uri
        line = by_catalog.replace("https://catalog.example.com", server.url).partition("   #")[0]
        shown = run_line(capfd, f"{line} --storage-option 'namespace.header.Authorization=Bearer {TOKEN}'")
    assert (shown.code, "update 2 indexes" in shown.out) == (0, True), shown
    ((_, settings),) = blocks("docs/coming-from.md", "yaml")
    (tmp_path / "memwal.yaml").write_text(
        f"state_dir: {tmp_path}/state\n{settings.replace('/data/lancedb', str(tmp_path / 'lancedb'))}"
    )
    assert run_line(capfd, f"{service} --once").code == 0
    assert len(table.dataset.get_fragments()) < 7
    assert table.read() == table.model
    for line in commands((ROOT / "docs/supervisor.md").read_text()):
        if line.startswith("memwal-ops service"):
            continue  # a service has to run: tests/system/supervisor/test_service_command.py
        shown = run_line(capfd, line.replace("orders", "docs"))
        assert (shown.code, "docs" in shown.out) == (0, True), shown


def test_the_writer_of_the_lance_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/formats/lance.md: a log is made, rows and deletions are put, and read."""
    monkeypatch.chdir(tmp_path)
    PlainTable("orders.lance").create(rows=40).mark_key()
    run_python(
        "docs/formats/lance.md", rows=PlainTable.batch([7, 90]), keys=pa.table({"id": pa.array([8, 90], pa.int64())})
    )
    assert {*read("orders.lance").scan(["id"]).to_table()["id"].to_pylist()} == {*range(40)} - {8}


def test_the_writer_and_the_queries_of_the_zeppelin_page(tmp_path: Path) -> None:
    """docs/formats/zeppelin.md."""
    ((_, text),) = blocks("docs/formats/zeppelin.md", "python")
    exec(compile(text.replace("/data/my_ns", str(tmp_path / "ns")), "zeppelin.md", "exec"), {})
    (found,) = zeppelin.query(str(tmp_path / "ns"), vector=[0.1] * 8, k=3, filter={"color": "red"})
    assert found["id"] == "vec-1"


def test_the_commands_of_the_pages_on_answers(
    table: PlainTable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/index-answers.md, runbooks/wrong-answers.md: an index is asked, built anew, and asked again."""
    monkeypatch.setenv("URI", table.uri)
    monkeypatch.setenv("INDEX", "vector_idx")
    outcome = run_line(capfd, "memwal-ops verify $URI --answers")
    assert outcome.code == 0
    assert re.search(
        r"Answers of \d+ indexes \(seed \d+, at most .* read\), beside a search without them:", outcome.out
    )
    for line in commands((ROOT / "runbooks/wrong-answers.md").read_text()):
        assert run_line(capfd, line).code == 0, line
    for _, text in blocks("docs/index-answers.md", "yaml"):
        given = yaml.safe_load(text)
        for job, settings in given.get("defaults", given)["jobs"].items():
            open_table(table.uri).jobs[job].options.read(settings["options"])


@pytest.mark.skipif(find_spec("numba") is None, reason="the extra memwal-ops[lm-diskann] is not installed")
def test_the_index_of_the_lm_diskann_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/formats/lm-diskann-operation.md: the library, an index that follows a table, and its copies."""
    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(3).random((200, 128), dtype=np.float32)
    page = "docs/formats/lm-diskann-operation.md"
    left = run_python(page, row_ids=np.arange(200, dtype=np.int64), vectors=vectors, queries=vectors[:2])
    assert left["found"][:, 0].tolist() == [0, 1]
    (tmp_path / "vectors.lmd").rename(tmp_path / "first.lmd")
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 128)
    lance.write_dataset(pa.table({"id": np.arange(200), "vec": column}), "rows.lance", enable_stable_row_ids=True)
    for line in commands((ROOT / page).read_text()):
        here = (
            line.partition("   ")[0].replace("s3://bucket/rows.lance", "rows.lance").replace("[--key id]", "--key id")
        )
        here = here.replace("/backup/vectors.lmd", "s3://bucket/vectors-monday").replace("s3://bucket", "copies")
        if here.startswith("memwal-ops snapshot copies"):
            (tmp_path / "vectors.lmd").rename(tmp_path / "second.lmd")
        outcome = run_line(capfd, here)
        assert outcome.code == 0, f"{here}\n{outcome}"
    assert run_job("vectors.lmd", "verify").decision == "healthy"


def test_the_ways_out_of_the_legacy_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/legacy-memwal.md: the writer of the old log, then the migration; a reader of a log in another format."""
    monkeypatch.chdir(tmp_path)
    made = LegacyTable("orders.lance").create()
    made.other("first", 0, "MERGED")
    made.finish()
    run_python("docs/legacy-memwal.md", 1, rows=rows({1: 10.0, 50: 5.0}))
    assert ("eu", 0) in states_of("orders.lance")
    monkeypatch.setenv("URI", "orders.lance")
    wanted = {**{number: float(number) for number in range(20)}, 1: 10.0, 50: 5.0}
    for line in commands((ROOT / "docs/legacy-memwal.md").read_text()):
        outcome = run_line(capfd, f"{line.partition('   ')[0]} --flushed-means unmerged" if "migrate" in line else line)
        assert outcome.code == 0, f"{line}\n{outcome}"
    assert base_rows("orders.lance") == wanted
    reader = run_python("docs/legacy-memwal.md", 0, decode=lambda data: data.decode())["read"]
    log = {"segment-4": b"four", "segment-7": b"seven"}
    assert [*reader(log, [7, 4])] == ["seven", "four"]


def test_the_configurations_of_the_spark_page(tmp_path: Path) -> None:
    """docs/spark.md; its commands and its Python run with Java (tests/system/spark)."""
    ((_, text),) = blocks("docs/spark.md", "yaml")
    (tmp_path / "memwal.yaml").write_text(text)
    ((found),) = discover(load_settings(str(tmp_path / "memwal.yaml"), {}).tables).tables
    for job in ("compact", "catchup"):
        options = found.settings.jobs[job].options
        assert (options["engine"], options["master"]) == ("auto", "yarn")


def test_erase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """docs/erase.md: a plan, a first run, the run after the grace time, and the check of what it wrote."""
    monkeypatch.chdir(tmp_path)
    lance.write_dataset(pa.table({"user_id": [17, 18], "name": ["ann", "bob"]}), "users.lance")
    lance.dataset("users.lance").create_scalar_index("name", "BTREE", name="by_name")
    lines = re.findall(r"^\$ memwal-ops (.*)$", (ROOT / "docs/erase.md").read_text(), re.MULTILINE)
    plan, first, check = map(shlex.split, lines)
    assert run_here(capfd, *plan).out.startswith("planned: 1 living row would be deleted")
    assert run_here(capfd, *first).out.startswith("waiting")
    assert run_here(capfd, *first, "--older-than", "0s", "--allow-unsafe").out.startswith("erased")
    assert run_here(capfd, *check).out.startswith("valid: proof.json")
