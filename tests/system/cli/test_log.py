"""Stderr: JSON lines for machines, coloured lines for people, nothing of Lance's own noise."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
import structlog

from memwal_ops import log as logging_setup
from memwal_ops.core import run
from memwal_ops.storage.options import redact
from tests.support.run_cli import run_here, run_process
from tests.support.tables.stale_indexes import with_details_named
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ESCAPE = "\x1b["


class Terminal(io.StringIO):
    """What a process on a terminal has as stderr."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    logging.captureWarnings(capture=False)  # a second capture is ignored, and another test may have left one
    yield
    structlog.reset_defaults()
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def uri(tmp_path: Path) -> str:
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(4)
    table.close()
    return table.uri


def logged(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, event: str, **values: Any) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    logging_setup.configure(level="DEBUG", redact=redact)
    structlog.get_logger().info(event, **values)
    return stream.getvalue()


@pytest.mark.parametrize(
    "values",
    [
        {"secret_access_key": "abcdefgh"},
        {"options": {"aws_secret_access_key": "abcdefgh"}},
        {"options": [("aws_secret_access_key", "x"), {"password": "abcdefgh"}]},
        {"error": ValueError("aws_secret_access_key = 'abcdefgh'")},
        {"endpoint": "https://user:abcdefgh@host/x"},
    ],
    ids=["by name", "in a dict", "deep inside", "in an error", "in a URL"],
)
@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["piped", "terminal"])
def test_values_are_redacted(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], stream: type[io.StringIO]
) -> None:
    text = logged(monkeypatch, stream(), "event", **values)
    assert "event" in text
    assert "abcdefgh" not in text
    assert "***" in text


def test_numbers_stay_numbers_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.loads(logged(monkeypatch, io.StringIO(), "event", rows=3, seconds=0.5, done=True, nothing=None))
    assert (line["rows"], line["seconds"], line["done"], line["nothing"]) == (3, 0.5, True, None)
    assert (line["event"], line["level"]) == ("event", "info")


@pytest.mark.parametrize(
    ("environment", "colours"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], colours: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (ESCAPE in logged(monkeypatch, Terminal(), "event", rows=3)) is colours
    assert ESCAPE not in logged(monkeypatch, io.StringIO(), "event", rows=3)


def test_other_libraries_speak_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logged(monkeypatch, stream, "ours")
    logging.getLogger("botocore.session").warning("token=%s", "abcdefgh")
    logging.getLogger("botocore.session").debug("a whole request")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("logger") for line in lines] == [None, "botocore.session", "py.warnings"]
    assert lines[1]["event"] == "token=***"
    assert "old thing" in lines[2]["event"]
    logging_setup.configure(redact=redact)  # again: each line still comes once
    logging.getLogger("botocore.session").error("once")
    assert stream.getvalue().count("once") == 1


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["piped", "terminal"])
def test_a_bug_of_ours_is_logged_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stream: type[io.StringIO], uri: str
) -> None:
    """The traceback tells where; it shows no local variables, which may hold options, and no warning of structlog's."""

    def fail(*_: object, **__: object) -> None:
        local_variable = "abcdefgh".upper()
        raise KeyError(len(local_variable))

    monkeypatch.setattr(run, "open_table", fail)
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    outcome = run_here(capfd, "inspect", uri, "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["reason"] == "error"
    assert "KeyError" in outcome.document["error"]["message"]
    assert "Traceback" in err.getvalue()
    assert "report it" in err.getvalue()
    assert "ABCDEFGH" not in err.getvalue()


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command writes to a terminal that is its stdout and stderr."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "memwal_ops", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "LANCE_LOG"}}
    said = b""
    with subprocess.Popen(
        command, stdout=follower, stderr=follower, env={**kept, "TERM": "xterm", **environment}
    ) as process:
        os.close(follower)
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # the last one closed the other end
                break
            if not piece:
                break
            said += piece
    os.close(leader)
    assert process.returncode == 0, said
    return said.decode()


@pytest.mark.long
def test_on_a_real_terminal(uri: str) -> None:
    plain = on_a_terminal("inspect", uri)
    assert ESCAPE not in plain
    merging = on_a_terminal("--log-level", "info", "merge", uri)
    assert "merging" in merging
    assert f"{ESCAPE}2K" in merging, "the bar is wiped away"
    assert "merged: " in merging.replace("\r", "").rsplit(ESCAPE, 1)[-1]
    again = on_a_terminal("merge", uri)
    assert ESCAPE not in again, "no bar where nothing waits"
    assert again.startswith("nothing_to_merge")


def test_no_color_on_a_real_terminal(uri: str) -> None:
    text = on_a_terminal("--log-level", "info", "merge", uri, NO_COLOR="1")
    assert "pass_merged" in text
    assert f"{ESCAPE}3" not in text


@pytest.mark.long
def test_lances_false_alarm_does_not_come(uri: str) -> None:
    """Landmine 9 comes with merge_insert alone, which no command calls; Lance's log itself is left as it is."""
    for command in ("inspect", "merge"):
        assert run_process(command, uri).err == ""
    said = run_process("verify", uri, LANCE_LOG="info").err
    assert "lance::" in said, "what a user asks Lance to log is shown"
    for command in ("inspect", "merge"):
        assert "has no fields" not in run_process(command, uri, LANCE_LOG="debug").err


@pytest.mark.parametrize("known", [True, False], ids=["harmless", "others stay"])
def test_lances_word_on_the_details_of_an_index(tmp_path: Path, known: bool) -> None:
    """Those of Lance 6, as DuckDB writes them, are used; of others the warning stays."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(64), "v": pa.FixedSizeListArray.from_arrays(pa.array(range(128), pa.float32()), 2)})
    lance.write_dataset(rows, uri).create_index("v", "IVF_FLAT", num_partitions=2, name="vectors")
    with_details_named(uri, "vectors", f"/lance.{'table' if known else 'other'}.VectorIndexDetails")
    said = run_process("inspect", uri)
    assert ("unrecognized type" in said.err) != known
    assert known == (said.err == "")
    if known:
        assert "caught up" in said.out
        assert "unrecognized type" in run_process("inspect", uri, LANCE_LOG="warn").err


def test_a_command_that_cannot_be_loaded_leaves_stdout_to_results() -> None:
    code = (
        "import sys; sys.modules['memwal_ops.cli.status'] = None\n"
        "from memwal_ops.cli.main import main; main(['status', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["error"]["reason"]) == (1, "error")
    assert json.loads(done.stderr.splitlines()[0])["event"] == "unexpected_error"
