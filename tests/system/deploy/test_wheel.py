"""What ``pip install`` gives: the pages that messages name, and the files that config files copies, at their places."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_files_that_messages_and_pages_name_are_installed(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    linked = {path.resolve().name for path in (ROOT / "memwal_ops").iterdir() if path.is_symlink()}
    assert linked == {"runbooks", "configs", "systemd", "docs"}
    for name in ("memwal_ops", *linked):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "runbooks").rglob("*.md")} | named_pages()
    assert pages <= {str(path.relative_to(site / "memwal_ops")) for path in (site / "memwal_ops").rglob("*.md")}
    assert not [*(site / "memwal_ops/docs").rglob("*.py")]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    copied = [sys.executable, "-P", "-m", "memwal_ops", "config", "files", "--to", str(tmp_path / "here")]
    subprocess.run(copied, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for name in ("configs", "systemd"):
        assert files_of(tmp_path / "here" / name) == files_of(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memwal_ops", "inspect", str(tmp_path / "none.lance")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    (tmp_path / "c.yaml").write_text("http: {}\n")
    checked = subprocess.run(
        [sys.executable, "-P", "-m", "memwal_ops", "config", "check", str(tmp_path / "c.yaml")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"{site}/memwal_ops/docs/configuration.md" in checked.stdout + checked.stderr
    page = Path(done.stderr.splitlines()[-1].strip().removeprefix("See "))
    assert page.is_absolute()
    assert page.is_relative_to(site)
    assert page.read_text() == (ROOT / "runbooks/errors/03-table_not_found.md").read_text()


def named_pages() -> set[str]:
    """Each page that a string of the package names, a message or a help text."""
    named: set[str] = set()
    for path in (ROOT / "memwal_ops").rglob("*.py"):
        named |= {*re.findall(r"\b(?:docs|runbooks)/[\w/.-]+\.md\b", path.read_text())}
    assert "docs/configuration.md" in named
    return named


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
