"""Long histories hold every invariant, and the harness finds bugs that are planted on purpose.

``SIM_HISTORIES=5000`` runs more, ``CAMPAIGN_SEED=3`` others; ``make replay SEED=7`` runs one again.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.formats.lance.commit.publication import CommitNote
from memwal_ops.storage import records
from tests.campaigns.sim.driver import WEIGHTS
from tests.campaigns.sim.history import run_histories
from tests.campaigns.sim.leases import KEPT_AWAY, LOST, TWO_HOLDERS
from tests.campaigns.sim.machine import run_machine
from tests.campaigns.sim.planted import BUGS, FOUND, hunt
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.system.releases.next_release import KEY

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

WHOLE = 500
HISTORIES = env_number("SIM_HISTORIES", WHOLE)
FIRST = CAMPAIGN_SEED * 1000
BY_HYPOTHESIS = HISTORIES // 10
SEEDED = HISTORIES - BY_HYPOTHESIS
# Few, so that each sees every step; in one stretch, as the seed tells the layout.
CHUNKS = 2
OTHERS = 60
FOUND_IN = {name: [seed for seed, _ in histories] for name, histories in json.loads(FOUND.read_text()).items()}
_LONG = pytest.mark.timeout(0 if HISTORIES > WHOLE else 3600)


def _assert_not_vacuous(effects: Counter[str], histories: int, *, may_be_idle: int = 0) -> None:
    """A step that never did anything proves nothing."""
    assert effects["histories"] >= histories
    if HISTORIES >= WHOLE:
        idle = sorted(kind for kind in WEIGHTS if not effects[kind])
        assert len(idle) <= may_be_idle, f"{idle} never had an effect in {histories} histories"


@pytest.mark.long
@_LONG
@pytest.mark.req("S0-060", "S0-067", "S0-166", "S0-176", "S0-182", "S0-183", "S0-184", "S0-185", "S0-186", "S0-187",
                 "S0-188", "S0-189", "S0-190", "S0-209")  # fmt: skip
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_invariant_holds(tmp_path: Path, chunk: int) -> None:
    first = FIRST + chunk * (SEEDED // CHUNKS)
    effects = run_histories(range(first, first + SEEDED // CHUNKS), str(tmp_path))
    _assert_not_vacuous(effects, SEEDED // CHUNKS)
    if HISTORIES >= WHOLE:
        assert all(effects[lie] for lie in (LOST, KEPT_AWAY, TWO_HOLDERS)), effects


@pytest.mark.long
@_LONG
def test_every_invariant_holds_whatever_hypothesis_thinks_of() -> None:
    # Which steps it leaves out over so few histories is chance; that each of them works is proven above.
    _assert_not_vacuous(run_machine(BY_HYPOTHESIS, FIRST), BY_HYPOTHESIS, may_be_idle=len(WEIGHTS) // 4)


@pytest.mark.long
@_LONG
def test_two_releases_share_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second record, and each second commit, is of a later release: with a key that this one does not know."""
    turns = {"records": itertools.count(), "commits": itertools.count()}
    encode, properties = records.encode_record, CommitNote.properties

    def encode_record(document: Any, newest: int = 1, *, indent: int | None = None) -> bytes:
        more = {KEY: {"rows": [1]}} if next(turns["records"]) % 2 else {}
        return encode({**document, **more}, newest, indent=indent)

    def noted(note: CommitNote) -> dict[str, str]:
        return properties(note) | ({f"memwal-ops.{KEY}": "1"} if next(turns["commits"]) % 2 else {})

    for module in [one for one in [*sys.modules.values()] if getattr(one, "encode_record", None) is encode]:
        monkeypatch.setattr(module, "encode_record", encode_record)
    monkeypatch.setattr(CommitNote, "properties", noted)
    run_histories(range(FIRST, FIRST + BY_HYPOTHESIS), str(tmp_path))
    assert min(next(turn) for turn in turns.values()) > BY_HYPOTHESIS


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """In one of the histories that told it when all were hunted: ``python -m tests.campaigns.sim.planted --write``.

    Or in another: whatever changes the number of a job's calls changes what the histories come by.
    """
    assert hunt(BUGS[name], [*FOUND_IN[name], *range(1, OTHERS + 1)]), f"{FOUND_IN[name]} do not tell it, nor others"
