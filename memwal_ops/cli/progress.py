"""Show the progress of a run: a progress bar on stderr, if stderr is a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from memwal_ops.cli.printing import echo
from memwal_ops.core.context import Progress, RunContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as Bars, TaskID


@contextmanager
def running(*, show: bool) -> Iterator[RunContext]:
    """Yield the context of one run; nothing is shown unless ``show``."""
    if not show:
        yield RunContext()
        return
    with _Terminal() as terminal:
        yield RunContext(listener=terminal)


class _Terminal:
    """Shows a bar for the last reported activity, and removes it after the run."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._shown: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def heartbeat(self) -> None:
        """Show nothing."""

    def checkpoint(self) -> None:
        """Do nothing: Ctrl-C ends a run in a terminal at any point."""

    def step(self, name: str) -> None:
        """Print a line for a step."""
        self._clear()
        echo(f"{name} ...", err=True)

    def progress(self, progress: Progress) -> None:
        """Update the bar of the activity; a new activity replaces the previous one."""
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        if progress.activity not in self._shown:
            for task in self._shown.values():
                self._bars.remove_task(task)
            self._shown = {progress.activity: self._bars.add_task(progress.activity, total=None, counted="")}
        counted = f"{progress.unit}, {progress.detail}" if progress.detail else progress.unit
        self._bars.update(
            self._shown[progress.activity], completed=progress.done, total=progress.total, counted=counted
        )

    def _clear(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._shown = None, {}


def _bars() -> Bars:
    from rich.console import Console  # noqa: PLC0415 - only where there is a terminal and something to show
    from rich.progress import (  # noqa: PLC0415 - see above
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
