"""No wrong answer after a random history of a table that our jobs maintain, beside one with pylance's own calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from memwal_ops.formats.lance.jobs.catchup import tiers
from tests.campaigns.answers.history import History

if TYPE_CHECKING:
    from pathlib import Path

STEPS = int(os.environ.get("ANSWER_STEPS", "25"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("log", [False, True])
def test_no_answer_is_wrong_after_a_random_history(tmp_path: Path, log: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers.policy, "SEGMENT_FLOOR", 0)  # many segments in a small table
    history = History(str(tmp_path), SEED, log)
    history.run(STEPS, print)
    assert (history.ours.answers, history.ours.rows, history.ours.findings) == (0, 0, {}), history.what
    assert history.ours.queries > 10 * STEPS, "few columns left to ask"
    # Beside a log no index is trained anew: not for rows that it can only add wrongly, nor if all were rewritten.
    refused = ("dot_product_index", "CodebookChangedError") if log else ()
    assert not {one for one in history.ours.failed if not any(word in one for word in refused)}, history.what
