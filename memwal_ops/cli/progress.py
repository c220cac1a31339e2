"""Progress bars, on a terminal only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
