"""What a person reads: regions told apart, figures aligned, nothing wider than 110 columns."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from memwal_ops import open_table, text
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.inspect.job import inspect
from tests.support.run_cli import run_here
from tests.support.tables import damage
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

UUID_TEXT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def make(path: Path, *, regions: int = 3, generations: int = 2) -> Workload:
    table = Workload(1, regions=regions, base_rows=90).create(str(path / "t.lance"))
    for _ in range(generations):
        for number in range(regions):
            table.put([number])
        table.flush()
    return table


def assert_narrow(said: str, *whole: str) -> None:
    """No line is wider than 110 columns but for one word that must stay whole, a path or URI."""
    for line in said.splitlines():
        assert len(line) <= 110 or any(word in line for word in whole), line
        assert line == line.rstrip()


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (["00000000-0000-4000-8000-000000000001"], ["00000000"]),
        (["5bc8fbbc-bde5-4099-8164-d8399f767c45", "87b0b125-ec1d-4da0-a6eb-8c9ebd69fe29"], ["5bc8fbbc", "87b0b125"]),
        (
            ["5bc8fbbc-bde5-4099-8164-d8399f767c45", "5bc8fbbc-ec1d-4da0-a6eb-8c9ebd69fe29"],
            ["5bc8fbbc-bde5", "5bc8fbbc-ec1d"],
        ),
        (
            ["00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"],
            ["00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"],
        ),
        ([], []),
    ],
)
def test_the_shortest_names_that_differ(ids: list[str], shown: list[str]) -> None:
    assert list(text.short_ids([UUID(one) for one in ids]).values()) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (9 << 50, "9216.0 TiB"),
    ],
)
def test_sizes(size: int, shown: str) -> None:
    assert text.size_text(size) == shown


@pytest.mark.parametrize(
    ("remedy", "filled"),
    [
        ("memwal-ops inspect URI shows it.", "memwal-ops inspect '/a b' shows it."),
        ("memwal-ops lease list URI; memwal-ops gc URI", "memwal-ops lease list '/a b'; memwal-ops gc '/a b'"),
        ("memwal-ops migrate-log URI --apply", "memwal-ops migrate-log '/a b' --apply"),
        ("Give the URI of a table.", "Give the URI of a table."),
    ],
)  # fmt: skip
def test_remedies_name_the_table(remedy: str, filled: str) -> None:
    assert text.for_table(remedy, "/a b") == filled


def test_paragraphs_keep_paths_whole() -> None:
    path = "/" + "long-folder/" * 12 + "file.lance"
    said = text.paragraph(f"Cannot read {path}: the store answered 503 after a while, so try again.", indent="    ")
    assert path in said
    assert_narrow(said, path)
    assert all(line.startswith("    ") for line in said.splitlines())


def test_tables_align_figures_right() -> None:
    said = text.grid(("name", "rows"), [("a", "1"), ("b", "1,000"), ("[red]x[/red]", "20")], words=("name",))
    assert said == textwrap.dedent("""\
        name           rows
        a                 1
        b             1,000
        [red]x[/red]     20""")


def test_tables_that_are_too_wide_wrap_at_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((70, 24)))
    name = "a-name-of-some-length@a-host.example.org"
    said = text.grid(("held by", "bytes waiting", "when"), [(name, "63.1 KiB", "in 5 min, after it failed")], words=())
    assert said.splitlines()[0].split() == ["held", "by", "bytes", "when"]
    assert f"{name}  63.1 KiB" in said, "words and figures stay whole"
    assert_narrow(text.paragraph("word " * 40))
    words = text.grid(("table", "when"), [(name, "in 5 minutes, after it failed for many times")], words=("when",))
    assert max(map(len, words.splitlines())) <= 70
    assert words.splitlines()[1].startswith(f"{name}  in 5 minutes,")


def test_inspect_prints_the_backlog(tmp_path: Path) -> None:
    table = make(tmp_path)
    behind = inspect(open_table(table.uri)).describe()
    assert "Behind by 6 generations in 3 regions: 6 rows, " in behind
    assert "PROBLEM" not in behind
    assert_narrow(behind, table.uri)
    for region in table.regions:
        assert re.search(rf"^{region}  active +1? *\d +none +2 \(1 to 2\) +2 ", behind, re.MULTILINE), behind
    merge.apply(open_table(table.uri), merge.MergeOptions())
    after = inspect(open_table(table.uri)).describe()
    assert "Up to date: the base table has every flushed generation.\n" in after
    assert re.search(r"^id_idx +BTree +behind ", after, re.MULTILINE)
    for region in table.regions:
        assert re.search(rf"^{region}  active +\d +to 2 +none +0 +0 B$", after, re.MULTILINE), after


def test_inspect_of_a_table_that_no_writer_opened(tmp_path: Path) -> None:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    assert "No writer has opened a region yet" in inspect(open_table(table.uri)).describe()


@pytest.mark.parametrize("merged_before", [False, True])
def test_inspect_names_each_problem(tmp_path: Path, merged_before: bool) -> None:
    table = make(tmp_path)
    cut, gone, well = table.regions
    if merged_before:
        merge.apply(open_table(table.uri), merge.MergeOptions(regions=(UUID(well),)))
    damage.truncate_region_manifest(table.uri, cut)
    damage.remove_generation(table.uri, gone, 1)
    damage.remove_generation(table.uri, gone, 2)
    inspection = inspect(open_table(table.uri))
    said = inspection.describe()
    assert "2 regions have a problem, see below." in said
    assert f"PROBLEM in region {cut}: region_manifest_corrupt" in said
    assert f"PROBLEM in region {gone} at generation 1: generation_missing" in said
    assert f"PROBLEM in region {well}" not in said
    assert said.count("What to do: ") == 2
    assert said.count("runbooks/merge-blocked.md") == 2
    assert re.search(rf"^{cut}  unreadable$", said, re.MULTILINE)
    assert_narrow(said, table.uri)
    errors = {region["region_id"]: region["error"] for region in inspection.to_json()["regions"]}  # type: ignore[attr-defined]
    assert {region: error and error["reason"] for region, error in errors.items()} == {
        cut: "region_manifest_corrupt",
        gone: "generation_missing",
        well: None,
    }


def test_up_to_date_is_not_printed_for_what_cannot_be_read(tmp_path: Path) -> None:
    table = make(tmp_path, regions=2)
    merge.apply(open_table(table.uri), merge.MergeOptions())
    damage.truncate_region_manifest(table.uri, table.regions[0])
    said = inspect(open_table(table.uri)).describe()
    assert "Up to date" not in said
    assert "Not known to be up to date" in said
    merged = merge.apply(open_table(table.uri), merge.MergeOptions()).describe()
    assert "No other generation is known to be unmerged" in merged
    assert "All generations are merged" not in merged


def test_a_merge_of_many_regions_stays_narrow(tmp_path: Path) -> None:
    table = make(tmp_path, regions=9)
    planned = merge.plan(open_table(table.uri), merge.MergeOptions(max_generations=7)).describe()
    assert planned.startswith("dry_run: would merge 18 generations in 3 passes; nothing was changed.\n")
    assert "rows waiting" in planned
    assert "version" not in planned
    said = merge.apply(open_table(table.uri), merge.MergeOptions(max_generations=7)).describe()
    assert said.startswith("merged: 18 generations in 3 passes, ")
    assert said.endswith("\nAll generations are merged.")
    for report in (planned, said):
        assert_narrow(report)
        for region in table.regions:
            assert region[:8] in report
    first = next(line for line in said.splitlines() if re.match(r" +1  [0-9a-f]{8} ", line))
    heading = next(line for line in said.splitlines() if line.startswith("pass"))
    for column in ("rows read", "rows written", "rows deleted", "version"):
        end = heading.index(column) + len(column)
        assert first[end - 1].isdigit()
        assert first[end : end + 1] in {"", " "}


def test_a_blocked_merge_prints_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = make(tmp_path)
    damage.truncate_region_manifest(table.uri, table.regions[0])
    damage.truncate_generation_manifest(table.uri, table.regions[1], 2)
    outcome = run_here(capfd, "merge", table.uri)
    assert outcome.code == 10
    assert outcome.out.startswith("blocked: 3 generations merged in 1 pass, but see below.\n")
    assert f"BLOCKED region {table.regions[0]}: region_manifest_corrupt\n" in outcome.out
    assert f"BLOCKED region {table.regions[1]} at generation 2: generation_corrupt\n" in outcome.out
    assert outcome.out.count("What to do: ") == outcome.out.count("runbooks/merge-blocked.md") == 2
    assert "Waiting: 1 generation in 1 region" in outcome.out
    assert_narrow(outcome.out, table.uri)
    assert len(set(UUID_TEXT.findall(outcome.out))) == 2


def test_the_demos_figures_add_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "demo", "--dir", str(tmp_path / "new"))
    assert outcome.code == 0, outcome.err
    assert_narrow(outcome.out, str(tmp_path))
    ledger = [
        int(number.replace(",", ""))
        for number in re.findall(r"^ +(-?[\d,]+)  (?:rows|were|del)", outcome.out, re.MULTILINE)
    ]
    assert len(ledger) == 5
    assert sum(ledger[:4]) == ledger[4]
    orders = re.search(r"holds ([\d,]+) orders \(([\d,]+) \+ ([\d,]+) new - ([\d,]+) deleted\)", outcome.out)
    assert orders is not None
    total, base, new, deleted = (int(number.replace(",", "")) for number in orders.groups())
    assert total == base + new - deleted
    assert f"rm -r {tmp_path}/new/orders.lance" in outcome.out
    short = {name[:8] for name in UUID_TEXT.findall(outcome.out)}
    assert len(short) == 3
    assert all(outcome.out.count(name) >= 2 for name in short), "each region in full, and by its short name"


def test_the_demo_makes_its_own_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_here(capfd, "demo")
    (made,) = tmp_path.iterdir()
    assert f"rm -r {made}\n" in outcome.out
    assert (made / "orders.lance" / "_versions").is_dir()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_the_demo_refuses_a_folder_that_cannot_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = run_here(capfd, "demo", "--dir", str(tmp_path / place))
    assert outcome.code == 2
    assert outcome.out == ""
    assert str(tmp_path / place) in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


def test_help_without_a_command_names_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd)
    assert outcome.code == 2
    assert "Maintain:" in outcome.err
    assert "runbooks/errors" not in outcome.err
    assert "runbooks/errors/02-invalid_usage.md" in run_here(capfd, "frob").err
