"""Containerfile: what it copies is there, what it runs exists, its health check tells up from down."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from memwal_ops.places import default_config_path
from memwal_ops.supervisor.config.model import HttpConfig
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Containerfile").read_text()
# One instruction a line: continuations joined, comments left out.
INSTRUCTIONS = [
    tuple(line.split(None, 1))
    for line in re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line.strip()
]


def of(word: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == word]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "memwal_ops"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, one) for one in kept), source


def test_all_that_the_build_reads_is_copied() -> None:
    """Files that pyproject.toml names: without them pip cannot build the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [project["readme"], *project["license-files"]]
    assert named == ["README.md", "LICENSE", "NOTICE"]
    # What the links in memwal_ops lead to: pip would leave these files out without a word.
    named += [path.resolve().name for path in (ROOT / "memwal_ops").iterdir() if path.is_symlink()]
    copied = [source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert [one for one in named if one not in copied] == []


def test_it_runs_as_nobody_by_commands_in_exec_form(capfd: pytest.CaptureFixture[str]) -> None:
    last_stage = INSTRUCTIONS[[word for word, _ in INSTRUCTIONS].index("FROM", 1) :]
    order = [word for word, _ in last_stage]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert of("USER") == ["memwal-ops"]
    for command in (*of("RUN"), *of("ENTRYPOINT"), *of("CMD")):
        assert isinstance(json.loads(command), list)
    assert json.loads(of("ENTRYPOINT")[0]) == ["memwal-ops"]
    assert run_here(capfd, *json.loads(of("CMD")[0]), "--help").code == 0


def test_its_places_are_those_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(one.split("=", 1) for one in of("ENV")[0].split())
    monkeypatch.delenv("MEMWAL_OPS_CONFIG", raising=False)
    assert places["MEMWAL_OPS_CONFIG"] == default_config_path()
    assert f"127.0.0.1:{HttpConfig().port}/healthz" in of("HEALTHCHECK")[0]
    assert of("EXPOSE") == [str(HttpConfig().port)]
    assert [places["MEMWAL_OPS_STATE"]] == json.loads(of("VOLUME")[0])


def test_the_health_check_distinguishes_up_from_down() -> None:
    answers = {"code": 200}

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers["code"] if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    words = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    server = HTTPServer(("127.0.0.1", 0), Health)
    command = [sys.executable, *(word.replace("9464", str(server.server_address[1])) for word in words[1:])]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert subprocess.run(command, check=False).returncode == 0
        answers["code"] = 503
        assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0
