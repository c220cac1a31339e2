"""The interface of ``memwal-ops demo``: how a format demonstrates its jobs (:class:`DemoSpec`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memwal_ops.errors import InvalidUsageError, InvariantViolatedError


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of the demo.

    Attributes:
        temporary: whether the folder was created for this run.
        merge: False: stop before the merge, or the maintenance.
        command: the command line of memwal-ops, for hints.
    """

    folder: Path
    temporary: bool
    merge: bool
    command: str

    def new_table(self, name: str) -> str:
        """The path of a new table in the folder, which is created.

        Raises ``InvalidUsageError``: it exists, or the folder cannot be created.
        """
        path = self.folder / name
        if path.exists():
            raise InvalidUsageError(
                f"{path} exists already; it was not changed.", remedy="Give another --dir, or remove it."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidUsageError(
                f"The folder {self.folder} cannot be created: {error.strerror}.", remedy="Give another --dir."
            ) from error
        return str(path)

    def to_remove(self, table: str) -> str:
        """What the user can remove afterwards: a temporary folder, or the table in the user's own folder."""
        return str(self.folder) if self.temporary else table


def prove(holds: bool, message: str) -> None:  # noqa: FBT001 - read as a sentence: prove(that, else this)
    """Raise InvariantViolatedError with the message if the condition is false."""
    if not holds:
        raise InvariantViolatedError(message)


def indented(text: str) -> str:
    """The text of a report, indented for the demo's output."""
    return "\n".join(f"   {line}" if line else line for line in text.splitlines())


@dataclass(frozen=True, slots=True)
class DemoSpec:
    """The demo of a format.

    ``load``: ``package.module:function``, called with a :class:`DemoRun`; yields the output, step by step. ``layouts``:
    such functions by the names of layouts that have their own demo.
    """

    summary: str
    load: str
    layouts: Mapping[str, str] = field(default_factory=dict)

    def steps(self, run: DemoRun, layout: str | None = None) -> Iterator[str]:
        """Run the demo, or that of a layout, and yield its output. Its code is imported at the first step.

        Raises ``InvalidUsageError``: the format has no demo of that layout.
        """
        if layout is not None and layout not in self.layouts:
            raise InvalidUsageError(
                f"This format's demo has no layout {layout}.",
                remedy=f"It has: {', '.join(sorted(self.layouts))}." if self.layouts else "Leave --layout out.",
            )
        module, _, name = (self.load if layout is None else self.layouts[layout]).partition(":")
        function: Callable[[DemoRun], Iterator[str]] = getattr(importlib.import_module(module), name)
        yield from function(run)
