"""What is printed for people carries no control characters, wherever its parts come from; JSON is exact."""

from __future__ import annotations

import ast
import os
import re
import sys
import unicodedata
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

import memwal_ops
from memwal_ops import open_table
from memwal_ops.core.holds import take_hold
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.catalogs import resolve
from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.text import grid, paragraph, printable
from tests.support.run_cli import run_here
from tests.support.tables.workload import Workload
from tests.system.cli.test_log import Terminal, logged

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# It clears the screen, sets the terminal's title, turns the rest around, and pretends to be a line of ours.
NASTY = "\x1b[2J\x1b]0;owned\x07\u202egnp\u2066\u200b\x9b31m\u2028\nreleased: hold 1."
WIDE = "\uff11\uff12"


def unsafe(text: str) -> set[str]:
    return {one for one in text if one != "\n" and unicodedata.category(one) in UNSAFE}


def test_every_character_that_moves_others_is_escaped() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert {unicodedata.category(one) for one in every} >= UNSAFE
    safe = printable(every)
    assert not unsafe(safe)
    assert "\n" not in safe
    assert printable(safe) == safe
    assert printable("a\nb\x1b", lines=True) == "a\nb\\x1b"
    assert printable("d\udcff e\u202e \U000e0001") == r"d\udcff e\u202e \U000e0001"
    assert printable("naïve 表 🙂 \u3000") == "naïve 表 🙂 \u3000"


def test_paragraphs_and_grids_are_of_one_piece() -> None:
    """What a cell or a name holds is never a line of its own."""
    assert r"\nreleased" in paragraph(NASTY)
    assert r"\nreleased" in grid(("note",), [(NASTY,)], words=("note",))
    assert not unsafe(paragraph(NASTY) + grid(("note",), [(NASTY,)], words=("note",)))


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    """Nasty texts wherever a person is shown what others wrote."""
    made = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(6)
    made.flush()
    made.close()
    take_hold(open_table(made.uri), 1, timedelta(hours=1), note=NASTY)
    for folder in ("_mem_wal", f"_mem_wal/{made.regions[0]}", f"_mem_wal/{made.regions[0]}/manifest"):
        Path(made.uri, folder, NASTY).write_bytes(b"x")
        os.mkdir(f"{made.uri}/{folder}/{NASTY} folder")
        Path(made.uri, folder, f"{NASTY} folder", "x").write_bytes(b"x")
    with open(os.fsencode(made.uri) + b"/_mem_wal/no\xffutf8", "wb") as file:
        file.write(b"x")
    return made


COMMANDS = [
    ("inspect", "URI"), ("snapshot", "URI", "--dry-run"), ("snapshot", "URI"), ("merge", "URI", "--dry-run"),
    ("merge", "URI"), ("gc", "URI"), ("gc", "URI", "--apply"), ("why", "URI", "_mem_wal"), ("why", "URI", NASTY),
    ("hold", "URI", "--list"), ("hold", "URI", "--note", NASTY), ("lease", "list", "URI"), ("maintain", "URI"),
    ("inspect", NASTY), ("inspect", "URI", f"--{NASTY}"), (NASTY,), ("merge", "URI", "--max-bytes", NASTY),
    ("expire", "URI"), ("history", "--state-dir", NASTY), ("config", "check", NASTY),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace(NASTY, "NASTY"))
def test_no_command_prints_what_moves_the_cursor(
    table: Workload, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    arguments = [table.uri if word == "URI" else word for word in command]
    done = run_here(capfd, *arguments)
    assert done.code != 1
    assert not unsafe(done.out + done.err)
    assert "\nreleased: hold 1." not in done.out + done.err
    if command[0] in {"inspect", "snapshot", "gc", "hold"} and done.code == 0 and NASTY not in command:
        assert r"\x1b[2J\x1b]0;owned\x07\u202egnp" in done.out
        # The same exactly, for scripts.
        exact = run_here(capfd, *arguments, "--json")
        assert not unsafe(exact.out)
        assert any(NASTY in text for text in texts(exact.document))


def texts(found: object) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    for one in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from texts(one)


def test_nothing_bypasses_it() -> None:
    """Commands print through memwal_ops.cli.printing alone."""
    folder = Path(memwal_ops.__file__).parent / "cli"
    for path in folder.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(call) for call in calls}
        assert path.name == "printing.py" or not names & {"click.echo", "print", "click.secho"}, path


def test_a_log_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = logged(monkeypatch, Terminal(), NASTY, note=NASTY, path=Path(NASTY))
    assert not unsafe(text)
    assert text.count("\n") == 1


def test_labels_of_metrics() -> None:
    """A label is a folder's name; the text format has three escapes only, so the backslash itself is escaped."""
    metrics = Metrics(dict)
    metrics.registry = type(metrics.registry)()
    metrics.polls = metrics._of_tables("polls", "x", "outcome")
    metrics.polls.add("a\u202eb\x1b", "failed")
    text = b"".join(metrics.expose()).decode()
    assert not unsafe(text)
    assert r'table="a\\u202eb\\x1b"' in text


# -- options and URIs


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "x", "--max-bytes", "many"), ("merge", "x", "--max-generations", "0"), ("merge",), ("xyzzy",),
        ("merge", "x", "--nothing"), ("merge", "x", "y"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_option_error_has_the_three_lines_of_every_error(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    done = run_here(capfd, *arguments)
    said, remedy, page = done.err.splitlines()
    assert said.startswith("Error (invalid_usage, exit code 2): ")
    assert remedy.strip() == f"See memwal-ops {'' if arguments[0] == 'xyzzy' else arguments[0] + ' '}--help."
    assert page == "  See runbooks/errors/02-invalid_usage.md"
    document = run_here(capfd, *arguments, "--json").document["error"]
    assert f"{said.split(': ', 1)[1]} {document['remedy']}" == f"{document['message']} {remedy.strip()}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "URI", "--max-generations", WIDE), ("merge", "URI", "--max-bytes", WIDE),
        ("expire", "URI", "--older-than", f"{WIDE}d"),
        ("history", "--limit", WIDE), ("merge", "URI", "--region", f"{WIDE}345678-1234-4234-8234-123456789012"),
    ],
    ids=str,
)  # fmt: skip
def test_digits_of_other_scripts_are_no_numbers(
    table: Workload, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    done = run_here(capfd, *(table.uri if word == "URI" else word for word in arguments))
    assert done.code == 2
    assert WIDE in done.err


def test_config_check_has_the_error_document_of_all_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tables: [{uri: relative}]\n")
    checked = run_here(capfd, "config", "check", str(file), "--json")
    other = run_here(capfd, "history", "--config", str(file), "--json")
    assert checked.code == other.code == 50
    assert checked.document["error"] == other.document["error"]
    assert [one["line"] for one in checked.document["problems"]] == [1]


@pytest.mark.parametrize(
    "uri", ["file:/a/x.lance", "file:///a/x.lance", "FILE:/a/x.lance", "file://localhost/a/x.lance"]
)
def test_every_spelling_of_a_file_uri(uri: str) -> None:
    assert resolve(uri).uri == "/a/x.lance"


@pytest.mark.parametrize("uri", ["file:a/x.lance", "s3:/bucket/x.lance", "gs:bucket/x.lance"])
def test_half_a_uri_is_no_relative_path(uri: str) -> None:
    with pytest.raises(InvalidUsageError, match="is not a valid URI; write"):
        resolve(uri)
    assert resolve(f"./{uri}").uri == os.path.abspath(uri)


def test_a_report_names_pages_by_paths_that_open(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the project's folder, where a relative path leads nowhere."""
    made = Workload(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    made.put([2])
    made.close()
    lance.write_dataset(pa.table({"a": [1]}), made.uri, mode="overwrite")
    monkeypatch.chdir(tmp_path)
    shown = run_here(capfd, "inspect", made.uri)
    [page] = re.findall(r"[^\s(]*runbooks/[\w/.-]+\.md", shown.out)
    assert os.path.isfile(page), page
    assert page.endswith("/runbooks/errors/05-no_memwal_index.md")
