"""What holds for the pages of runbooks/: one for each error, each found from the index, no link into nothing."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from memwal_ops import errors
from tests.system.drills import (
    test_errors,
    test_errors_of_index_folders,
    test_errors_of_legacy_tables,
    test_errors_of_stores,
    test_errors_of_supervisors,
    test_spark_errors,
    test_zeppelin_errors,
)
from tests.system.drills.drill import ERRORS
from tests.system.drills.error_pages import ROOT, RUNBOOKS, Page

if TYPE_CHECKING:
    from pathlib import Path

INDEX = Page(RUNBOOKS / "README.md")
# Pages that the index names already.
EXPECTED = {
    "backlog-growing", "stuck-lease", "writer-fenced", "conditional-writes", "catchup-never-finishes", "disk-full",
    "clock-skew", "restore-a-table", "move-a-table", "upgrade-pylance",
}  # fmt: skip
CLASSES = {
    found.exit_code: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, errors.MemwalOpsError)
}
PARTS = ("**What it means.**", "**Look.**", "**Do.**", "**Never**")
DRILLS = (
    test_errors,
    test_errors_of_index_folders,
    test_errors_of_legacy_tables,
    test_errors_of_stores,
    test_errors_of_supervisors,
    test_spark_errors,
    test_zeppelin_errors,
)


def pages() -> list[Path]:
    return [path for path in sorted(RUNBOOKS.rglob("*.md")) if path != INDEX.path]


def is_expected(path: Path) -> bool:
    """Whether a page may be linked before it is there."""
    alerts = RUNBOOKS / "alerts"
    return path.stem in EXPECTED if path.parent == RUNBOOKS else path.parent == alerts and not alerts.exists()


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(RUNBOOKS)) for path in paths]


def test_each_error_has_its_page() -> None:
    for code, kind in CLASSES.items():
        named = errors.runbook(code)
        assert named == f"runbooks/errors/{code:02}-{kind.reason}.md"
        page = Page(ROOT / str(named))
        assert page.title == f"{code} {kind.reason}"
        assert [page.text.count(part) for part in PARTS] == [1, 1, 1, 1], named
        assert [page.text.index(part) for part in PARTS] == sorted(page.text.index(part) for part in PARTS), named
        assert 15 <= page.text.count("\n") <= 40, named
        assert page.commands, named


def test_there_is_no_other_page_of_an_error() -> None:
    assert {str(path.relative_to(ROOT)) for path in ERRORS.iterdir()} == {errors.runbook(code) for code in CLASSES}
    assert errors.runbook(0) is None
    assert errors.runbook(130) is None


def test_a_page_agrees_with_the_remedy() -> None:
    """Options, files, functions and settings that the printed remedy names are in the page, too."""
    for code, kind in CLASSES.items():
        page = Page(ROOT / str(errors.runbook(code)))
        told = re.findall(r"--[a-z][a-z-]+|[\w-]+\.md\b|\b\w+_\w+\b|\b\w+(?=\()", kind.remedy)
        assert [word for word in told if word not in page.text] == [], page.name


def test_each_error_has_its_drill() -> None:
    drilled = Counter(
        name.removeprefix("test_").replace("_", "-", 1)
        for module in DRILLS
        for name in vars(module)
        if re.match(r"test_\d\d_", name)
    )
    assert drilled == Counter(path.stem for path in ERRORS.iterdir())


def test_the_index_names_each_page_once() -> None:
    linked = Counter(path for path, _ in INDEX.links if path.is_relative_to(RUNBOOKS) and path != INDEX.path)
    there = [path for path in linked if path.exists()]
    assert names(sorted(there)) == names(pages())
    assert [path for path, times in linked.items() if times > 1] == []
    assert [path for path in linked if not path.exists() and not is_expected(path)] == []


def test_the_index_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| \[(\w+)\]\(errors/([\w-]+)\.md\) \| (.+) \|$", INDEX.text, re.MULTILINE)
    assert {int(code): reason for code, reason, _, _ in rows} == {code: one.reason for code, one in CLASSES.items()}
    assert [name for code, reason, name, _ in rows if name != f"{int(code):02}-{reason}"] == []
    assert all(when for *_, when in rows)


def test_the_index_has_a_place_for_alerts() -> None:
    assert INDEX.text.count("<!-- alerts:") == INDEX.text.count("<!-- end of alerts -->") == 1
    section = INDEX.text.partition("<!-- alerts:")[2].partition("<!-- end of alerts -->")[0]
    folder = RUNBOOKS / "alerts"
    listed = re.findall(r"^\| \[\w+\]\(alerts/(\w+\.md)\) \| .+ \|$", section, re.MULTILINE)
    assert listed == sorted(listed)
    if folder.exists():
        assert listed == sorted(path.name for path in folder.iterdir())


def test_variables_are_explained() -> None:
    """Each variable is one of the index, or the page's own text says what it is."""
    for page in map(Page, ERRORS.iterdir()):
        used = {word for one in page.commands for word in re.findall(r"\$([A-Z_]+)", one.line)}
        explained = set(re.findall(r"\$ export ([A-Z]+)=", INDEX.text)) | set(re.findall(r"`\$([A-Z]+)`", page.prose))
        assert used - explained - {"AWS_ENDPOINT_URL"} == set(), page.name
