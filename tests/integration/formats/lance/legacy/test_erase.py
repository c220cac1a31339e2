"""erase on tables with the legacy MemWAL index: the same decisions, steps and certificate."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import run_job
from memwal_ops.errors import HeldError
from memwal_ops.formats.lance.jobs.legacy import erase as job
from memwal_ops.legacy import MemWalWriter
from tests.support.erasing import Erasing
from tests.support.tables import legacy_table, patterns

# In the base; updated by a log; in a log alone; not flushed.
GONE = [5, 250, 400]
WHERE = "id IN (5, 250, 400)"
NOW = {"older_than": "0s", "allow_unsafe": True}
LEFT = [number for number in [*range(300), 401] if number not in GONE]


def log(uri: str, region: str, generation: int, numbers: list[int], state: str) -> dict[str, Any]:
    folder = Path(uri, "wal", region, str(generation))
    folder.mkdir(parents=True)
    legacy_table.write_entry(folder / f"{0:020}.arrow", patterns.rows(numbers, blobs=False))
    version = int(lance.dataset(uri).version) + 1
    return legacy_table.mem_wal(region, generation, state, entries=legacy_table.entries([0]), version=version)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows in the base, with a text and a B-tree index; one MemWAL is merged, one is flushed."""
    uri = patterns.create(str(tmp_path_factory.mktemp("made") / "t.lance"), every_index=False, blobs=False)
    listed = [log(uri, "eu", 0, [250], "MERGED"), log(uri, "eu", 1, [400, 401], "FLUSHED")]
    legacy_table.put_details(uri, listed)
    return uri


@pytest.fixture
def uri(made: str, tmp_path: Path) -> str:
    return str(shutil.copytree(made, tmp_path / "t.lance"))


def erase(uri: str, **options: Any) -> Any:
    return run_job(uri, "erase", **{"where": WHERE, "apply": True, **NOW, **options})


def check_rows(uri: str) -> None:
    read = lance.dataset(uri).to_table().sort_by("id")
    assert read.equals(patterns.rows(LEFT, blobs=False).cast(read.schema))
    for number in (LEFT[0], LEFT[-1]):
        filtered = lance.dataset(uri).to_table(filter=f"btree = '{patterns.pattern(number, 'btree')}'")
        assert filtered.column("id").to_pylist() == [number]


@pytest.mark.long
def test_base_indexes_and_logs(uri: str) -> None:
    before = patterns.holders(uri, GONE)
    assert {path.split("/")[0] for path in before} >= {"data", "_indices", "wal"}
    plan = run_job(uri, "erase", where=WHERE)
    assert (plan.decision, plan.living) == ("planned", 2)
    assert {one.kind for one in plan.holders} >= {"fragment", "index", "log file"}
    report = erase(uri, certificate=f"{uri}.json")
    for _ in range(2):
        report = report if report.decision == "erased" else erase(uri, certificate=f"{uri}.json")
    assert report.decision == "erased", report.describe()
    assert patterns.holders(uri, GONE) == {}
    check_rows(uri)
    assert legacy_table.states_of(uri) == {("eu", 1): "MERGED"}
    assert run_job(uri, "verify").decision == "healthy"
    assert run_job(uri, "erase", check=f"{uri}.json").decision == "valid"
    assert erase(uri).done == {}


def test_what_others_keep_is_named(uri: str) -> None:
    listed = [
        *legacy_table.details_of(uri)[:1],
        log(uri, "us", 0, [400], "OPEN"),
        legacy_table.mem_wal("us", 1, "MERGED", mem_table="mem/us", wal=f"{uri}.elsewhere"),
    ]
    lance.write_dataset(patterns.rows([5], blobs=False), f"{uri}/mem/us")
    os.makedirs(f"{uri}.elsewhere")
    Path(f"{uri}.elsewhere", "0.arrow").write_bytes(b"")
    shutil.rmtree(f"{uri}/wal/eu")
    legacy_table.put_details(uri, [{**one, "entries": legacy_table.entries([0])} for one in listed])
    report = erase(uri)
    assert (report.decision, report.exit_code) == ("held", HeldError.exit_code)
    held = {one.kind: one.why for one in report.holders if one.blocks}
    assert held.keys() == {"log file", "MemTable", "log outside of the table"}
    assert "'owner-1' must flush it" in held["log file"]
    assert "delete it" in held["MemTable"]
    shutil.rmtree(f"{uri}.elsewhere")
    shutil.rmtree(f"{uri}/mem")
    assert {one.kind for one in erase(uri).holders if one.blocks} == {"log file"}
    assert not [path for path in patterns.holders(uri, GONE) if path.split("/")[0] in {"data", "_indices"}]


def test_mem_tables_of_trimmed_logs_stay_known(tmp_path: Path) -> None:
    """The index names them no more: their records do, until they are removed."""
    table = legacy_table.LegacyTable(str(tmp_path / "t.lance")).create()
    table.other("first", 0, "MERGED")
    uri = table.finish().uri
    for number in (1, 2):
        writer = MemWalWriter(uri, "r", "host")
        writer.append(legacy_table.rows({number: 5.0}))
        writer.seal()
        writer.flush()
        assert run_job(uri, "merge").decision == "merged"
    collect = {"apply": True, "reader_grace": "0s", "orphan_min_age": "0s", "allow_unsafe": True}
    assert run_job(uri, "gc", **collect).drained == 3
    for _ in range(2):  # the versions that list its log as unmerged expire; then the log goes
        report = erase(uri, where="id = 1")
    assert not [path for path in Path(uri, "wal/r/0").rglob("*") if path.is_file()]
    assert {(one.kind, one.name) for one in report.holders if one.blocks} == {("MemTable", "mem/r/0/")}
    assert "mem/r/0, where gc deletes nothing" in " ".join(run_job(uri, "gc").describe().split())
    shutil.rmtree(Path(uri, "mem/r/0"))
    assert erase(uri, where="id = 1").decision == "erased", "what is left was searched"
    assert "mem/r/0" not in run_job(uri, "gc").describe()


@pytest.fixture
def erasing(made: str) -> Erasing:
    return Erasing(job.apply, made, WHERE, GONE, check_rows, runs=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_killed_and_run_again(erasing: Erasing, tmp_path: Path, part: float) -> None:
    erasing.killed_at(tmp_path, [int(len(erasing.calls(tmp_path)) * part)])


def test_a_version_that_a_killed_run_did_not_publish_goes(erasing: Erasing, tmp_path: Path) -> None:
    """Nothing else of the run that follows would delete its manifest, so that it would wait for ever."""
    # A few calls before a version is published, pylance reads what is to become it.
    published = [at for at, name in enumerate(erasing.calls(tmp_path), 1) if name == "put_if_absent" and at > 15]
    for at in published:
        uri = str(shutil.copytree(erasing.made, tmp_path / f"{at}.lance"))
        erasing.kill(uri, at - 3)
        if list(Path(uri, "_versions").glob("d*.manifest")):
            erasing.finish(uri)
            return
    raise AssertionError(f"no detached version is left by a run that is killed before {published}")


@pytest.mark.campaign
def test_killed_at_every_call_and_run_again(erasing: Erasing, tmp_path: Path) -> None:
    calls = len(erasing.calls(tmp_path))
    erasing.killed_at(tmp_path, range(1, calls, max(1, calls // 60)))
