"""A planted deviation is refused by the trace alone. Histories and cells of the fault matrix check their traces."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import run_job
from tests.campaigns.traces.hunt import ALL, first
from tests.campaigns.traces.protocol import ForbiddenError, Protocol
from tests.campaigns.traces.recorder import Event, recording
from tests.support.tables.plain import PlainTable

if TYPE_CHECKING:
    from pathlib import Path

#: Per deviation the history in which python -m tests.campaigns.traces.hunt found it; others if its calls changed.
FOUND_IN = {
    "jump over a missing generation": 10,
    "progress cached across a retry": 3,
    "details by a plain commit": 26,
    "nobody but readers of the newest": 2,
    "gc ignores tags": 3,
    "gc ignores branches": 50,
    "gc ignores holds": 17,
    "version without progress": 2,
    "delete before drain": 2,
    "no fence posts": 1,
    "last entry goes": 2,
    "unflushed entries go": 21,
    "references forgotten": 3,
    "manifest gap": 1,
    "expiry is not announced": 1,
    "manifests are not set aside": 1,
    "expiry ignores tags": 2,
    "the newest version expires": 1,
    "the newest lease is pruned": 1,
    "records are overwritten": 1,
    "region manifests are overwritten": 1,
    "flushes are not fenced": 9,
}
FEW = 30


@pytest.mark.parametrize("name", FOUND_IN)
def test_a_deviation_is_refused(name: str) -> None:
    assert first(ALL[name], [FOUND_IN[name], *range(1, FEW)]), f"{FEW} histories with it are accepted"


def test_what_others_do_is_seen_in_its_order(tmp_path: Path) -> None:
    """pylance's commits pass by the store; the trace has them before the job's next event."""
    made = PlainTable(str(tmp_path / "t.lance")).create()
    protocol = Protocol()
    with recording(made.uri, protocol.accept) as recorder:
        dataset = lance.dataset(made.uri)
        lance.write_dataset(dataset.to_table(), made.uri, mode="append")
        lance.write_dataset(dataset.to_table(), made.uri, mode="append")
        newest = lance.dataset(made.uri).version
        report = run_job(made.uri, "expire", older_than=timedelta(0), keep=1, allow_unsafe=True, apply=True)
    assert report.decision == "expired"
    assert [*protocol.versions] == [newest]
    ours = [event.ours for event in recorder.events if event.path.startswith("_versions/1")]
    assert ours == [False] * newest + [True] * (newest - 1)


def test_a_trace_that_skips_a_version_is_refused(tmp_path: Path) -> None:
    made = PlainTable(str(tmp_path / "t.lance")).create()
    protocol = Protocol()
    with recording(made.uri, protocol.accept) as recorder:
        pass
    newest = next(event for event in reversed(recorder.events) if event.path.startswith("_versions/1"))
    path = f"_versions/{2**64 - 1 - (protocol.newest + 2)}.manifest"
    with pytest.raises(ForbiddenError, match=f"the newest version is {protocol.newest}"):
        protocol.accept(Event(len(recorder.events) + 1, True, "put_if_absent", path, newest.data))
