"""``make dist``: each of its checks fails on what it is for. CI runs the target itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import dist, licenses, man_page, try_dist

ROOT = Path(__file__).parents[3]
URL = "https://code.example.org/memwal-ops"
TREE = {"README.md": b"r", "pyproject.toml": b"p", "docs/a.md": b"a", "memwal_ops/x.py": b"x", "tests/t.py": b"t"}
SDIST = {**TREE, "PKG-INFO": b"", dist.MAN: b"", "memwal_ops.egg-info/SOURCES.txt": b"", "setup.cfg": b""}
WHEEL = {
    "memwal_ops/x.py": b"x",
    "memwal_ops-0.1.0.dist-info/METADATA": b"",
    "memwal_ops-0.1.0.dist-info/entry_points.txt": b"",
    "memwal_ops-0.1.0.dist-info/licenses/LICENSE": b"",
    "memwal_ops-0.1.0.dist-info/licenses/NOTICE": b"",
    "memwal_ops-0.1.0.data/data/share/man/man1/memwal-ops.1": b"",
}
METADATA = "License-Expression: Apache-2.0\n" + "".join(
    f"Classifier: Programming Language :: Python :: 3.{minor}\n" for minor in (11, 12, 13)
)


def test_links_of_the_readme_work_elsewhere_or_are_text() -> None:
    text = (ROOT / "README.md").read_text()
    absolute = dist.page_of_an_index(text, f"{URL}/")
    assert f"]({URL}/blob/main/docs/install.md)" in absolute
    assert dist.faults_of_metadata(f"{METADATA}\n{absolute}") == []
    plain = dist.page_of_an_index(text, "")
    assert "docs/install.md has pip" in plain
    assert "](https://lance.org)" in plain
    assert dist.faults_of_metadata(f"{METADATA}\n{plain}") == []
    assert any("docs/install.md" in fault for fault in dist.faults_of_metadata(f"{METADATA}\n{text}"))


def test_the_metadata_has_urls_only_if_the_repository_has_one() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert dist.with_urls(project, "") == project
    urls = tomllib.loads(dist.with_urls(project, URL))["project"]["urls"]
    assert urls["Changelog"] == f"{URL}/blob/main/CHANGELOG.md"
    assert {"Homepage", "Documentation", "Issues", "Security"} < {*urls}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"docs/a.md": None}, "lacks docs/a.md"),
        ({"docs/b.md": b""}, "has docs/b.md, which git does not track"),
        ({"tests/t.py": b"other"}, "another tests/t.py"),
        ({dist.MAN: None}, f"lacks {dist.MAN}"),
        ({"PKG-INFO": None}, "lacks PKG-INFO"),
    ],
)
def test_a_source_archive_that_is_not_the_tree(change: dict[str, bytes | None], fault: str) -> None:
    assert dist.faults_of_sdist({**SDIST, "README.md": b"with other links"}, TREE) == []
    (found,) = dist.faults_of_sdist(changed(SDIST, change), TREE)
    assert fault in found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"memwal_ops/x.py": None}, "lacks memwal_ops/x.py"),
        ({"tests/t.py": b"t"}, "has tests/t.py"),
        ({"memwal_ops-0.1.0.dist-info/licenses/NOTICE": None}, "NOTICE"),
        ({"memwal_ops-0.1.0.data/data/share/man/man1/memwal-ops.1": None}, "memwal-ops.1"),
    ],
)
def test_a_wheel_that_is_not_the_package(change: dict[str, bytes | None], fault: str) -> None:
    assert dist.faults_of_wheel(WHEEL, TREE) == []
    (found,) = dist.faults_of_wheel(changed(WHEEL, change), TREE)
    assert fault in found


def test_folders_of_this_machine_and_gaps_of_the_metadata() -> None:
    assert dist.faults_of_paths(WHEEL, ["/home/me/"]) == []
    (fault,) = dist.faults_of_paths({"a.py": b"open('/home/me/x')"}, ["/home/me/", "/srv/"])
    assert fault.startswith("a.py names /home/me/")
    assert "no license" in dist.faults_of_metadata(METADATA.replace("Apache-2.0", "MIT"))[0]
    (fault,) = dist.faults_of_metadata(METADATA.replace("3.13", "3.10"))
    assert "3.10" in fault


def test_what_git_tracks_is_the_tree_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/one.md").write_text("one")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/pages").symlink_to("../pages")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / "draft.md").write_text("not tracked")
    assert dist.tree_of(tmp_path) == {"pages/one.md": b"one", "package/pages/one.md": b"one"}


def test_each_folder_gets_into_the_source_archive() -> None:
    """make dist finds it, too, minutes later."""
    folders = {name.partition("/")[0] for name in dist.tracked(ROOT) if "/" in name}
    assert folders | {"man"} == set(re.findall(r"^graft (.+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))


def test_a_repacked_archive_does_not_depend_on_time_owner_and_order(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    made = []
    for number, names in enumerate([("a", "b"), ("b", "a")]):
        path = tmp_path / f"{number}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                file = tmp_path / "p" / name
                file.write_text(name)
                os.utime(file, (number, number))
                file.chmod(0o600 + number)
                archive.add(file, f"p/{name}")
        made.append(path)
    assert made[0].read_bytes() != made[1].read_bytes()
    for path in made:
        dist.repack(path, 1_700_000_000)
    assert made[0].read_bytes() == made[1].read_bytes()
    assert dist.files_of(made[0]) == {"a": b"a", "b": b"b"}
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("p/a", "a")
    assert dist.files_of(tmp_path / "w.whl") == {"p/a": b"a"}


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [
        ("MIT", True),
        ("Apache Software License; BSD License", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("GNU Lesser General Public License v3 or later (LGPLv3+)", False),
        ("MIT AND GPL-2.0-only", False),
        ("UNKNOWN", False),
    ],
)
def test_licenses(expression: str, permissive: bool) -> None:
    assert licenses.is_permissive(expression) is permissive
    notice = "Permissive, but for one:\n\n  named, GNU Lesser General Public License, version 3 or later.\n"
    rows = [{"Name": "named", "License": expression}, {"Name": "other", "License": expression}]
    faults = licenses.faults_of_licenses(rows, notice)
    assert [fault.split()[0] for fault in faults] == ([] if permissive else ["other"])


def test_the_page_on_installing_weighs_each_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=~ ]", one)[0] for one in project["dependencies"]}
    table = (ROOT / "docs/install.md").read_text().partition("## What is installed with it")[2]
    named = [name for names in re.findall(r"^\| ([^|]+) \| \d+ \|", table, re.MULTILINE) for name in names.split(", ")]
    assert sorted(named) == sorted(needed)


def test_the_man_page_has_each_command_and_exit_code() -> None:
    page = man_page.page(0)
    assert '.TH MEMWAL-OPS 1 "1970-01-01"' in page
    commands = re.findall(r"^\.SS memwal\\-ops (.+)$", page, re.MULTILINE)
    assert {"merge URI", "config files", r"export\-support URI"} <= {*commands}
    assert ".B 31\ncommit_state_unknown: " in page
    assert [line for line in page.splitlines() if line.startswith("'")] == []


def test_interpreters_are_found_by_what_they_say() -> None:
    mine = "{}.{}".format(*sys.version_info)
    found = try_dist.interpreter(mine)
    assert found is not None
    assert mine in subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    assert try_dist.interpreter("3.1") is None


def changed(files: dict[str, bytes], change: dict[str, bytes | None]) -> dict[str, bytes]:
    return {name: content for name, content in {**files, **change}.items() if content is not None}
