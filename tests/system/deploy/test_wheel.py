"""What ``pip install`` gives: the pages that messages name are in it, at the place that they name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_pages_that_messages_name_are_installed(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("memwal_ops", "runbooks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "runbooks").rglob("*.md")}
    assert pages <= {str(path.relative_to(site / "memwal_ops")) for path in (site / "memwal_ops").rglob("*.md")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memwal_ops", "inspect", str(tmp_path / "none.lance")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    page = Path(done.stderr.splitlines()[-1].strip().removeprefix("See "))
    assert page.is_absolute()
    assert page.is_relative_to(site)
    assert page.read_text() == (ROOT / "runbooks/errors/03-table_not_found.md").read_text()
