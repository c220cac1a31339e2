"""Spark from the command line, each as a process of its own: memwal-ops merge, and the program for spark-submit."""

from __future__ import annotations

import json
import os
import pty
import shlex
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.s3_server import options_for
from tests.support.spark import CHEAP_JAVA, skip_without_spark, submit_args
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.timeout(1800), pytest.mark.s3]
PATIENCE = 1500.0
ROOT = Path(__file__).parents[3]
# The documented examples, no real ones.
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "IQoJb3JpZ2luX2VjEXAMPLEsessiontoken"


@pytest.fixture
def table(s3_bucket: str, s3_options: dict[str, str]) -> Workload:
    skip_without_spark()
    made = Workload(4, regions=2, base_rows=30).create(f"s3://{s3_bucket}/t.lance", s3_options).step(6)
    made.close()
    return made


def settings(events: Path, **others: str) -> dict[str, str]:
    """Spark's event log holds what its UI shows: configuration, plans, job descriptions, errors of tasks."""
    events.mkdir()
    log = {"enabled": "true", "dir": f"file://{events}", "compress": "false"}
    return {
        **{f"spark.eventLog.{key}": value for key, value in log.items()},
        "spark.driver.extraJavaOptions": CHEAP_JAVA,
        **{f"spark.{key.replace('_', '.')}": value for key, value in others.items()},
    }


def logged(events: Path) -> str:
    said = "".join(path.read_text() for path in events.rglob("*") if path.is_file())
    assert "memwal-ops: write the newest rows" in said, "the premise: the jobs are in the event log"
    return said


def assert_kept(texts: Iterable[str]) -> None:
    for text in texts:
        for secret in (SECRET, TOKEN, SECRET.replace("/", "\\/"), SECRET.replace("/", "%2F")):
            assert secret not in text


def test_merge_on_a_terminal_shows_its_progress_and_no_secret(
    table: Workload, s3_options: dict[str, str], tmp_path: Path
) -> None:
    secrets = {**s3_options, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}
    command = [sys.executable, "-m", "memwal_ops", "--log-level", "debug", "merge", table.uri, "--json"]
    command += ["--engine", "spark", "--master", "local[2]"]
    command += [word for key, value in secrets.items() for word in ("--storage-option", f"{key}={value}")]
    environment = {
        **os.environ,
        "PYSPARK_SUBMIT_ARGS": submit_args(settings(tmp_path / "events", ui_enabled="false")),
        "TERM": "xterm",
        "COLUMNS": "160",
    }
    ours, theirs = pty.openpty()
    shown = bytearray()

    def watch() -> None:
        with suppress(OSError):  # how a terminal ends
            while data := os.read(ours, 65536):
                shown.extend(data)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        watcher = threading.Thread(target=watch)
        watcher.start()
        out, _ = process.communicate(timeout=PATIENCE)
        watcher.join()
    os.close(ours)
    terminal = shown.decode()
    assert process.returncode == 0, terminal
    report = json.loads(out)
    assert (report["decision"], report["engine"], report["engine_reason"]) == ("merged", "spark", "requested")
    assert_same(read_base(table.uri, s3_options), table.model.expected(), seed=table.seed)
    for words in ("starting Spark", "merging: keys", "merging: write", "tasks, ", " rows"):
        assert words in terminal
    assert_kept([logged(tmp_path / "events"), out, terminal])


class Pages:
    """The pages of Spark's UI, read again and again for as long as it is there."""

    def __init__(self, port: int) -> None:
        self.seen: dict[str, str] = {}
        self._base = f"http://127.0.0.1:{port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Pages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self._ended.wait(0.1):
            for page in ("environment", "jobs"):
                with suppress(OSError), opener.open(f"{self._base}/{page}/", timeout=10) as answer:
                    self.seen[page] = self.seen.get(page, "") + answer.read().decode()


def test_spark_submit_as_in_the_docs(
    table: Workload, s3_endpoint: str, s3_options: dict[str, str], no_aws_environment: None, tmp_path: Path
) -> None:
    (line,) = [
        block.replace("\\\n", " ").strip()
        for block in (ROOT / "docs" / "spark.md").read_text().split("```")
        if "spark-submit --master yarn" in block
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {key: value for key, value in options_for(s3_endpoint).items() if "key" not in key}
    conf = settings(tmp_path / "events", ui_port=str(port), driver_host="127.0.0.1", driver_bindAddress="127.0.0.1")
    words = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    written = line.removeprefix("sh\n").replace("s3://bucket/table.lance", table.uri)
    written = written.replace("--master yarn", f"--master 'local[2]' {shlex.join(words)}")
    written += "".join(f" --storage-option {key}={value}" for key, value in place.items())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
    }
    with Pages(port) as pages:
        done = subprocess.run(
            ["bash", "-c", written], cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            timeout=PATIENCE,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["decision"], report["engine"]) == ("merged", "spark")
    assert {"keys", "delete", "write", "commit"} <= report["passes"][0]["phases"].keys()
    assert_same(read_base(table.uri, s3_options), table.model.expected(), seed=table.seed)
    assert "spark.speculation" in pages.seen["environment"], "the premise: its page shows the settings"
    assert "memwal-ops: find superseded base rows" in pages.seen["jobs"]
    assert_kept([logged(tmp_path / "events"), done.stdout, done.stderr, *pages.seen.values()])
