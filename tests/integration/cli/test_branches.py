"""``--branch NAME`` in every command: the same as the path ``URI/tree/NAME``; an unknown name is refused."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import memwal, open_table, run_job
from memwal_ops.core import registry
from memwal_ops.core.registry import branches
from memwal_ops.errors import InvalidUsageError
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.scheduling.discovery import discover
from tests.integration.contracts import small
from tests.support.run_cli import contents, run_here
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload

NAMES = ["child", "dev", "feature/x"]
VARYING = {"seconds", "run_id", "later"}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with a branch that has versions of its own, a child of it, and one with a slash in its name."""
    root = PlainTable(str(tmp_path / "t.lance")).create(fragments=2)
    root.dataset.create_branch("dev", 2)
    branch = PlainTable(f"{root.uri}/tree/dev")
    branch.model, branch._next = dict(root.model), 1000
    for _ in range(3):
        branch.append(10)
    root.dataset.checkout_version(("dev", None)).create_branch("child", ("dev", 4))
    root.dataset.create_branch("feature/x", 1)
    return root.uri


def same(document: Any) -> Any:
    return {key: value for key, value in document.items() if key not in VARYING}


def test_a_branch_by_name_is_that_by_path(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["expire"], ["gc"], ["catchup", "--dry-run"], ["compact", "--dry-run"]):
        by_name = run_here(capfd, *command, uri, "--branch", "dev", "--json")
        by_path = run_here(capfd, *command, f"{uri}/tree/dev", "--json")
        assert (by_name.code, by_path.code) == (0, 0), command
        assert same(by_name.document) == same(by_path.document), command
    main = run_here(capfd, "inspect", uri, "--branch", "main", "--json").document
    assert (main["branch"], main["version"]) == ("main", lance.dataset(uri).version)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_each_front_end_opens_it(uri: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    newest = lance.dataset(f"{uri}/tree/{name}").version
    table = open_table(uri, branch=name)
    assert (table.location.uri, table.revision) == (f"{uri}/tree/{name}", newest)
    assert run_job(uri, "inspect", branch=name).to_json()["branch"] == name
    held = run_here(capfd, "hold", uri, "--branch", name, "--json")
    assert (held.code, held.document["version"]) == (0, newest)
    assert Path(uri, "tree", name, "_mem_wal_ops/holds").is_dir()
    assert not Path(uri, "_mem_wal_ops/holds").exists()
    for command in (["lease", "list"], ["doctor"], ["check", "--nagios"], ["probe"]):
        assert run_here(capfd, *command, uri, "--branch", name).code == 0
    out = Path(uri).parent / "out"
    assert run_here(capfd, "export-support", uri, "--branch", name, "-o", f"{out}.tar.gz").code == 0
    assert run_here(capfd, "report", uri, "--branch", name, "-o", f"{out}.html").code == 0
    assert f"tree/{name}" in Path(f"{out}.html").read_text()


def test_check_reports_an_unknown_branch(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_here(capfd, "check", "--nagios", uri, "--branch", "nope")
    assert (run.code, run.out.split(" - ")[0]) == (3, "MEMWAL UNKNOWN")
    assert "has no branch 'nope'" in run.out
    assert run_here(capfd, "check", "--nagios", "--config", "memwal.yaml", "--branch", "dev").code == 2


def test_writers_and_readers_on_a_branch(tmp_path: Path) -> None:
    uri = f"{tmp_path}/t.lance"
    lance.write_dataset(small.rows(0, 3), uri)
    lance.dataset(uri).create_branch("dev")
    memwal.create_mem_wal(uri, branch="dev")
    with memwal.RegionWriter(uri, branch="dev") as writer:
        writer.put(small.rows(2, 5, 1.0))
    assert memwal.read(uri, branch="dev").scan().to_table().num_rows == 5
    assert run_job(uri, "merge", branch="dev").to_json()["decision"] == "merged"
    assert lance.dataset(f"{uri}/tree/dev").count_rows() == 5
    assert lance.dataset(uri).count_rows() == 3
    assert not Path(uri, "_mem_wal").exists()
    with pytest.raises(InvalidUsageError, match="has no branch 'nope'"):
        memwal.read(uri, branch="nope")


def test_all_branches_are_listed_once(
    uri: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def listing(place: str, options: Any = None) -> Any:
        listed.append(place)
        return branches(place, options)

    monkeypatch.setattr(registry, "branches", listing)
    assert run_here(capfd, "maintain", uri, "--branch", "all", "--dry-run").code == 0
    assert listed == [uri]


def test_a_job_changes_its_branch_alone(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: sorted(lance.dataset(f"{uri}/tree/{name}").to_table()["id"].to_pylist()) for name in NAMES}
    version = lance.dataset(uri).version
    compacted = run_here(capfd, "compact", uri, "--branch", "dev", "--json")
    assert (compacted.code, compacted.document["decision"]) == (0, "compacted")
    assert lance.dataset(uri).version == version
    for name, ids in before.items():
        assert sorted(lance.dataset(f"{uri}/tree/{name}").to_table()["id"].to_pylist()) == ids


def test_an_unknown_name_is_refused_with_those_that_there_are(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(uri)
    text = "has no branch 'de'; it has main, child, dev, feature/x."
    for arguments in ([uri, "--branch", "de"], [f"{uri}/tree/de"]):
        for command in ("inspect", "expire", "maintain", "hold", "export-support"):
            ran = run_here(capfd, command, *arguments)
            assert (ran.code, text in " ".join(ran.err.split())) == (2, True), (command, arguments)
    with pytest.raises(InvalidUsageError, match="has no branch"):
        open_table(uri, branch="de")
    with pytest.raises(InvalidUsageError, match="with a URI only"):
        run_job(open_table(uri), "inspect", branch="dev")
    assert contents(uri) == before


def test_a_table_without_branches_says_so(tmp_path: Path) -> None:
    plain = PlainTable(str(tmp_path / "plain.lance")).create()
    with pytest.raises(InvalidUsageError, match="it has main"):
        open_table(plain.uri, branch="dev")
    assert branches(plain.uri) == ()


def test_scan_has_the_branches_and_their_configuration_runs_them(
    uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    PlainTable(str(tmp_path / "other.lance")).create()
    wanted = [uri, *(f"{uri}/tree/{name}" for name in NAMES)]
    for arguments in ([uri], ["--database", str(tmp_path)]):
        shown = run_here(capfd, "scan", *arguments, "--json")
        assert shown.code == 0
        assert [one["uri"] for one in shown.document["tables"] if "other" not in one["uri"]] == wanted
        assert "t/tree/feature/x" in run_here(capfd, "scan", *arguments).out
        file = tmp_path / "c.yaml"
        file.write_text(shown.document["configuration"])
        found = {table.uri: table for table in discover(load_settings(str(file)).tables).tables}
        assert {*wanted} <= found.keys()
        assert found[f"{uri}/tree/feature/x"].name == "t/tree/feature/x"
        assert found[f"{uri}/tree/dev"].settings.jobs["expire"].apply


def test_the_configuration_names_branches(uri: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"tables:\n  - uri: {uri}\n    branches: [dev, gone]\n")
    found = discover(load_settings(str(file)).tables)
    assert [table.name for table in found.tables] == ["t", "t/tree/dev"]
    (fault,) = found.faults
    assert fault.why == "t has no branch gone; it has main, child, dev, feature/x."
    assert fault.exit_code == 2


def test_maintain_covers_main_and_each_branch(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capfd, "maintain", uri, "--branch", "all", "--json")
    assert ran.code == 0
    assert [*ran.document["branches"]] == ["main", *NAMES]
    assert all(one["decision"] == "maintained" for one in ran.document["branches"].values())
    assert len(lance.dataset(f"{uri}/tree/dev").get_fragments()) == 1
    assert "feature/x\nmaintained:" in run_here(capfd, "maintain", uri, "--branch", "all").out
    Path(uri, "tree/dev/_versions").rename(Path(uri).parent / "away")
    failed = run_here(capfd, "maintain", uri, "--branch", "all", "--json")
    assert failed.code != 0
    assert "reason" in json.dumps(failed.document["branches"]["dev"])
    assert failed.document["branches"]["child"]["decision"] == "maintained"


def test_maintain_covers_several_tables(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those named, or all of a folder: one that fails stops no other, and decides the exit code."""
    other = str(tmp_path / "other.lance")
    lance.write_dataset(pa.table({"id": range(10)}), other)
    named = run_here(capfd, "maintain", uri, other, "--json")
    assert (named.code, [*named.document["tables"]]) == (0, [uri, other])
    assert all("decision" in one for one in named.document["tables"].values())
    assert f"\n{other}\n" in run_here(capfd, "maintain", uri, other, "--dry-run").out
    (tmp_path / "empty.lance").mkdir()  # an interrupted first write: no table
    (tmp_path / "lost.lance/data").mkdir(parents=True)
    (tmp_path / "lost.lance/data/0.lance").write_bytes(b"rows")
    of_folder = run_here(capfd, "maintain", "--database", str(tmp_path), "--json")
    assert {uri, other} < of_folder.document["tables"].keys()
    lost = of_folder.document["tables"][str(tmp_path / "lost.lance")]["error"]
    assert (of_folder.code, lost["reason"]) == (lost["exit_code"], "not_a_lance_table")
    every = run_here(capfd, "maintain", uri, other, "--branch", "all", "--dry-run", "--json")
    assert len(every.document["tables"]) == 2 + len(NAMES)
    for arguments in ([], [uri, "--database", str(tmp_path)]):
        assert run_here(capfd, "maintain", *arguments).code == 2
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert run_here(capfd, "maintain", "--database", str(nothing)).code == 3


def test_verify_says_that_branches_were_not_verified_or_verifies_them(
    uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(capfd, "verify", uri, "--json").document["branches_not_verified"] == NAMES
    assert f"This is main alone. --branch all verifies each branch, too: {', '.join(NAMES)}." in " ".join(
        run_here(capfd, "verify", uri).out.split()
    )
    min(
        Path(uri, "tree/dev/data").iterdir(), key=lambda path: path.stat().st_mtime_ns
    ).unlink()  # its child has it, too
    assert run_here(capfd, "verify", uri).code == 0
    every = run_here(capfd, "verify", uri, "--branch", "all", "--json")
    assert every.code == 9
    decisions = {name: report["decision"] for name, report in every.document["branches"].items()}
    assert decisions == {"main": "healthy", "dev": "findings", "child": "findings", "feature/x": "healthy"}


def test_inspect_shows_the_tree_and_what_stale_branches_hold(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    month_ago = time.time() - timedelta(days=31).total_seconds()
    for path in Path(uri, "tree/dev/_versions").iterdir():
        os.utime(path, (month_ago, month_ago))
    lance.dataset(uri).delete("true")
    document = run_here(capfd, "inspect", uri, "--json").document
    found = {one["name"]: one for one in document["branches"]}
    assert [*found] == NAMES
    assert (found["child"]["parent"], found["child"]["parent_version"]) == ("dev", 4)
    assert [name for name, one in found.items() if one["stale"]] == ["dev"]
    sizes = {path: path.stat().st_size for path in Path(uri).rglob("*") if path.is_file()}
    below = Path(uri, "tree/dev")
    assert found["dev"]["bytes"] == sum(size for path, size in sizes.items() if path.is_relative_to(below))
    main = sum(size for path, size in sizes.items() if path.parent == Path(uri, "data"))
    assert found["dev"]["kept_bytes"] == main, "all rows of main are deleted"
    text = run_here(capfd, "inspect", uri).out
    assert "    dev, left version 2 of main: at version 5, with 4 versions\n      child, left version 4 of dev" in text
    shown = " ".join(text.split())
    assert "STALE: branch dev: nobody wrote to it since" in shown
    assert "it holds version 2 of main" in shown
    assert "STALE" not in run_here(capfd, "inspect", uri, "--stale", "40d").out


def test_a_branch_with_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "m.lance"))
    root = made.uri
    made.onto_branch("dev")
    made.put([1, 2])
    made.close()
    assert run_here(capfd, "inspect", root, "--branch", "dev", "--json").document["backlog"]["generations"] == 1
    assert run_here(capfd, "inspect", root, "--json").document["backlog"]["generations"] == 0
    merged = run_here(capfd, "merge", root, "--branch", "dev", "--json")
    assert merged.document["decision"] == "merged"
    assert run_job(root, "inspect", branch="dev").to_json()["backlog"]["generations"] == 0


def test_a_branch_of_a_table_in_a_catalog(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    catalog = f"lance+namespace://dir?root={Path(uri).parent}"
    table = open_table(f"lance+namespace://dir/t?root={Path(uri).parent}", branch="dev")
    assert (table.location.uri, table.location.catalog) == (
        f"{uri}/tree/dev",
        f"lance+namespace://dir/t?root={Path(uri).parent}&branch=dev",
    )
    assert open_table(str(table.location.catalog)).location == table.location
    by_name = run_here(capfd, "inspect", "t", "--namespace", catalog, "--branch", "dev", "--json").document
    assert (by_name["branch"], by_name["uri"]) == ("dev", f"{uri}/tree/dev")
    refused = run_here(capfd, "inspect", "t", "--namespace", catalog, "--branch", "de")
    assert (refused.code, "it has main, child, dev" in " ".join(refused.err.split())) == (2, True)
    scanned = run_here(capfd, "scan", "--namespace", catalog, "--json").document
    assert len(scanned["tables"]) == 4
