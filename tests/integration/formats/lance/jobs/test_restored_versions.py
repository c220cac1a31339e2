"""A version that a tag, a hold or a branch keeps can be restored: its unmerged generations are merged and read then."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import memwal
from memwal_ops.core.holds import take_hold
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.options import ExpireOptions
from tests.support.tables.gc_tables import caught_up, collect, grow, make, merged, sound, table_of
from tests.support.tables.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.tables.lsm_table import LsmTable

NOW = ExpireOptions(timedelta(0), allow_unsafe=True)


def tagged(made: LsmTable, version: int) -> None:
    lance.dataset(made.uri).tags.create("kept", version)


def held(made: LsmTable, version: int) -> None:
    take_hold(table_of(made), version, timedelta(hours=1))


def left(made: LsmTable, version: int) -> None:
    lance.dataset(made.uri).create_branch("side", version)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [tagged, held, left])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kept_version_is_restored(
    tmp_path: Path, layout: type[LsmTable], keep: Callable[[LsmTable, int], None]
) -> None:
    """The compaction leaves no data file that is older than the flush: only versions show that no column changed."""
    made = make(tmp_path, layout, generations=1)
    lance.dataset(made.uri).delete("id = 29")
    made.model.base.pop(29, None)
    lance.dataset(made.uri).optimize.compact_files()
    version = table_of(made).version
    keep(made, version)
    merged(made)
    caught_up(made)
    grow(made)
    merged(made)
    caught_up(made)
    for number in range(3):
        lance.dataset(made.uri).update_metadata({"number": str(number)})
    report = expire.apply(table_of(made), NOW)
    assert report.versions, "what came after is not needed"
    assert any(f"that version {version} has not merged" in one.because for one in report.kept)
    collect(made)
    lance.dataset(made.uri, version=version).restore()
    assert memwal.read(made.uri).scan().to_table().num_rows == len(made.expected())
    report_ = merge.apply(table_of(made), merge.MergeOptions())
    assert not report_.blocked, report_.describe()
    sound(made)
