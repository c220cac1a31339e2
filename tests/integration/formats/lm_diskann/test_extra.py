"""Without the packages of the extra, each command names it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.errors import ExtraMissingError

WITHOUT = """
import importlib.util, sys

gone, find = {"duckdb", "numba", "xxhash"}, importlib.util.find_spec

class Gone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in gone:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Gone)
importlib.util.find_spec = lambda name, package=None: None if name in gone else find(name, package)

from memwal_ops.cli.main import main
main()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["init", "inspect", "demo"])
def test_a_command_names_the_extra(folder: str, command: str) -> None:
    if command == "inspect":
        lm_diskann.create(folder).close()
    arguments = {"init": ["init", folder, "--format", "lm_diskann"], "inspect": ["inspect", folder],
                 "demo": ["demo", "--format", "lm_diskann"]}[command]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == ExtraMissingError.exit_code, done.stderr
    assert "memwal-ops[lm-diskann]" in done.stderr
