"""docs/airflow.md and docs/install.md: names, triggers and connections in them are ones that work."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import memwal_ops.airflow as ours
from memwal_ops.airflow.connections import storage_options
from memwal_ops.core.registry import job_specs
from memwal_ops.core.triggers import parse_trigger

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/airflow.md").read_text()
EXAMPLE = (ROOT / "configs/airflow/memwal_maintenance.py").read_text()
INSTALL = (ROOT / "docs/install.md").read_text()


def test_every_class_exists_and_is_documented() -> None:
    named = set(re.findall(r"\bMemWal\w+", DOCS + EXAMPLE + INSTALL))
    assert named <= set(ours.__all__)
    assert {name for name in ours.__all__ if not name.endswith("Trigger")} <= named


def test_python_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        ast.parse(block)


def test_triggers_can_be_parsed() -> None:
    figures = {name: one.unit for name, one in job_specs("lance")["merge"].backlog_metrics.items()}
    found = re.findall(r'when="([^"]+)"', DOCS) + re.findall(r'or "(generations[^"]+)"', EXAMPLE)
    found += re.findall(r"by default (generations.+)", EXAMPLE)
    assert len(found) == 3
    assert found[1] == found[2]
    for text in found:
        parse_trigger(text, figures)
    assert {f"`{name}`" for name in figures} <= set(re.findall(r"`\w+`", DOCS))


def test_options_are_those_of_the_jobs() -> None:
    jobs = job_specs("lance")
    assert jobs["merge"].options.read({"max_bytes": "256MiB", "max_generations": 50}).max_generations == 50
    assert '"max_bytes": "256MiB", "max_generations": 50' in DOCS
    assert jobs["maintain"].options.read({"budget": "45m", "merge": {}, "gc": {}})


@pytest.mark.parametrize("line", re.findall(r"^airflow connections add .+?[^\\]$", DOCS, re.MULTILINE | re.DOTALL))
def test_connections_can_be_read(line: str) -> None:
    words = shlex.split(line.replace("\\\n", " "))
    given = dict(zip(words[4::2], words[5::2], strict=True))
    extra = json.loads(given["--conn-extra"])
    found = storage_options(
        words[3],
        kind=given["--conn-type"],
        login=given.get("--conn-login"),
        password=given.get("--conn-password"),
        extra=extra,
    )
    assert found


def test_files_that_are_named_are_there() -> None:
    for path in re.findall(r"\]\(\.\./([\w./-]+)", DOCS):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\b(?:configs|docs)/[\w./-]+\w", DOCS + INSTALL):
        assert (ROOT / path).exists(), path
