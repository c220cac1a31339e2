"""docs/formats/adding-one.md shows excerpts of the toy's code, docs/adding-a-job.md all code of a job, as it runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops.core import plugins, protocols
from tests.conformance.formats import SHARD
from tests.support.run_cli import run_process

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests/conformance/toy"
PAGE = ROOT / "docs/formats/adding-one.md"
SOURCES = {".py", ".toml"}


AUDIT, JOB_PAGE = ROOT / "tests/support/plugins/audit", ROOT / "docs/adding-a-job.md"


def blocks(page: Path, kind: str) -> list[tuple[str, str]]:
    """The blocks of code that a page marks as a ``file`` or an ``excerpt``: path and text."""
    marked = rf"^<!-- {kind}: (\S+) -->\n```\w+\n(.*?)^```$"
    return re.findall(marked, page.read_text(), re.DOTALL | re.MULTILINE)


def sources(folder: Path) -> dict[str, str]:
    """The source files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.suffix in SOURCES}


def test_the_page_shows_all_files() -> None:
    assert dict(blocks(JOB_PAGE, "file")) == sources(AUDIT)


def test_the_page_shows_parts_of_each_file() -> None:
    found = sources(TOY)
    shown = blocks(PAGE, "excerpt")
    assert {path for path, _ in shown} == set(found)
    for path, text in shown:
        for part in text.split("# ...\n"):
            assert part.strip("\n") in found[path], (path, part)


def test_the_page_has_each_member_and_where_each_class_is() -> None:
    """So that it can be followed without the toy's source."""
    rows = re.findall(r"^\| `(memwal_ops[\w.]+)` \| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    members = {name: text for _, name, text in rows}
    assert all(hasattr(importlib.import_module(module), name) for module, name, _ in rows)
    for protocol, names in (("TableFormat", plugins._FORMAT), ("Table", plugins._TABLE)):
        assert {*re.findall(r"`(\w+)", members[protocol])} == {*names}
        declared = {name for name in vars(getattr(protocols, protocol)) if not name.startswith("_")}
        assert declared == {*names}, "what is checked is what the protocol has"


def install_as_typed(page: Path, folder: Path, copied: Path | None = None) -> dict[str, str]:
    """Install as the page tells: the files that it shows, or a copied folder; the environment that sees the package."""
    command = re.search(r"^pip install (\S+)$", page.read_text(), re.MULTILINE)
    assert command is not None
    source = folder / "memwal-audit"
    if copied is not None:
        shutil.copytree(copied, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    for path, text in blocks(page, "file"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    # Into a folder of its own, and with nothing of a registry: what it depends on is here.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    here = source if command[1] == "." else folder
    subprocess.run([*pip, "--target", str(folder / "site"), command[1]], cwd=here, check=True)
    return {"PYTHONPATH": str(folder / "site")}


@pytest.mark.long
def test_a_job_as_a_reader_types_it(tmp_path: Path) -> None:
    environ = install_as_typed(JOB_PAGE, tmp_path)
    made = SHARD.make(str(tmp_path / "t.lance"))
    typed = re.search(r"^memwal-ops (audit) \S+ (--min-rows) (5)$", JOB_PAGE.read_text(), re.MULTILINE)
    assert typed is not None
    assert run_process(typed[1], made.uri, *typed.groups()[1:], **environ).out == "audited: 20 rows.\n"
    plain = str(tmp_path / "plain.lance")
    lance.write_dataset(pa.table({"k": range(7)}), plain)
    assert run_process("audit", plain, **environ).out == "audited: 7 rows.\n"
    steps = run_process("maintain", plain, "--dry-run", "--json", **environ).document["steps"]
    assert "audit" not in {one["step"] for one in steps}
    file = tmp_path / "c.yaml"
    file.write_text(
        f"state_dir: {tmp_path}/s\ntables: [{{uri: {made.uri}, jobs: {{audit: {{when: base_rows > 5}}}}}}]\n"
    )
    done = run_process("run", "--once", "--config", str(file), "--json", **environ)
    assert "audited" in {one["decision"] for one in done.document["runs"]}


@pytest.mark.long
def test_the_toy_format_as_a_reader_installs_it(tmp_path: Path) -> None:
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **install_as_typed(PAGE, tmp_path, TOY)}
    typed = re.search(r"^pip install \.\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert typed is not None
    done = subprocess.run(
        ["sh", "-ec", typed[1]], cwd=tmp_path, env={**os.environ, **environ}, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("merged: 2 log entries"), done
    assert "log entries          2" in done.stdout, done
    assert json.loads((tmp_path / "events/base/0000000002.json").read_text())["rows"] == {"a": 2}
    assert "jsonlog, revision 2, 1 part." in done.stdout
    assert "healthy: 0 findings" in done.stdout
    assert "+ version 2 contains the log up to 2" in done.stdout
    scanned = run_process("scan", str(tmp_path / "events"), **environ).out
    assert "safe beside writers" not in scanned, "a promise of the format alone"
    assert "gc: {apply: true}" in scanned
    assert "expire" not in scanned


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text())
    assert links
    assert all((PAGE.parent / link).exists() for link in links)
