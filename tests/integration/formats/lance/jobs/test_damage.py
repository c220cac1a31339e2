"""A damaged file of the base table is named, with the code for corruption, whichever job comes upon it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import ObjectNotFoundError, ReadOnlyStoreError, StorageCredentialsError, StorageError
from memwal_ops.formats.lance.files.version_files import VERSION_HINT
from memwal_ops.formats.lance.retention.damage import name_damage
from tests.support.run_cli import contents, run_here
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload
from tests.unit.storage.test_local import unprivileged

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_file_that_may_not_be_read_is_named() -> None:
    """pylance's error named none, and read like one of writing: the remedy was to give write permission."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        for first in (0, 10):
            lance.write_dataset(pa.table({"id": range(first, first + 10)}), str(folder / "t"), mode="append")
        table, [file, _] = open_table(str(folder / "t")), sorted((folder / "t/data").glob("*.lance"))
        file.chmod(0)
        with unprivileged():
            named = name_damage(table, ReadOnlyStoreError("Cannot write compacted fragments: Permission denied."))
        assert (type(named), file.name in str(named)) == (StorageCredentialsError, True)
        file.chmod(0o644)
        with unprivileged():
            assert name_damage(table, ReadOnlyStoreError("no")).reason == "read_only_store"
    finally:
        shutil.rmtree(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def inverted(path: Path) -> None:
    path.write_bytes(bytes(one ^ 0xFF for one in path.read_bytes()))


def scalar(path: Path) -> None:
    path.write_bytes(b"3")


DATA, INDEX, TAG, BRANCH = "data/*.lance", "_indices/*/page_data.lance", "_refs/tags/*.json", "_refs/branches/*.json"
CASES: list[tuple[str, Callable[[Path], None], str, int]] = [
    *((TAG, harm, job, 9) for harm in (cut, emptied, scalar, inverted) for job in ("gc", "expire", "maintain")),
    (BRANCH, cut, "gc", 9),
    (BRANCH, emptied, "expire", 9),
    *((DATA, harm, job, 9) for harm in (cut, emptied, inverted, Path.unlink) for job in ("merge", "compact")),
    (DATA, cut, "maintain", 9),
    (INDEX, cut, "compact", 9),
    (INDEX, Path.unlink, "compact", 9),
    (INDEX, inverted, "catchup", 18),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table with a tag, a branch, an index and generations that wait."""
    table = Workload(1, regions=2, base_rows=60).create(str(tmp_path_factory.mktemp("whole") / "t.lance"))
    for _ in range(2):
        table.step(12)
        for at in range(2):
            table.put([at])
        table.flush()
    table.close()
    lance.dataset(table.uri).tags.create("keep", 2)
    lance.dataset(table.uri).create_branch("side")
    return table.uri


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("pattern", "harm", "job", "code"), CASES, ids=[f"{job}-{where}-{harm.__name__}" for where, harm, job, _ in CASES]
)
def test_the_damaged_file_is_named(
    whole: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    pattern: str,
    harm: Callable[[Path], None],
    job: str,
    code: int,
) -> None:
    uri = str(tmp_path / "t.lance")
    shutil.copytree(whole, uri)
    if pattern == INDEX:
        assert run_here(capfd, "merge", uri).code == 0
    damaged = min(Path(uri).glob(pattern))
    harm(damaged)
    before = contents(uri)
    done = run_here(capfd, job, uri, *(["--apply"] if job in {"gc", "expire"} else []), "--json")
    assert done.code == code
    document = done.document
    said = document["error"]["message"] if "error" in document else json.dumps(document)
    assert str(damaged.relative_to(uri)) in said
    assert code == 18 or (document.get("error", {}).get("reason") or said).count("table_corrupt")
    # Nothing that was there is gone, and a tag that cannot be read has not let go what it keeps.
    assert before.keys() <= contents(uri).keys()


def test_other_errors_stay_what_they_are(whole: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    shutil.copytree(whole, uri)
    table = open_table(uri)
    well = [StorageError("a full disk"), ObjectNotFoundError("data/0.lance is not there")]
    assert all(name_damage(table, error) is error for error in well)
    emptied(next(Path(uri).glob(DATA)))
    refused = StorageCredentialsError("no")
    assert name_damage(table, refused) is refused
    assert all(name_damage(table, error) is not error for error in well)


def test_what_pylance_cannot_read_is_no_damage(whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/upstream.md: from S3 it does not read some files that are right, and a backup would not help."""

    def misaligned(*_: object, **__: object) -> None:
        raise OSError("Misaligned buffers[0] in array of type LargeUtf8, offset from expected alignment of 8 by 4")

    monkeypatch.setattr(lance.LanceFragment, "scanner", misaligned)
    error = StorageError("a full disk")
    assert name_damage(open_table(whole), error) is error
    found = {one["check"]: one for one in run_job(whole, "verify", deep=True).to_json()["findings"]}
    assert "base_file" not in found
    assert "Misaligned" in found["not_checked"]["evidence"]
    assert "running the command again does not help" in found["not_checked"]["remedy"]


def test_a_newest_manifest_of_no_bytes_is_critical_and_its_message_says_what_helps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create(fragments=3)
    name, _ = wire.newest_manifest(Files(made.uri))
    emptied(Path(made.uri, name))
    assert run_here(capfd, "check", "--nagios", made.uri).code == 2
    error = run_here(capfd, "inspect", made.uri, "--json").document["error"]
    assert (error["exit_code"], name in error["remedy"], "aside" in error["remedy"]) == (9, True, True)
    put = Path(made.uri, name).rename(f"{made.uri}.damaged-manifest")  # as the runbook says
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    os.utime(put, (0, 0))  # one of an earlier time, and now another manifest is lost
    hint = Path(made.uri, VERSION_HINT)
    assert hint.name in run_here(capfd, "inspect", made.uri, "--json").document["error"]["remedy"]
    hint.rename(tmp_path / "hint")
    assert run_here(capfd, "check", "--nagios", made.uri).code == 0
    assert run_job(made.uri, "maintain", apply=True).exit_code == 0
    assert run_job(made.uri, "verify").exit_code == 0
