"""erase on tables that are made to get a wrong ``erased``: values in transactions, in branches, and in stray files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.options import OptionError
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.jobs.erase.survey import Surveyor
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest
from tests.support.tables import patterns

NOW = {"older_than": "0s", "allow_unsafe": True}
GONE = patterns.pattern(5, "btree")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return patterns.create(str(tmp_path / "t.lance"), range(30), every_index=False)


def erase(uri: str, where: str | None = "id = 5", **options: Any) -> Any:
    return run_job(uri, "erase", **{"where": where, "apply": True, **NOW, **options})


def blocking(report: Any) -> dict[str, str]:
    return {one.name: one.why for one in report.holders if one.blocks}


@pytest.mark.parametrize("inline", [True, False], ids=["in the manifest", "in a file of its own"])
def test_an_expression_of_another_column_is_gone(tmp_path: Path, *, inline: bool) -> None:
    """The deletion took a whole fragment, so that its own version has no such row, and yet has a value of it."""
    uri = str(tmp_path / "t.lance")
    for numbers in (range(5), [5], [6]):
        lance.write_dataset(patterns.rows(numbers), uri, mode="append" if os.path.exists(uri) else "create")
    lance.dataset(uri).delete(f"btree = '{GONE}'")
    if not inline:  # as older releases of Lance
        table = open_table(uri)
        table.manifest.manifest.ClearField("transaction_section")
        [newest] = [one for one in Path(uri, "_versions").iterdir() if one.name == Path(table.file.path).name]
        newest.write_bytes(encode_version_manifest(replace(table.manifest, transaction=None)))
    lance.dataset(uri).delete("btree = 'of nobody'")
    held = patterns.holders(uri, [5])
    assert {path.split("/")[0] for path in held} >= {"_transactions", *(["_versions"] if inline else [])}
    assert erase(uri, certificate=str(tmp_path / "proof.json")).decision == "erased"
    assert patterns.holders(uri, [5]) == {}
    assert GONE not in (tmp_path / "proof.json").read_text()
    lance.dataset(uri).delete("btree = 'of nobody'")
    report = run_job(uri, "erase", where="id = 5")
    assert report.decision == "erased", "the version before it had no such row: its expression is of others"


def test_addresses_that_move_name_no_rows(uri: str, tmp_path: Path) -> None:
    for where in ("_rowaddr = 5", "_rowid = 5", "_rowoffset < 3", "random() < 0.5", "id = 5 OR _ROWID = 5"):
        with pytest.raises(InvalidUsageError, match="another row after a rewrite"):
            erase(uri, where)
    assert erase(uri, "btree = 'a _rowid = 5 in a text'").decision == "erased"
    stable = patterns.create(str(tmp_path / "s.lance"), range(30), stable=True, every_index=False)
    # A deleted row has no id, even a stable one: its files would be searched, and none of them found.
    lance.dataset(stable).delete("btree = 'of nobody' OR id = 5")
    with pytest.raises(InvalidUsageError, match="which no deleted row has"):
        erase(stable, "_rowid = 5")
    assert lance.dataset(uri).count_rows() == 30


def test_nothing_is_certified_for_times_to_come(uri: str) -> None:
    with pytest.raises(OptionError, match="is in the future"):
        erase(uri, None, deleted_before=(datetime.now(UTC) + timedelta(days=1)).isoformat())


def test_stray_files_below_branches_are_named(uri: str) -> None:
    assert erase(uri).decision == "erased"
    dataset = lance.dataset(uri)
    dataset.create_branch("b", dataset.version)
    dataset.create_branch("b/c", dataset.version)
    assert erase(uri).decision == "erased", "no such row is in the branches"
    for path in ("tree/stray.bin", "tree/b/data/0" + "1" * 39 + ".lance"):
        Path(uri, path).parent.mkdir(exist_ok=True)
        Path(uri, path).write_text(GONE)
        report = erase(uri)
        assert report.decision == "held"
        [(name, why)] = blocking(report).items()
        assert path in (name, f"tree/{name}/{why.split()[1].rstrip(':')}"), why
        Path(uri, path).unlink()
    assert erase(uri).decision == "erased"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "path",
    ["_deletions/stray.txt", "_deletions/a/0-1-1.arrow", "_refs/stray.bin", "_mem_wal_ops/stray.bin",
     "_mem_wal_ops/erase/stray.json", "_mem_wal_ops/log/x", "_indices/stray", "data/stray.txt", "_transactions/x"],
)  # fmt: skip
def test_files_that_are_not_known_are_named(uri: str, path: str) -> None:
    assert erase(uri).decision == "erased"
    put = Path(uri, path)
    put.parent.mkdir(parents=True, exist_ok=True)
    put.write_text(GONE)
    report = run_job(uri, "erase", where="id = 5")
    assert (report.decision, [*blocking(report)]) == ("held", [path])


@pytest.mark.long
def test_a_branch_and_its_child_are_erased_too(uri: str) -> None:
    """The manifest of an expired version is kept for the child of a branch; it has no values."""
    dataset = lance.dataset(uri)
    dataset.create_branch("b", dataset.version)
    dataset.create_branch("b/c", dataset.version)
    report = erase(uri)
    assert blocking(report).keys() == {"b", "b/c", *(name for name in blocking(report) if "left from" in name)}
    lance.dataset(uri).branches.delete("b/c")
    lance.dataset(uri).branches.delete("b")
    assert erase(uri).decision == "erased"
    dataset = lance.dataset(uri)
    dataset.create_branch("b", dataset.version)
    dataset.create_branch("b/c", dataset.version)
    for place in ("tree/b", "tree/b", "tree/b/c", ""):
        report = erase(os.path.join(uri, place))
        assert report.decision == "erased", (place, report.describe())
    assert patterns.holders(uri, [5]) == {}


def test_rows_that_a_branch_deleted_are_named_on_main(uri: str) -> None:
    dataset = lance.dataset(uri)
    dataset.create_branch("b", dataset.version)
    lance.write_dataset(patterns.rows([900]), f"{uri}/tree/b", mode="append")
    lance.dataset(f"{uri}/tree/b").delete("id = 900")
    report = erase(uri, None, deleted_before=datetime.now(UTC).isoformat())
    assert (report.decision, "b" in blocking(report)) == ("held", True)


def test_a_version_that_is_committed_meanwhile_is_read(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert erase(uri).decision == "erased"
    whole = Surveyor._objects
    numbers = iter(([5], [40]))

    def beside(self: Surveyor, *arguments: Any) -> Any:
        if (number := next(numbers, None)) is not None:
            lance.write_dataset(patterns.rows(number), uri, mode="append")
        return whole(self, *arguments)

    monkeypatch.setattr(Surveyor, "_objects", beside)
    report = run_job(uri, "erase", where="id = 5")
    assert [(one.kind, "committed while" in one.why) for one in report.holders] == [("version", True)]
    monkeypatch.setattr(Surveyor, "_objects", whole)
    assert erase(uri).decision == "erased"
    monkeypatch.setattr(Surveyor, "_objects", beside)
    assert run_job(uri, "erase", where="id = 5").decision == "erased", "what was committed has no such row"


def test_a_file_with_the_end_of_a_hint_is_compared(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    assert erase(uri, certificate=str(path)).certificate == str(path)
    made = datetime.fromisoformat(json.loads(path.read_text())["made"]).timestamp()
    for name in ("data/x_version_hint.json", "_mem_wal_ops/quarantine/1/data/x.lance"):
        put = Path(uri, name)
        put.parent.mkdir(parents=True, exist_ok=True)
        put.write_text(GONE)
        os.utime(put, (made - 60, made - 60))
        report = run_job(uri, "erase", check=str(path))
        assert (report.decision, [name in one for one in report.wrong]) == ("changed", [True])
        put.unlink()
