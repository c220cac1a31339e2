"""``memwal-ops doctor``: what would stop a job later is told before, with what to do."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import lance
import pytest
from packaging.requirements import Requirement

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.memwal import RegionWriter
from memwal_ops.version import OLDEST_PYLANCE
from tests.support.run_cli import contents, run_here
from tests.support.s3_server import options_for, s3_client
from tests.support.tables.workload import Workload


def levels(document: Any) -> dict[str, str]:
    assert all({*one} == {"name", "level", "found", "do"} and one["found"] for one in document["checks"])
    assert all(one["do"] for one in document["checks"] if one["level"] != "ok")
    return {one["name"]: one["level"] for one in document["checks"]}


def test_this_machine_is_fit(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "doctor", "--json")
    found = levels(outcome.document)
    assert outcome.code == 0
    assert {"Python", "pylance", "pyarrow", "memory", "file descriptors", "temporary folder", "Java"} <= found.keys()
    assert found["pylance"] == "ok"
    assert "pylance" in run_here(capfd, "doctor").out


def test_a_release_that_was_not_tried_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    versions = {"pylance": "99.1", "click": "8.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    outcome = run_here(capfd, "doctor", "--json")
    found = levels(outcome.document)
    assert (outcome.code, found["pylance"], found["click"]) == (0, "warning", "ok")
    assert outcome.document["decision"] == "warning"
    (told,) = [one for one in outcome.document["checks"] if one["name"] == "pylance"]
    assert "99.1" in told["found"]
    assert "pip install 'pylance" in told["do"]


def test_an_older_pylance_is_refused_by_doctor_and_by_each_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    before = contents(table.uri)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "13.0.0" if name == "pylance" else real(name))
    monkeypatch.setattr(lance, "__version__", "13.0.0")
    outcome = run_here(capfd, "doctor", "--json")
    assert (outcome.code, levels(outcome.document)["pylance"]) == (8, "error")
    for command in ("inspect", "merge", "expire", "maintain", "verify", "hold"):
        ran = run_here(capfd, command, table.uri)
        assert (ran.code, "pylance 13.0.0 is installed" in " ".join(ran.err.split())) == (8, True), command
    with pytest.raises(UnsupportedFeatureError):
        RegionWriter(table.uri)
    assert contents(table.uri) == before
    monkeypatch.setattr(lance, "__version__", OLDEST_PYLANCE)
    assert run_here(capfd, "inspect", table.uri).code == 0


def test_the_oldest_release_is_that_of_the_pin() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (pin,) = (one.specifier for one in map(Requirement, project["dependencies"]) if one.name == "pylance")
    assert f">={OLDEST_PYLANCE}" in str(pin).split(",")


def test_a_package_that_is_missing_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "structlog":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    outcome = run_here(capfd, "doctor", "--json")
    assert (outcome.code, levels(outcome.document)["structlog"]) == (8, "error")


def test_a_local_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    table.close()
    before = contents(table.uri)
    outcome = run_here(capfd, "doctor", table.uri, "--json")
    found = levels(outcome.document)
    assert outcome.code == 0
    asked = ("list", "write", "read", "delete", "put-if-absent", "compare-and-swap", "clock", "table")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "ok")
    assert contents(table.uri) == before, "what it wrote is gone"
    (tmp_path / "empty").mkdir()
    assert run_here(capfd, "doctor", str(tmp_path / "empty"), "--json").code == 0
    assert run_here(capfd, "doctor", str(tmp_path / "none")).code == 3
    Path(table.uri, "_versions").rename(tmp_path / "away")
    outcome = run_here(capfd, "doctor", table.uri, "--json")
    assert outcome.code != 0
    assert levels(outcome.document)["table"] == "error"


@pytest.mark.long
@pytest.mark.s3
def test_a_bucket_whose_rules_fight_with_gc(
    moto_endpoint: str, moto_bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [
        word for key, value in options_for(moto_endpoint).items() for word in ("--storage-option", f"{key}={value}")
    ]
    client = s3_client(moto_endpoint)

    def told() -> tuple[int, dict[str, str]]:
        outcome = run_here(capfd, "doctor", f"s3://{moto_bucket}/tables/t.lance", "--json", *given)
        found = levels(outcome.document)
        return outcome.code, {name: found[name] for name in ("bucket versioning", "lifecycle rules", "delete")}

    def rule(prefix: str, **action: Any) -> None:
        rules = [{"ID": "r", "Status": "Enabled", "Filter": {"Prefix": prefix}, **action}]
        client.put_bucket_lifecycle_configuration(Bucket=moto_bucket, LifecycleConfiguration={"Rules": rules})  # type: ignore[typeddict-item]

    assert told() == (0, {"bucket versioning": "ok", "lifecycle rules": "ok", "delete": "ok"})
    for kept in ("Suspended", "Enabled"):  # what was deleted before it was suspended is still there
        client.put_bucket_versioning(Bucket=moto_bucket, VersioningConfiguration={"Status": kept})
        assert told()[1]["bucket versioning"] == "warning"
    rule("", NoncurrentVersionExpiration={"NoncurrentDays": 3})
    assert told()[1] == {"bucket versioning": "ok", "lifecycle rules": "ok", "delete": "ok"}
    rule("logs/", Expiration={"Days": 3})
    assert told()[1]["lifecycle rules"] == "ok"
    for prefix in ("", "tables/", "tables/t.lance/_mem_wal"):
        rule(prefix, Expiration={"Days": 3})
        code, found = told()
        assert (code, found["lifecycle rules"]) == (8, "error")
