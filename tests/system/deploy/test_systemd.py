"""systemd/: systemd's own checks pass, the commands are ones that exist, and docs/install.md names what there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_cli import run_here
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same

ROOT = Path(__file__).parents[3]
UNITS = sorted((ROOT / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
JOBS = [unit for unit in SERVICES if "@" in unit.name]
PROGRAM = "/opt/memwal-ops/bin/memwal-ops"
# What systemd-analyze calls "OK"; tenths. Without any hardening a service has 96.
EXPOSURE = 20

PAGE = (ROOT / "docs/install.md").read_text().partition("## With cron or systemd\n")[2].partition("\n## ")[0]

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: apt install systemd)"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def named(unit: Path) -> str:
    return unit.name


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """All units in one folder, with a program that exists here."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
    return tmp_path


@needs_systemd
def test_verify(installed: Path) -> None:
    found = analyze("verify", "--man=no", *map(str, sorted(installed.iterdir())))
    assert (found.returncode, found.stderr) == (0, "")


@needs_systemd
def test_verify_would_tell(installed: Path) -> None:
    broken = installed / "memwal-ops.service"
    broken.write_text(broken.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "WatchdogSecs" in analyze("verify", "--man=no", str(broken)).stderr


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=named)
def test_security(installed: Path, unit: Path) -> None:
    path = installed / unit.name
    arguments = ("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}", str(path))
    found = analyze(*arguments)
    assert found.returncode == 0, found.stdout[-400:]
    path.write_text(re.sub(r"^DynamicUser=.*?\n(?=\n|\Z)", "", unit.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert analyze(*arguments).returncode != 0


def test_every_service_is_hardened_alike() -> None:
    blocks = {
        re.search(r"^DynamicUser=.*?(?=\n\n|\n\Z)", one.read_text(), re.MULTILINE | re.DOTALL)[0] for one in SERVICES
    }  # type: ignore[index]
    assert len(blocks) == 1
    block = set(blocks.pop().splitlines())
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes"} <= block
    assert "MemoryDenyWriteExecute=yes" not in block, "with it, numba and Java end: test_compiled_code.py"


@pytest.mark.parametrize("unit", SERVICES, ids=named)
def test_every_service_may_open_many_files(unit: Path) -> None:
    limit = re.search(r"^LimitNOFILE=(\d+)$", unit.read_text(), re.MULTILINE)
    assert limit is not None
    assert int(limit[1]) >= 65536


def test_each_job_has_a_timer() -> None:
    assert [one.stem for one in JOBS] == [one.stem for one in UNITS if one.suffix == ".timer"]
    assert {re.fullmatch(r"memwal-ops-(\w+)@", one.stem)[1] for one in JOBS} == {  # type: ignore[index]
        "merge",
        "snapshot",
        "catchup",
        "maintain",
        "gc",
    }


@pytest.mark.parametrize("unit", JOBS, ids=named)
def test_a_jobs_command_runs_with_the_options_that_its_unit_shows(
    unit: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As systemd puts them in: ``${X}`` is one word, ``$X`` as many as it holds."""
    table = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t able.lance")).step(3)
    table.flush()
    text = unit.read_text()
    shown = dict(re.findall(r"^#   (MEMWAL_\w+)=(.+)$", text, re.MULTILINE))
    assert "EnvironmentFile=/etc/memwal-ops/%i.env" in text
    option = next(name for name in shown if name.endswith("_OPTIONS"))
    assert f"Environment={option}=\n" in text
    line = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    assert line is not None
    for given in ("", shown[option]):
        words: list[str] = []
        for word in line[1].split():
            if word == f"${option}":
                words += shlex.split(given)
            else:
                words.append(word.replace("${MEMWAL_TABLE}", table.uri))
        assert words[0] == PROGRAM
        outcome = run_here(capfd, *words[1:])
        assert outcome.code == 0, outcome.err
        assert outcome.document["decision"]
    if option in {"MEMWAL_MERGE_OPTIONS", "MEMWAL_MAINTAIN_OPTIONS"}:
        assert_same(read_base(table.uri), table.expected())


def test_the_supervisors_command_is_one(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (ROOT / "systemd/memwal-ops.service").read_text()
    line = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    assert line is not None
    program, *words = line[1].split()
    assert program == PROGRAM
    assert run_here(capfd, *words[:1], "--help").code == 0
    words[words.index("--config") + 1] = str(tmp_path / "none.yaml")
    # Started with a configuration that is not there, it ends by a code after which systemd does not try again.
    ends = re.search(r"^RestartPreventExitStatus=(.+)$", text, re.MULTILINE)
    assert ends is not None
    assert str(run_here(capfd, *words).code) in ends[1].split()


@needs_systemd
def test_the_override_for_local_tables_is_valid(installed: Path) -> None:
    shown = re.search(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    mine = shown[1].replace("lance", "daemon").replace("/data", "/tmp")
    for unit in ("memwal-ops.service", "memwal-ops-maintain@.service"):
        folder = installed / f"{unit}.d"
        folder.mkdir()
        (folder / "override.conf").write_text(mine)
        found = analyze("verify", "--man=no", str(installed / unit))
        assert (found.returncode, found.stderr) == (0, "")


def test_the_page_names_what_there_is() -> None:
    section = PAGE
    names = {unit.name for unit in UNITS}
    for said in re.findall(r"memwal-ops[a-z-]*@?[a-z]*\.(?:service|timer)", section):
        template = re.sub(r"@\w+\.", "@.", said)
        assert template in names, said
    for path in re.findall(r"(?<![\w/])(?:configs|systemd)/[\w./@-]*\w", section):
        assert (ROOT / path).exists(), path
    assert {
        word for word in ("/etc/memwal-ops/", PROGRAM.rsplit("/", 2)[0], "memwal-ops.service") if word not in section
    } == set()
