"""An error that ends a run names what the run had published, and no text claims otherwise."""

from __future__ import annotations

import re

import pytest

from memwal_ops.core.context import record, recording
from memwal_ops.errors import MemwalOpsError

CLAIM = re.compile(r"(nothing|not|never) (was |were |is )?(changed|published|committed)", re.IGNORECASE)


def test_an_error_names_what_was_published_before_it() -> None:
    revisions = [3]
    error = MemwalOpsError("why", remedy="Do this.")
    with pytest.raises(MemwalOpsError), recording(revisions):
        record(7)
        record(7)
        record(8)
        raise error
    assert revisions == [3, 7, 8]
    assert error.remedy == "What this run published before stays: revisions 7, 8. Do this."


def test_an_error_of_a_run_that_published_nothing_stays_as_it_is() -> None:
    error = MemwalOpsError("why", remedy="Do this.")
    with pytest.raises(MemwalOpsError), recording([3]):
        raise error
    assert error.remedy == "Do this."


def test_steps_have_records_of_their_own() -> None:
    outer: list[int] = []
    with recording(outer):
        record(1)
        inner: list[int] = []
        with recording(inner):
            record(2)
        record(3)
    assert (outer, inner) == ([1, 3], [2])
    record(4)  # outside of a run
    assert (outer, inner) == ([1, 3], [2])


def test_no_kind_of_error_claims_that_nothing_was_changed() -> None:
    """A run may have published something before it: whether it has is recorded, and not written into remedies."""
    kinds, seen = [MemwalOpsError], set[type[MemwalOpsError]]()
    while kinds:
        kind = kinds.pop()
        if kind not in seen:
            seen.add(kind)
            kinds += kind.__subclasses__()
            assert not CLAIM.search(kind.remedy), kind
    assert len(seen) > 50
