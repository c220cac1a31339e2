"""A version has just landed, and its publisher hears of it too late: the files that it names must stay."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table
from memwal_ops.errors import CommitStateUnknownError, StoreUnavailableError
from memwal_ops.jobs import catchup
from memwal_ops.jobs.catchup import CatchupOptions
from tests.core.test_commit import LyingStore
from tests.crash.test_index_jobs_killed import check_versions
from tests.jobs.test_catchup import check_queries, create, expected, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("what", ["interrupted", "reads fail"])
def test_what_a_landed_version_names_stays(tmp_path: Path, what: str) -> None:
    uri = create(str(tmp_path / "t.lance"))
    write(uri, 0)
    table = open_table(uri)
    published: list[str] = []

    def put_if_absent(path: str, data: bytes) -> bool:
        done = table.store.put_if_absent(path, data)
        if path.startswith("_versions"):
            published.append(path)
            if what == "interrupted":
                raise KeyboardInterrupt
        return done

    def read(name: str) -> Any:
        real = getattr(table.store, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if published and what == "reads fail":
                raise StoreUnavailableError("The store is down.")
            return real(*arguments, **named)

        return call

    lying = LyingStore(table.store, put_if_absent=put_if_absent, list=read("list"), get=read("get"))
    with contextlib.suppress(KeyboardInterrupt, CommitStateUnknownError):
        catchup.apply(replace(table, store=lying), CatchupOptions(("kind_idx",)))

    assert published
    check_versions(uri)
    check_queries(uri, expected(1))
    for _ in range(2):
        report = catchup.apply(open_table(uri), CatchupOptions())
        assert report.decision in {"caught_up", "unchanged"}
    check_queries(uri, expected(1))
