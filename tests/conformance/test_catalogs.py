"""Tables that a format's own catalog locates: the toy's, a list of folders, by every front end."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.holds import take_hold
from memwal_ops.core.leases import LEASES_FOLDER
from memwal_ops.core.registry import format_with_catalog, formats, locate, location_of
from memwal_ops.errors import InvalidUsageError, JobPluginError, TableNotFoundError
from tests.conformance.formats import TOY, TableUnderTest
from tests.support.run_cli import run_process


@pytest.fixture
def toy(tmp_path: Path) -> TableUnderTest:
    """A table with a backlog, that a list next to it has as ``events``."""
    made = TOY.make(str(tmp_path / "t"))
    (tmp_path / "list.json").write_text(json.dumps({"events": made.uri}))
    return made


@pytest.fixture
def uri(toy: TableUnderTest) -> str:
    return f"jsonlog+list://{Path(toy.uri).parent}/list.json#events"


def test_the_scheme_decides_the_format(uri: str, toy: TableUnderTest) -> None:
    found, location, _ = locate(uri)
    assert (found.name, location.uri, location.catalog, location.address) == ("jsonlog", toy.uri, uri, uri)
    by_folder = location_of(toy.uri)
    assert (by_folder.catalog, by_folder.address) == (None, toy.uri)
    assert format_with_catalog(uri.replace("jsonlog+list", "JSONLOG+List")) is formats()["jsonlog"]
    assert format_with_catalog("s3:/bucket") is format_with_catalog("lance+namespace://dir/t") is None


def test_a_job_runs_on_what_the_catalog_has(uri: str, toy: TableUnderTest, tmp_path: Path) -> None:
    assert run_job(uri, "merge").decision == "merged"
    assert toy.read_revision(open_table(uri).revision) == toy.expected()
    other = TOY.make(str(tmp_path / "other"))
    (tmp_path / "list.json").write_text(json.dumps({"events": other.uri}))
    assert open_table(uri).location.uri == other.uri


def test_refusals(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TableNotFoundError, match="lists no table 'nothing'"):
        open_table(uri.replace("#events", "#nothing"))
    with pytest.raises(InvalidUsageError, match=r"^compost does not apply to jsonlog\+list://.*#events, a jsonlog"):
        run_job(uri, "compost")
    with pytest.raises(InvalidUsageError, match="'jsonlog\\+lost' is not known"):
        open_table(uri.replace("list:", "lost:"))
    (tmp_path / "list.json").write_text(json.dumps({"events": ["no", "folder"]}))
    with pytest.raises(JobPluginError, match=r"The table format 'jsonlog' of memwal-jsonlog 1.0 raised TypeError"):
        open_table(uri)


def test_an_error_of_a_format_as_it_opens_is_its_package_s(
    toy: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("rows")

    monkeypatch.setattr(type(formats()["jsonlog"]), "open", broken)
    with pytest.raises(JobPluginError, match=r"of memwal-jsonlog 1.0 raised KeyError: 'rows'"):
        open_table(toy.uri)


def test_a_hold_where_nothing_of_ours_expires_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_table(uri)
    assert take_hold(table, table.revision, timedelta(hours=1)).versions == (table.revision,)
    monkeypatch.setattr(type(table), "jobs", {"merge": table.jobs["merge"]})
    with pytest.raises(InvalidUsageError, match="keeps nothing: no job of the format jsonlog deletes"):
        take_hold(table, table.revision, timedelta(hours=1))


@pytest.mark.long
def test_commands_and_a_supervisor(
    uri: str, toy: TableUnderTest, tmp_path: Path, toy_environment: dict[str, str]
) -> None:
    planned = run_process("merge", uri, "--dry-run", "--json", **toy_environment)
    assert (planned.code, planned.document["decision"]) == (0, "dry_run")
    scanned = run_process("scan", uri, "--json", **toy_environment).document
    assert [one["uri"] for one in scanned["tables"]] == [uri]
    assert uri in scanned["configuration"]
    file = tmp_path / "c.yaml"
    file.write_text(f"state_dir: {tmp_path}/s\ntables: [{{name: e, uri: '{uri}', jobs: {{catchup: {{}}}}}}]\n")
    refused = run_process("config", "check", str(file), **toy_environment)
    assert "catchup does not apply to e, a jsonlog table." in refused.out + refused.err
    file.write_text(file.read_text().replace("catchup: {}", "merge: {when: entries >= 1}"))
    done = run_process("run", "--once", "--config", str(file), "--json", **toy_environment)
    assert [(one["job"], one["decision"]) for one in done.document["runs"]] == [("merge", "merged")], done
    assert os.listdir(f"{toy.uri}/{LEASES_FOLDER}"), "the lease is in the table's folder"
    assert toy.read() == toy.expected()
    shown = run_process("status", "--config", str(file), "--json", **toy_environment).document
    assert [one["uri"] for one in shown["tables"]] == [uri]
