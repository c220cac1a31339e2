"""``config files``: list and copy what the package brings, and never replace what somebody changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.run_cli import contents, run_here

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]


def test_they_are_those_of_the_repository(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [path for name in ("configs", "systemd") for path in (ROOT / name).rglob("*")]
    expected = [str(path.relative_to(ROOT)) for path in found if path.is_file() and path.suffix != ".pyc"]
    listed = run_here(capfd, "config", "files", "--json").document
    assert listed == {"decision": "listed", "folder": None, "files": sorted(expected)}
    copied = run_here(capfd, "config", "files", "--to", str(tmp_path / "new/etc")).out.split()
    assert copied == [str(tmp_path / "new/etc" / name) for name in sorted(expected)]
    for name in expected:
        assert (tmp_path / "new/etc" / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_changed_file_is_never_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "config", "files", "--to", str(tmp_path)).code == 0
    before = contents(str(tmp_path))
    again = run_here(capfd, "config", "files", "--to", str(tmp_path), "--json")
    assert (again.code, again.document["decision"], contents(str(tmp_path))) == (0, "copied", before)
    (tmp_path / "configs/s3.yaml").write_text("mine\n")
    (tmp_path / "systemd/memwal-ops.service").unlink()
    before = contents(str(tmp_path))
    refused = run_here(capfd, "config", "files", "--to", str(tmp_path))
    assert refused.code == 2
    assert "nothing was copied: configs/s3.yaml." in refused.err
    assert contents(str(tmp_path)) == before


def test_a_folder_that_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    refused = run_here(capfd, "config", "files", "--to", str(tmp_path / "file/below"))
    assert refused.code == 2
    assert "cannot be written" in refused.err
