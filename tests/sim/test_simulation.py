"""Long histories hold every invariant, and the harness finds bugs that are planted on purpose.

``SIM_HISTORIES=5000`` runs more, ``SIM_HISTORIES_FROM=100000`` others; ``make replay SEED=7`` runs one again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.sim.history import run_histories
from tests.sim.planted import PLANTED, histories_until_caught

if TYPE_CHECKING:
    from pathlib import Path

HISTORIES = int(os.environ.get("SIM_HISTORIES", "48"))
FIRST = int(os.environ.get("SIM_HISTORIES_FROM", "0"))
CHUNKS = 6
# Where python -m tests.sim.planted found each; a background flush may shift it by some.
FOUND_AT = {
    "newest first": 19,
    "marker before the rows": 1,
    "lowest address wins": 1,
    "tombstones are rows": 3,
    "only the newest version": 9,
    "no holds": 13,
    "delete before drain": 1,
}
WITHIN = 40


@pytest.mark.timeout(0 if HISTORIES > 48 else 300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_invariant_holds(tmp_path: Path, chunk: int) -> None:
    assert run_histories(range(FIRST + chunk, FIRST + HISTORIES, CHUNKS), str(tmp_path)) >= HISTORIES // CHUNKS


@pytest.mark.parametrize("bug", FOUND_AT)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    assert histories_until_caught(PLANTED[bug], str(tmp_path), first=FOUND_AT[bug], limit=WITHIN) is not None
