"""The package shipped to a cluster as docs/spark.md says, tables in a bucket: workers have no memwal-ops installed."""

from __future__ import annotations

import json
import shutil
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from tests.support.spark_cluster import Cluster, kill, running
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import PATIENCE
from tools import dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    Bucket = tuple[str, dict[str, str]]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.s3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist.build(Path.cwd(), tmp_path_factory.mktemp("dist"), "")[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster"), workers=1, python_path="") as made:
        yield made


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An environment that has what memwal-ops needs, but not memwal-ops."""
    venv.create(tmp_path / "bare", symlinks=True)
    folder = next((tmp_path / "bare" / "lib").glob("python*")) / "site-packages"
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "memwal" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return tmp_path / "bare"


def run(cluster: Cluster, log: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a command."""
    driver = cluster.start(log, "-m", "memwal_ops", *arguments, **settings)
    try:
        out, _ = driver.communicate(timeout=PATIENCE)
    finally:
        kill(driver)
    assert out, log.read_text()[-3000:]
    return driver.returncode, json.loads(out)


def options_of(options: dict[str, str]) -> list[str]:
    return [word for one in options.items() for word in ("--storage-option", "=".join(one))]


def check_jobs(cluster: Cluster, folder: Path, bucket: str, options: dict[str, str], **settings: str) -> None:
    """Catch up and compact one table in the bucket, and merge another one."""
    made = PlainTable(str(folder / "t.lance")).create(fragments=4, rows=20)
    uri, log = f"{bucket}/t.lance", folder / "driver.log"
    for fragment in made.dataset.get_fragments():
        dataset = lance.write_dataset(fragment.to_table(), uri, mode="append", storage_options=options)
        if fragment.fragment_id == 0:
            dataset.create_scalar_index("id", "BTREE")
    for job, decision in (("catchup", "caught_up"), ("compact", "compacted"), ("verify", "healthy")):
        more = ["--deep"] if job == "verify" else []
        code, report = run(cluster, log, job, uri, *more, *options_of(options), **settings)
        assert (code, report["decision"]) == (0, decision), (report, log.read_text()[-2000:])
        engines = {one["engine"] for one in report["indexes"]} if job == "catchup" else {report["engine"]}
        assert engines == {"spark"}
    rows = lance.dataset(uri, storage_options=options).to_table(columns=["id"])
    assert rows["id"].to_pylist() == [*made.model]
    logged = Workload(5, regions=2, base_rows=50).create(f"{bucket}/m.lance", options).step(3)
    logged.close()
    code, report = run(cluster, log, "merge", logged.uri, *options_of(options), **settings)
    assert (code, report["decision"], report["engine"]) == (0, "merged", "spark"), report
    assert_same(read_base(logged.uri, options), logged.model.expected(), seed=logged.seed)
    assert run_job(open_table(uri, options), "verify", answers=True).decision == "healthy"


def test_by_py_files(
    cluster: Cluster,
    bare: Path,
    wheel: Path,
    bucket: tuple[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wheel is a zip file with another name, by which PySpark does not know it. Without it, the run is refused."""
    uri, options = bucket
    monkeypatch.setenv("PYSPARK_PYTHON", str(bare / "bin" / "python"))
    table = PlainTable(str(tmp_path / "refused.lance")).create(fragments=2, rows=10)
    code, report = run(cluster, tmp_path / "log", "compact", table.uri)
    assert (code, report["error"]["reason"]) == (45, "spark_unavailable")
    assert "No module named 'memwal_ops'" in report["error"]["message"]
    zipped = shutil.copyfile(wheel, tmp_path / "memwal_ops.zip")
    check_jobs(cluster, tmp_path, uri, options, spark_submit_pyFiles=str(zipped))


def test_by_archives(
    cluster: Cluster,
    bare: Path,
    wheel: Path,
    bucket: tuple[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As venv-pack makes them: an environment that is unpacked where the executor runs."""
    uri, options = bucket
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(next((bare / "lib").glob("python*")) / "site-packages")
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed_env:
        packed_env.add(bare, ".")
    check_jobs(
        cluster, tmp_path, uri, options, spark_archives=f"{archive}#env", spark_pyspark_python="./env/bin/python"
    )
