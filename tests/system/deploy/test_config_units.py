"""``config systemd``, ``cron`` and ``kubernetes``: what they print is valid, and runs the configuration."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from memwal_ops.cli.config_units import program
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.state.directory import state_dir
from tests.support.run_cli import run_here
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same

ROOT = Path(__file__).parents[3]
KUBERNETES_OPTIONS = ("--image", "reg.test/memwal:1")

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: apt install systemd)"
)


def configuration(folder: Path, tables: list[dict[str, Any]], **keys: Any) -> Path:
    file = folder / "c %o$f.yaml"
    file.write_text(json.dumps({**keys, "tables": tables}))
    return file


def printed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    outcome = run_here(capfd, "config", *arguments)
    assert outcome.code == 0, outcome
    return outcome.out


def lines(unit: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))


def test_of_remote_tables_the_unit_is_that_of_the_package(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = configuration(tmp_path, [{"uri": "s3://bucket/orders.lance"}])
    mine = lines(printed(capfd, "systemd", str(file)))
    brought = lines((ROOT / "systemd/memwal-ops.service").read_text())
    own = {"ExecStart", "TimeoutStopSec", "PrivateTmp", "ProtectHome"}
    assert mine.keys() == brought.keys()
    assert {key for key in mine if mine[key] != brought[key]} <= own
    assert mine["ExecStart"].startswith(f"{program()} run --config ")
    assert mine["DynamicUser"] == "yes"


def test_a_unit_may_write_the_local_tables_and_the_state_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tables = [{"uri": "/data/a $b.lance"}, {"pattern": "/srv/t/*/x-*.lance"}, {"database": "/home/me/db"}]
    file = configuration(tmp_path, tables, state_dir="/srv/state", stop_grace="5m")
    mine = lines(printed(capfd, "systemd", str(file), "--user", "lance"))
    assert shlex.split(mine["ReadWritePaths"]) == ["-/data/a $b.lance", "-/srv/t", "-/home/me/db", "-/srv/state"]
    assert (mine["User"], mine["DynamicUser"], mine["ProtectHome"]) == ("lance", "no", "no")
    assert mine["TimeoutStopSec"] == "330"


@pytest.mark.parametrize("command", ["systemd", "cron"])
def test_a_path_with_a_line_break_is_refused(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What follows it would be a line of its own, that root runs."""
    (folder := tmp_path / "a\nUser=root").mkdir()
    for file, table in ((configuration(folder, []), "s3://b/t"), (configuration(tmp_path, []), "/data/a\nUser=root")):
        file.write_text(json.dumps({"tables": [{"uri": table}]}))
        refused = run_here(capfd, "config", command, str(file))
        assert (refused.code, refused.out, "control character" in refused.err) == (2, "", True), refused


def test_a_configuration_may_begin_with_an_indented_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("\n    # of the north\nhttp: {host: 0.0.0.0}\ntables: [{uri: s3://bucket/orders.lance}]\n")
    documents = [*yaml.safe_load_all(printed(capfd, "kubernetes", str(file)))]
    [found] = [one["data"]["config.yaml"] for one in documents if one["kind"] == "ConfigMap"]
    assert found == file.read_text()


@needs_systemd
@pytest.mark.parametrize("table", ["s3://bucket/orders.lance", "/data/o r'd%ers.lance"])
def test_systemd_takes_the_unit(table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, unit = configuration(tmp_path, [{"uri": table}]), tmp_path / "memwal-ops.service"
    assert run_here(capfd, "config", "systemd", str(file), "--output", str(unit)).code == 0
    unit.write_text(unit.read_text().replace(program(), sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert run_here(capfd, "config", "systemd", str(file), "--output", str(unit)).code == 2
    unit.write_text(unit.read_text().replace("WatchdogSec", "WatchdogSecs"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert "WatchdogSecs" in found.stderr


@pytest.mark.long
def test_the_line_of_cron_runs_what_is_due(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the shell of cron, to which % is the end of the line."""
    table = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    table.put([0, 1])
    table.flush()
    keys = {"state_dir": str(tmp_path / "state"), "http": {"enabled": False}}
    file = configuration(tmp_path, [{"uri": table.uri}], **keys)
    text = printed(capfd, "cron", str(file), "--user", "lance", "--mailto", "ops@example.com")
    assert "\nMAILTO=ops@example.com\n" in text
    [line] = [one for one in text.splitlines() if one.startswith("*")]
    _, user, command = re.fullmatch(r"((?:\S+ +){5})(\S+) +(.*)", line).groups()  # type: ignore[union-attr]
    assert user == "lance"
    assert re.search(r"(?<!\\)%", command) is None
    here = command.replace("\\%", "%").replace(program(), f"{sys.executable} -m memwal_ops")
    done = subprocess.run(["/bin/sh", "-c", here], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done
    assert_same(read_base(table.uri), table.expected())
    shutil.rmtree(Path(table.uri) / "_versions")
    shutil.rmtree(tmp_path / "state")
    done = subprocess.run(["/bin/sh", "-c", here], capture_output=True, text=True, check=False, cwd=ROOT)
    assert json.loads(done.stdout)["exit_code"] != 0


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "CronJob"])
def test_the_manifests(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Valid by the schemas of Kubernetes, and the pod's configuration is the file."""
    file, out = tmp_path / "memwal.yaml", tmp_path / "out.yaml"
    assert run_here(capfd, "config", "init", "--output", str(file)).code == 0
    text = file.read_text().replace("uri: /data/", "uri: s3://bucket/").replace("http:\n", "stop_grace: 2m\nhttp:\n")
    if kind == "StatefulSet":
        text += "fleet: {uri: s3://bucket/ops/}\n"
    file.write_text(text)
    more = ("--cronjob",) if kind == "CronJob" else ()
    assert printed(capfd, "kubernetes", str(file), *KUBERNETES_OPTIONS, *more, "--output", str(out))
    documents = [*yaml.safe_load_all(out.read_text())]
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install .[dev]")
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    kinds = {document["kind"]: document for document in documents}
    rest = {
        "Deployment": {"PersistentVolumeClaim", "Service"},
        "StatefulSet": {"PodDisruptionBudget", "Service"},
        "CronJob": {"PersistentVolumeClaim"},
    }
    assert kinds.keys() == {"ConfigMap", "ServiceAccount", kind} | rest[kind]
    inside = kinds["ConfigMap"]["data"]["config.yaml"]
    assert yaml.safe_load(inside) == yaml.safe_load(text)
    job = kinds[kind]["spec"]["jobTemplate"] if more else kinds[kind]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (container["image"], pod["terminationGracePeriodSeconds"]) == ("reg.test/memwal:1", 150)
    assert container["resources"]["limits"]["memory"] == "5632Mi"
    (tmp_path / "inside.yaml").write_text(inside)
    environment = {one["name"]: one["value"] for one in container["env"]}
    config = load_settings(str(tmp_path / "inside.yaml"), environment).config
    assert config.http.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({}, "http.host"),
        ({"http": {"host": "0.0.0.0", "port": 80}}, "9464"),
        ({"http": {"host": "0.0.0.0"}, "state_dir": "/x"}, "state_dir"),
        ({"http": {"host": "0.0.0.0"}, "fleet": {"uri": "s3://bucket/ops/", "name": "a"}}, "fleet.name"),
        (
            {"http": {"host": "0.0.0.0"}, "defaults": {"storage_options": {"aws_secret_access_key": "hunter22"}}},
            "aws_secret_access_key",
        ),
    ],
)
def test_what_would_not_work_in_a_pod(
    keys: dict[str, Any], word: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = configuration(tmp_path, [{"uri": "s3://bucket/orders.lance"}], **keys)
    outcome = run_here(capfd, "config", "kubernetes", str(file))
    assert (outcome.code, outcome.out, word in outcome.err) == (2, "", True)
    assert "hunter22" not in outcome.err


def test_all_that_would_not_work_is_reported_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = {"http": {"port": 80}, "state_dir": "/x", "fleet": {"uri": "s3://bucket/ops/", "name": "a"}}
    outcome = run_here(capfd, "config", "kubernetes", str(configuration(tmp_path, [{"uri": "s3://b/t"}], **keys)))
    assert outcome.code == 2
    for word in ("http.host is 127.0.0.1", "port 9464", "fleet.name", "state_dir is /x", "MEMWAL_OPS_HOST", "Leave it"):
        assert word in outcome.err


@pytest.mark.parametrize("fleet", [{}, {"fleet": {"uri": "s3://bucket/ops/"}}])
def test_the_probes_of_a_pod_speak_tls_where_its_service_does(
    fleet: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for tls, scheme in (({}, None), ({"tls_certificate": "/tls/tls.crt", "tls_key": "/tls/tls.key"}, "HTTPS")):
        keys = {"http": {"host": "0.0.0.0", **tls}, **fleet}
        file = configuration(tmp_path, [{"uri": "s3://bucket/orders.lance"}], **keys)
        documents = [*yaml.safe_load_all(printed(capfd, "kubernetes", str(file)))]
        [pod] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in {"Deployment", "StatefulSet"}]
        probes = [pod["containers"][0][f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
        assert [probe.get("scheme") for probe in probes] == [scheme] * 3


def test_the_configuration_of_the_readme_runs_in_a_pod(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"^```yaml\n(defaults:.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "memwal.yaml"
    file.write_text(text)
    documents = [*yaml.safe_load_all(printed(capfd, "kubernetes", str(file)))]
    [inside] = [one["data"]["config.yaml"] for one in documents if one["kind"] == "ConfigMap"]
    assert inside.startswith(text)
    [pod] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    environment = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    file.write_text(inside)
    config = load_settings(str(file), environment).config
    assert config.http.host == "0.0.0.0"
    assert state_dir(config, environment) == "/var/lib/memwal-ops"
