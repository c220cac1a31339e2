"""Runs of erase that are killed at a call of the store, and the runs after them, which end it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.options import EraseOptions
from tests.support.dying_store import DyingStore, Killed
from tests.support.tables import patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Erasing:
    """The erasure of rows of copies of one table.

    Attributes:
        apply: of the job.
        made: the table.
        where: the expression of the rows.
        gone: their numbers.
        check: that all other rows of a table are there.
        runs: so many end it, once all files of the killed one are old.
    """

    apply: Callable[..., Any]
    made: str
    where: str
    gone: Sequence[int]
    check: Callable[[str], None]
    runs: int = 1

    def kill(self, uri: str, at: int) -> list[str]:
        """Run until the n-th call of the store, done if it is even, and no further; returns the calls."""
        table = open_table(uri)
        store = DyingStore(table.store, at, after=at % 2 == 0)
        options = EraseOptions(where=self.where, older_than=timedelta(0), allow_unsafe=True)
        with suppress(Killed):
            self.apply(replace(table, store=store), options)
        return store.calls

    def calls(self, folder: Path) -> list[str]:
        """Those of a whole run."""
        return self.kill(str(shutil.copytree(self.made, folder / "whole.lance")), 1 << 30)

    def killed_at(self, folder: Path, calls: Iterable[int]) -> None:
        """Of a copy for each call: killed there, and ended by the next runs."""
        for at in calls:
            uri = str(shutil.copytree(self.made, folder / f"{at}.lance"))
            assert len(self.kill(uri, at)) >= at
            self.finish(uri)
            shutil.rmtree(uri)

    def finish(self, uri: str) -> None:
        """What the next run leaves is gone after a week: files that may belong to a commit in progress."""
        arguments = {"where": self.where, "apply": True, "older_than": "0s", "allow_unsafe": True}
        run_job(uri, "erase", **arguments)
        old = time.time() - timedelta(days=8).total_seconds()
        for folder, _, names in os.walk(uri):
            for name in names:
                os.utime(os.path.join(folder, name), (old, old))
        for _ in range(self.runs):
            report = run_job(uri, "erase", **arguments)
        assert report.decision == "erased", report.describe()
        assert patterns.holders(uri, self.gone) == {}
        self.check(uri)
