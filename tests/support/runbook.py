"""The commands of a runbook: found in its text, run in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def commands(section: str) -> list[str]:
    """Each line of the fenced blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def shell(command: str, **environment: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
