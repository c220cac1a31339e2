"""The scripts of docs/upstream.md still show what they are there to show, on the pylance that is pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "upstream.md"
SCRIPTS = sorted(path.name for path in PAGE.with_suffix("").glob("*.py") if path.name != "small_s3.py")


def test_the_page_names_every_script() -> None:
    assert sorted(re.findall(r"\(upstream/(\w+\.py)\)", PAGE.read_text())) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_fault_is_still_there(name: str) -> None:
    """A failure is good news: see which guard of ours docs/upstream.md names beside it, and whether it may go."""
    command = [sys.executable, str(PAGE.with_suffix("") / name)]
    # A command that a test ran in this process has set some of Lance's.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LANCE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=environment)
    assert done.stdout.splitlines()[-1:] == ["FAULT"], done.stdout + done.stderr
