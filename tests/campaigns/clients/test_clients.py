"""Tables of other releases through our jobs, and back: a sample that the seed selects; ``make client-matrix`` runs all.

CLIENT_RELEASES times a release writes CLIENT_KINDS kinds of tables, and another one goes on with them.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.clients.client import SCALAR, VECTOR
from tests.campaigns.clients.environments import LANCEDB, PYLANCE, NoEnvironmentError, python_of
from tests.campaigns.clients.expected import unexpected
from tests.campaigns.clients.matrix import again, pinned_reads, use, write
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMES, KINDS = env_number("CLIENT_RELEASES", 1), env_number("CLIENT_KINDS", 8)
ALWAYS = ["mem-wal", "mem-wal-stable", "stable-btree"]
HANGS = {"pylance 7.0.0", "lancedb 0.34.0"}  # in searches by HNSW indexes: docs/upstream.md
INDEXED = sorted({f"{stable}{kind.lower()}" for kind in (*SCALAR, *VECTOR) for stable in ("", "stable-")} - {*ALWAYS})


@pytest.fixture(params=range(TIMES))
def drawn(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[random.Random]:
    """A generator of its own seed; environments are removed afterwards, but for those that the variable names."""
    if not os.environ.get("CLIENT_ENVIRONMENTS"):
        monkeypatch.setenv("CLIENT_ENVIRONMENTS", str(tmp_path / "environments"))
    yield random.Random(f"{CAMPAIGN_SEED} {request.param}")
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_tables_of_other_releases(tmp_path: Path, drawn: random.Random) -> None:
    """A table is refused by name alone, before any write; what its clients can do they can do after our jobs."""
    writer, reader = drawn.choice(PYLANCE), drawn.choice((*PYLANCE, *LANCEDB))
    indexed = [one for one in INDEXED if reader not in HANGS or "hnsw" not in one]
    kinds = [*ALWAYS, *drawn.sample(indexed, KINDS - len(ALWAYS))]
    sys.stdout.write(f"CAMPAIGN_SEED={CAMPAIGN_SEED}: {writer} writes, {reader} goes on; {kinds}\n")
    try:
        for release in (writer, reader):
            python_of(release)
    except NoEnvironmentError as error:
        pytest.skip(str(error))
    written = write(writer, tmp_path / "written", kinds)
    assert {*ALWAYS} <= {*written.kinds}
    assert unexpected(written.jobs) == []
    assert pinned_reads(written.maintained()) == []
    used = use(written, reader, tmp_path / "used")
    assert used.control.keys() == {*written.kinds}
    assert used.worse() == []
    jobs, wrong = again(used)
    assert unexpected(jobs) == []
    assert wrong == []


def test_the_corpus_of_a_release(tmp_path: Path, drawn: random.Random) -> None:
    """Tables by each option of pylance go through all jobs, or are refused by name before any write."""
    writer = drawn.choice(PYLANCE)
    sys.stdout.write(f"CAMPAIGN_SEED={CAMPAIGN_SEED}: {writer} writes\n")
    try:
        python_of(writer)
    except NoEnvironmentError as error:
        pytest.skip(str(error))
    written = write(writer, tmp_path / "written", without=INDEXED)
    assert {"storage-2.1", "branch", "tags", "bases", "clone"} <= {*written.kinds}
    assert unexpected(written.jobs) == []
    assert pinned_reads(written.maintained()) == []
