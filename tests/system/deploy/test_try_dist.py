"""``make dist``, its second half: a wheel that cannot be installed, or does not work alone, ends it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tools.try_dist import Installed, try_all

pytestmark = pytest.mark.long


def wheel(folder: Path, files: dict[str, str], needs: str = "") -> Path:
    """A wheel of this project's name with these files alone."""
    about = "memwal_ops-0.1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: memwal-ops\nVersion: 0.1.0\n{needs}"
    built = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    commands = "[console_scripts]\nmemwal-ops = memwal_ops:main\n"
    contents = {**files, f"{about}/METADATA": metadata, f"{about}/WHEEL": built, f"{about}/entry_points.txt": commands}
    path = folder / "memwal_ops-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**contents, f"{about}/RECORD": ""}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("dist", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "constraints.txt").touch()
    return tmp_path / "dist", tmp_path / "home", tmp_path / "constraints.txt"


def test_a_package_that_it_needs_does_not_exist(folders: tuple[Path, Path, Path]) -> None:
    dist, home, constraints = folders
    with pytest.raises(SystemExit, match="no-such-package"):
        Installed(sys.executable, wheel(dist, {}, "Requires-Dist: no-such-package\n"), home, constraints)


def test_a_module_that_it_lacks(folders: tuple[Path, Path, Path]) -> None:
    """The repository has it: what counts is the wheel."""
    dist, home, constraints = folders
    made = wheel(dist, {"memwal_ops/__init__.py": "", "click.py": "class Group: pass"})
    found = Installed(sys.executable, made, home, constraints)
    with pytest.raises(SystemExit, match=r"No module named 'memwal_ops\.cli'"):
        try_all(found, [])
    with pytest.raises(SystemExit, match="exit code 1, not 0"):
        found.run("memwal-ops", "doctor")
