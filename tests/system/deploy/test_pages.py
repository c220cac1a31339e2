"""README, docs/, runbooks/, CONTRIBUTING and SECURITY: short, linked to what is there, and their commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import errors
from memwal_ops.cli.main import cli
from memwal_ops.core.erasure import EraseDecision
from memwal_ops.core.report import MergeDecision
from memwal_ops.formats.lance.jobs import adopt
from memwal_ops.formats.lance.jobs.catchup.report import CatchupDecision
from memwal_ops.formats.lance.jobs.compact.report import CompactDecision
from memwal_ops.formats.lance.jobs.gc import evidence as gc_candidates
from memwal_ops.formats.lance.jobs.snapshot import SnapshotDecision
from tests.support.run_cli import contents, run_here
from tests.support.runbook import commands
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same
from tests.system.drills.error_pages import ROOT, Page
from tests.system.drills.lines import run_line

if TYPE_CHECKING:
    import enum
    from collections.abc import Iterator

README = Page(ROOT / "README.md")
OPERATIONS = Page(ROOT / "docs/operations.md")
JOBS = Page(ROOT / "docs/jobs.md")
# Other tables begin with a number, too: the offsets of a format's page.
REASONS = "|".join(
    sorted({error.reason for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "exit_code")})
)


@cache
def pages() -> list[Path]:
    folders = (
        path for name in ("benchmarks", "docs", "runbooks", "tests") for path in sorted((ROOT / name).rglob("*.md"))
    )
    return [*sorted(ROOT.glob("*.md")), *folders]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Workload]:
    made = Workload(7, regions=2, base_rows=30).create(str(tmp_path / "orders.lance"))
    for _ in range(3):
        made.step(4)
        made.flush()
    yield made
    made.close()


def test_the_readme_is_short() -> None:
    assert README.text.count("\n") <= 130


def test_the_readme_leads_to_every_page_of_docs() -> None:
    linked = {target for target, _ in README.links}
    assert [path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in linked] == []


def test_the_site_has_every_page_of_docs_and_runbooks_in_its_navigation() -> None:
    """mkdocs.yml: those of errors and alerts have lists of their own."""
    named = set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    runbooks = {f"runbooks/{path.name}" for path in (ROOT / "runbooks").glob("*.md")}
    assert (docs | runbooks) - named == set()


def test_exit_codes_are_listed_once() -> None:
    """Two lists of them would differ one day."""
    for path in pages():
        rows = re.findall(rf"^\| \d+ \| \[?(?:{REASONS})\b", path.read_text(), re.MULTILINE)
        assert not rows or path == ROOT / "runbooks/README.md", path


def test_every_link_leads_somewhere() -> None:
    anchors = cache(lambda target: Page(target).anchors)
    dead = [
        f"{path.relative_to(ROOT)}: {target}#{heading}"
        for path in pages()
        for target, heading in Page(path).links
        if not target.exists() or (heading and target.suffix == ".md" and heading not in anchors(target))
    ]
    assert dead == []


def test_the_readmes_commands_run(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in commands(README.text) if "s3://bucket/table.lance" in line]
    assert [line.split()[1] for line in lines] == ["inspect", "merge", "maintain"]
    for line in lines:
        outcome = run_line(capfd, line.replace("s3://bucket/table.lance", table.uri))
        assert outcome.code == 0, f"{line}\n{outcome}"
    assert_same(read_base(table.uri), table.expected())


def test_the_readmes_python_runs(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.text, re.DOTALL)
    exec(compile(block.replace("s3://bucket/table.lance", table.uri), "README.md", "exec"), {})
    assert "maintained" in capfd.readouterr().out
    assert_same(read_base(table.uri), table.expected())


def test_the_readmes_first_commands_maintain_a_lancedb_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first block of the page: nothing changes before the last command, and that leaves no row out."""
    docs = PlainTable(str(tmp_path / "lancedb/docs.lance")).create(fragments=6, rows=50, index=True)
    docs.append(20)
    docs.delete(*range(40))
    before = contents(docs.uri)
    lines = commands(README.text.partition("## Guarantees")[0])
    assert [line.split()[1] for line in lines] == ["scan", "maintain", "maintain"]
    for line in lines:
        assert contents(docs.uri) == before
        outcome = run_line(capfd, line.replace("/data/lancedb", str(tmp_path / "lancedb")))
        assert outcome.code == 0, f"{line}\n{outcome}"
    assert len(docs.dataset.get_fragments()) == 1
    assert docs.read() == docs.model


@pytest.mark.long
def test_each_question_of_operations_has_one_command_that_runs(
    table: Workload, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"state_dir: {tmp_path}/state\ntables: [{{uri: {table.uri}}}]\n")
    assert run_here(capfd, "run", "--once", "--config", str(config)).code == 0
    table.step(4)
    table.flush()
    monkeypatch.setenv("URI", table.uri)
    monkeypatch.setenv("TARGET", f"{table.regions[0]}/1")
    monkeypatch.setenv("CONFIG", str(config))
    sections = re.split(r"^## ", OPERATIONS.text, flags=re.MULTILINE)
    questions = [one for one in sections if re.match(r"\d+\. ", one)]
    assert len(questions) == 10
    for question in questions:
        (line,) = commands(question)
        outcome = run_line(capfd, line)
        assert outcome.code == 0, f"{line}\n{outcome}"
        assert outcome.out
    assert_same(read_base(table.uri), table.expected())


def test_commands_and_options_that_pages_name_exist() -> None:
    """In prose and code of README, docs/jobs.md, docs/operations.md and docs/install.md."""
    with cli.make_context("memwal-ops", ["inspect", "x"]) as context:
        flags = {option for name in cli.list_commands(context) for option in _flags(cli.get_command(context, name))}
        names = set(cli.list_commands(context))
    for page in (README, JOBS, OPERATIONS):
        assert set(re.findall(r"(?<![\w/.-])memwal-ops ([a-z]+)\b(?=.*`| )", _code(page.text))) <= names, page.name
        assert set(re.findall(r"`(--[a-z-]+)", page.text)) <= flags, page.name


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in pages():
        named = re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)", path.read_text(), re.MULTILINE)
        assert {one for words in named for one in words.split()} <= targets, path


def _code(text: str) -> str:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return "\n".join([*blocks, *(f"{one}`" for one in re.findall(r"`(memwal-ops [^`\n]+)`", text))])


def _flags(command: object) -> set[str]:
    found = {flag for parameter in getattr(command, "params", ()) for flag in parameter.opts}
    for inner in getattr(command, "commands", {}).values():
        found |= _flags(inner)
    return found


def _section(job: str) -> str:
    (found,) = re.findall(rf"^## {job}\n(.*?)(?=^## |\Z)", JOBS.text, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("merge", MergeDecision),
        ("catchup", CatchupDecision),
        ("compact", CompactDecision),
        ("snapshot", SnapshotDecision),
        ("adopt", adopt.AdoptDecision),
        ("gc", gc_candidates.CandidateKind),
        ("erase", EraseDecision),
    ],
)
def test_the_page_of_the_jobs_has_every_decision(job: str, words: type[enum.StrEnum]) -> None:
    told = set(re.findall(r"`(\w+)`", _section(job)))
    assert {one.value for one in words} - {"base"} <= told


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "job", ["merge", "catchup", "compact", "snapshot", "expire", "gc", "erase", "maintain", "adopt", "inspect"]
)
def test_the_page_of_the_jobs_has_every_key(job: str, table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    extra = {"adopt": ["--as", "unmerged"], "erase": ["--where", "id = 1"]}.get(job, [])
    document = run_here(capfd, job, table.uri, *extra, "--json").document
    if job not in {"adopt", "inspect"}:
        assert f"`{document['decision']}`" in _section(job)
    (told,) = re.findall(r"JSON: `([^`]+)`", _section(job))
    assert told.replace("[]", "").split() == [*document]


@pytest.mark.long
def test_the_examples_of_the_api_pass_a_strict_type_checker(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text("URI = 's3://bucket/t.lance'\n" + "\n".join(blocks))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), str(program)]
    # mypy does not look where an editable installation has the package; of that, only the program is checked.
    environment, more = {**os.environ, "MYPYPATH": str(ROOT)}, ["--follow-imports=silent"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout


def test_functions_that_the_page_of_protocols_names_are_where_it_links() -> None:
    """Each row of a table "step, code": in one of its files, or, for "the same", in those that came before."""
    files: list[str] = []
    named = 0
    for protocol in (ROOT / "docs/protocol.md").read_text().split("| step | code |")[1:]:
        for row in protocol.split("\n\n")[0].splitlines()[2:]:
            files += [(ROOT / path).read_text() for path in re.findall(r"\]\(\.\./(memwal_ops/\S+\.py)\)", row)]
            for name in re.findall(r"`(\w+)`", row.split(" | ")[-1]):
                assert any(re.search(rf"(?:def|class) {name}\b", text) for text in files), row
                named += 1
    assert named > 20
