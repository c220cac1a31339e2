"""Progress bars, on a terminal only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memwal_ops.cli.text import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.engines.api import StageProgress


@contextmanager
def counting(doing: str, what: str, *, total: int | None = None, show: bool) -> Iterator[Callable[..., None]]:
    """A bar on stderr while the block runs; gives a function to call with how many more are done (1).

    Args:
        doing: the word before the bar.
        what: the noun behind the numbers.
        total: how many there will be; None where nobody knows.
        show: False draws nothing.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    ) as progress:
        bar = progress.add_task(doing, total=total)
        yield lambda count=1: progress.advance(bar, count)


@contextmanager
def stages(before: str, *, show: bool) -> Iterator[Callable[[StageProgress], None]]:
    """A bar over the tasks of the stage under way, with its rows and bytes; gives what tells it how far they are.

    Args:
        before: what goes on until the first stage begins.
        show: False draws nothing.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks, {task.fields[dealt]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    ) as progress:
        bar = progress.add_task(before, total=None, dealt="0 rows")

        def tell(stage: StageProgress) -> None:
            dealt = f"{stage.rows:,} rows" + (f", {size_text(stage.bytes)}" if stage.bytes else "")
            progress.update(
                bar,
                description=f"merging: {stage.stage}",
                completed=stage.tasks_done,
                total=stage.tasks or None,
                dealt=dealt,
            )

        yield tell
