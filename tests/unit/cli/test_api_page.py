"""docs/api.md: its examples run, in order, on a real table; and what is public says no more than it should."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import memwal_ops
from memwal_ops.core.options import describe
from memwal_ops.core.registry import all_job_specs
from tests.support.tables.workload import Workload

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


def test_its_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Workload(5, regions=2, base_rows=30).create(str(tmp_path / "t.lance")).step(10)
    table.close()
    names = {"URI": table.uri}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    said = capsys.readouterr().out
    for line in re.findall(r"^\s*print\(.*?\)\s+# (\w+)", PAGE, re.MULTILINE):
        if line != "what":
            assert line in said, line


def test_the_page_names_all_that_is_public() -> None:
    for name in memwal_ops.__all__:
        if name != "__version__":
            assert f"`memwal_ops.{name}" in PAGE, name


def test_every_error_that_the_page_names_is_exported() -> None:
    named = set(re.findall(r"\b[A-Z]\w+Error\b", PAGE))
    assert "InvalidUsageError" in named
    for name in named:
        assert issubclass(getattr(memwal_ops, name), memwal_ops.MemwalOpsError), name
        assert name in memwal_ops.__all__


def test_every_option_that_the_page_spells_is_one() -> None:
    """The names in Python that are not those of the command line."""
    spelled = dict(re.findall(r"`--(\w+)` is\s`(\w+)`", PAGE)) | {"as": "answer"}
    assert spelled == {"region": "regions", "index": "indexes", "follower": "followers", "as": "answer"}
    found: dict[str, set[str]] = {}
    for specs in all_job_specs().values():
        for spec in specs.values():
            for option in describe(spec.options):
                if option.flags != f"--{option.name.replace('_', '-')}" and not option.positional:
                    found.setdefault(option.flags[2:], set()).add(option.name)
    assert {flag: {name} for flag, name in spelled.items()} == found


def test_no_foreign_type_is_in_a_public_signature() -> None:
    for function in (memwal_ops.open_table, memwal_ops.run_job):
        shown = str(inspect.signature(function))
        assert not re.search(r"pb2|lance\.Lance|pyarrow", shown)
    table = memwal_ops.Table
    for name, member in vars(table).items():
        if not name.startswith("_"):
            shown = str(getattr(member, "fget", member).__annotations__)
            assert not re.search(r"pb2|LanceDataset", shown), name


@pytest.mark.parametrize("name", sorted(memwal_ops.__all__))
def test_every_public_name_is_there(name: str) -> None:
    """They are imported at the first use, from modules that are named as strings."""
    assert getattr(memwal_ops, name) is not None


def test_the_modules_that_the_page_names_are_attributes() -> None:
    """``import memwal_ops`` is enough: ``memwal_ops.memwal.read(...)``."""
    for name in re.findall(r"^\| `memwal_ops\.(\w+)` \| `\w+`, ", PAGE, re.MULTILINE):
        assert memwal_ops.__getattr__(name).__name__ == f"memwal_ops.{name}"
