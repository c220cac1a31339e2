"""A thousand generated histories with a collector in between: nothing that anybody needs is ever gone.

``GC_HISTORIES=20000`` runs more; ``GC_HISTORIES_FROM=1000000`` other ones.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.crash.gc_history import run_all

if TYPE_CHECKING:
    from pathlib import Path

HISTORIES = int(os.environ.get("GC_HISTORIES", "1000"))
FIRST = int(os.environ.get("GC_HISTORIES_FROM", "0"))
CHUNKS = 20


@pytest.mark.req("S0-060", "S0-183", "S0-184", "S0-185", "S0-186", "S0-187", "S0-188", "S0-189", "S0-190", "S0-209")
@pytest.mark.timeout(0 if HISTORIES > 1000 else 300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_that_is_needed_goes_and_nothing_else_stays(tmp_path: Path, chunk: int) -> None:
    happened: Counter[str] = Counter()
    run_all(range(FIRST + chunk, FIRST + HISTORIES, CHUNKS), str(tmp_path), on_counts=happened.update)
    if HISTORIES >= 1000:
        # The histories are worth nothing if the interesting steps do not come about.
        assert happened["gc"] > 5
        assert happened["killed"] > 0
        assert happened["overtaken"] > 0
        assert happened["wake"] > 0
