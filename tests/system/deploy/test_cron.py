"""configs/cron/memwal-ops.cron: each line does what it says, in the shell that cron would use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tables import damage
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "configs/cron/memwal-ops.cron").read_text()
LINE = re.compile(r"^(#?)((?:\S+ +){4}\S+) +(\S+) +(.+)$")
FOUND = [found for line in TEXT.splitlines() if (found := LINE.match(line)) and re.match(r"[\d*]", found[2])]
COMMANDS = [found[4] for found in FOUND]


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t able.lance"))
    made.put([0, 1])
    made.flush()
    return made


def run(command: str, folder: Path, table: Workload) -> subprocess.CompletedProcess[str]:
    """The command as cron runs it, with this machine's folders and this installation's program."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin/memwal-ops"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memwal_ops "$@"\n')
    program.chmod(0o755)
    (folder / "orders.env").write_text(f'MEMWAL_TABLE="{table.uri}"\n')
    (folder / "config.yaml").write_text(
        json.dumps({"state_dir": str(folder / "state"), "http": {"enabled": False}, "tables": [{"uri": table.uri}]})
    )
    here = command.replace("/etc/memwal-ops", str(folder)).replace("/var/log/memwal-ops", str(folder))
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(["/bin/sh", "-c", here], capture_output=True, text=True, env=environment, check=False)


def test_there_are_lines_for_jobs_and_one_for_the_supervisor() -> None:
    assert [found[1] for found in FOUND] == ["", "", "", "#"]
    assert {found[3] for found in FOUND} == {"memwal-ops"}
    assert "%" not in "".join(COMMANDS)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_line_does_its_work_and_prints_nothing(tmp_path: Path, table: Workload, command: str) -> None:
    done = run(command, tmp_path, table)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert_same(read_base(table.uri), table.expected())
    reports = list(tmp_path.glob("*.json"))
    assert len(reports) == 1
    assert json.loads(reports[0].read_text())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS[:2], ids=range(2))
def test_a_line_prints_the_report_where_there_is_trouble(tmp_path: Path, table: Workload, command: str) -> None:
    damage.remove_generation(table.uri, table.regions[0], 1)
    assert "generation_missing" in run(command, tmp_path, table).stdout
