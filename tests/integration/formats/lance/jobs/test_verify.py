"""verify finds each kind of damage, names place and remedy, and calls a table healthy that is."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader, LanceFileWriter

from memwal_ops import open_table, run_job
from memwal_ops.core.figures import Figures
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.memwal import RegionWriter, create_mem_wal
from memwal_ops.supervisor.observe.findings import writer_findings
from tests.integration.formats.lance.jobs.verify_tables import DAMAGES, build, waiting
from tests.support.gc_options import AT_ONCE
from tests.support.run_cli import contents, run_here
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.tables.lsm_table import LsmTable

KEYS = {"severity", "check", "place", "evidence", "consequence", "remedy", "runbook"}
ROOT = Path(__file__).parents[5]


def verified(uri: str, **options: Any) -> dict[str, Any]:
    """The document of a verification, which changes nothing and says the same in its exit code and its decision."""
    before = contents(uri)
    report = run_job(uri, "verify", **options)
    assert contents(uri) == before
    document = report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert report.describe()
    worst = {one["severity"] for one in document["findings"]}
    assert document["decision"] == ("findings" if worst - {"info"} else "healthy")
    assert report.exit_code == (9 if "error" in worst else 0)
    for one in document["findings"]:
        assert one.keys() == KEYS
        assert all(one[key] for key in KEYS - {"runbook"}), one
        assert one["runbook"] is None or (ROOT / one["runbook"]).exists()
    return document


def checks(uri: str, **options: Any) -> dict[str, str]:
    """Per check of a finding its severity."""
    return {one["check"]: one["severity"] for one in verified(uri, **options)["findings"]}


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    table = build(request.param, tmp_path_factory.mktemp("whole") / "t.lance")
    yield table
    table.close()


@pytest.fixture
def copy(whole: LsmTable, tmp_path: Path) -> tuple[str, str]:
    """A copy, and a region of it that has unmerged generations."""
    return damage.copy_table(whole.uri, str(tmp_path / "t.lance")), whole.regions[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("deep", [False, True])
def test_a_table_is_healthy_through_its_life(tmp_path: Path, kind: type[LsmTable], deep: bool) -> None:
    table = build(kind, tmp_path / "t.lance")
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    for job in ("merge", "catchup", "snapshot", "compact"):
        run_job(table.uri, job)
        assert verified(table.uri, deep=deep)["decision"] == "healthy", job
    run_job(table.uri, "gc", apply=True, **{**AT_ONCE, "manifest_retention": 1})
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    table.put([1])
    table.flush()
    assert verified(table.uri, deep=deep)["decision"] == "healthy"
    table.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("harm", "check", "severity"), [pytest.param(*one[1:], id=one[0]) for one in DAMAGES])
def test_each_damage_is_found(
    copy: tuple[str, str], harm: Callable[[str, str], Any], check: str, severity: str
) -> None:
    uri, region = copy
    harm(uri, region)
    assert checks(uri).get(check) == severity


@pytest.mark.parametrize("whole_log", [False, True])
def test_a_region_that_is_gone_is_not_healthy(
    copy: tuple[str, str], whole_log: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it had not merged is nowhere; a clone has the progress of its table, and never had its regions."""
    uri, region = copy
    run_job(uri, "merge")
    clone = str(tmp_path / "clone.lance")
    lance.dataset(uri).shallow_clone(clone, lance.dataset(uri).version)
    shutil.rmtree(Path(uri, "_mem_wal", "" if whole_log else region))
    assert checks(uri)["progress_of_unknown_region"] == "warning"
    assert "PROBLEM: what" in run_job(uri, "inspect").describe()
    assert checks(clone)["progress_of_unknown_region"] == "info"
    assert "PROBLEM" not in run_job(clone, "inspect").describe()
    checked = run_here(capfd, "check", "--nagios", uri)
    assert checked.code == 1, checked.out
    assert "had not merged is lost" in checked.out
    page = "runbooks/alerts/MemwalOpsRegionsGone.md"
    found = [one for one in verified(uri)["findings"] if one["check"] == "progress_of_unknown_region"]
    polled = Figures(open_table(uri).jobs["merge"].job.backlog(open_table(uri)), "lance")
    (told,) = writer_findings({"uri": uri, "format": "lance", "backlog": polled.values})
    assert {one["runbook"] for one in [*found, told]} == {page}
    exported = {metric.exported: polled.values.get(name) for name, metric in polled.metrics.items()}
    assert exported["regions_gone"] == len(found)
    assert run_here(capfd, "check", "--nagios", clone).code == 0


def test_keys_that_stand_twice_are_found(tmp_path: Path) -> None:
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    row = lance.dataset(table.uri).take([0])
    lance.write_dataset(row, table.uri, mode="append")
    assert checks(table.uri) == {}
    assert checks(table.uri, deep=True) == {"duplicate_keys": "error"}


def test_a_key_in_two_regions_is_found(tmp_path: Path) -> None:
    table = Workload(5, regions=2, base_rows=10).create(str(tmp_path / "t.lance"))
    rows = lance.dataset(table.uri).take([0])
    for region in table.regions:
        with lance.dataset(table.uri).mem_wal_writer(region) as writer:
            writer.put(rows)
    table.close()
    assert checks(table.uri) == {}
    assert checks(table.uri, deep=True) == {"shared_keys": "error"}


def test_a_table_that_lost_all_rows_is_told(tmp_path: Path) -> None:
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    lance.dataset(table.uri).delete("true")
    assert checks(table.uri)["version_emptied"] == "warning"


def test_the_command(copy: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    uri, region = copy
    outcome = run_here(capfd, "verify", uri, "--json")
    assert (outcome.code, outcome.document["decision"]) == (0, "healthy")
    damage.remove_generation(uri, region, waiting(uri, region))
    outcome = run_here(capfd, "verify", uri)
    assert outcome.code == 9
    assert "ERROR generation_missing" in outcome.out
    assert "runbooks/errors/13-generation_missing.md" in outcome.out
    limited = run_here(capfd, "verify", uri, "--json", "--max-findings", "1")
    assert len(limited.document["findings"]) <= sum(limited.document["counts"].values())


# -- rows: what --deep compares with them


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "check"), [("bloom_filter.bin", "key_filter"), ("_pk_index/page_data.lance", "key_index")]
)
def test_key_files_that_lack_keys_are_found(tmp_path: Path, name: str, check: str) -> None:
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    region = table.regions[0]
    path = damage.generation_path(table.uri, region, waiting(table.uri, region)) / name
    merged = damage.generation_path(table.uri, region, 1) / name
    foreign = bytes(path.stat().st_size) if check == "key_filter" else merged.read_bytes()
    for content in (foreign, b"", path.read_bytes()[:-9]):
        path.write_bytes(content)
        without_rows = "key_filter" if check == "key_filter" else "" if content == foreign else "generation_index"
        assert [*checks(table.uri)] == [*filter(None, [without_rows])]
        assert checks(table.uri, deep=True) == {check: "error"}
    path.unlink()
    assert checks(table.uri, deep=True) == {}, "releases and key types without one"


def test_a_key_index_that_has_rows_twice(tmp_path: Path) -> None:
    """As pylance 9.0 writes it for replayed rows (docs/upstream.md): old clients fail, and a merge ends that."""
    table = build(Workload, tmp_path / "t.lance")
    table.close()
    region = table.regions[0]
    path = damage.generation_path(table.uri, region, waiting(table.uri, region)) / "_pk_index/page_data.lance"
    pages = LanceFileReader(str(path)).read_all().to_table()
    with LanceFileWriter(str(path), pages.schema, version="2.0") as writer:
        writer.write_batch(pa.concat_tables([pages, pages.slice(0, 1)]).sort_by("values"))
    assert checks(table.uri) == {}
    assert checks(table.uri, deep=True) == {"key_index": "warning"}
    assert [run_job(table.uri, job).decision for job in ("merge", "catchup")] == ["merged", "caught_up"]
    run_job(table.uri, "expire", apply=True, older_than=timedelta(0), keep=1, allow_unsafe=True)
    run_job(table.uri, "gc", apply=True, **{**AT_ONCE, "manifest_retention": 1})
    assert not path.exists()
    assert checks(table.uri, deep=True) == {}


KEYS_OF = {
    "text": [("a", pa.string(), ["x", "y", "x", ""])],
    "two": [("a", pa.int32(), [1, -1, 1, 2]), ("b", pa.string(), ["x", "y", "x", "z"])],
    "float": [("a", pa.float64(), [float("nan"), 0.0, -0.0, 1.5])],
}


@pytest.mark.parametrize("kind", KEYS_OF)
def test_key_files_of_every_key_type(tmp_path: Path, kind: str) -> None:
    """No finding where nothing is wrong: files of the region layout's writer, which have superseded rows as well."""
    uri = str(tmp_path / "t.lance")
    fields = []
    for position, (name, type_, _) in enumerate(KEYS_OF[kind], 1):
        settings = {"lance-schema:unenforced-primary-key:position": str(position)}
        fields.append(pa.field(name, type_, nullable=False, metadata=settings))
    schema = pa.schema([*fields, pa.field("value", pa.string())])
    lance.write_dataset(schema.empty_table(), uri)
    create_mem_wal(uri)
    with RegionWriter(uri) as writer:
        writer.put(pa.table([*(values for _, _, values in KEYS_OF[kind]), ["1", "2", "3", "4"]], schema=schema))
    assert verified(uri, deep=True)["decision"] == "healthy"
    paths = [*Path(uri).glob("_mem_wal/*/*_gen_1/bloom_filter.bin")]
    assert len(paths) == (kind != "float"), "no writer of pylance hashes floats"
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))
        assert checks(uri, deep=True)["key_filter"] == "error"


@pytest.mark.parametrize("how", ["overlap", "above"])
def test_row_ids_that_overlap_are_found(tmp_path: Path, how: str) -> None:
    table = Workload(3, regions=1, base_rows=40, stable_row_ids=True).create(str(tmp_path / "t.lance")).step(12)
    table.flush()
    table.close()
    run_job(table.uri, "merge")
    assert checks(table.uri, deep=True) == {}
    path = Path(table.uri, wire.newest_manifest(Files(table.uri))[0])
    found = decode_version_manifest(path.read_bytes())
    first, second = [one for one in found.manifest.fragments if one.HasField("inline_row_ids")][:2]
    if how == "overlap":
        second.inline_row_ids = first.inline_row_ids
        second.physical_rows = first.physical_rows
    else:
        found.manifest.next_row_id = 1
    path.write_bytes(encode_version_manifest(found))
    assert checks(table.uri, deep=True)["row_ids"] == "error"
