"""A runbook page as a drill follows it: section by section, each command with the exit code that the page says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.runbook import shell
from tests.system.drills.error_pages import RUNBOOKS, Command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"export ([A-Z_]+)=")


class Page:
    """One page. Within ``with``, whatever it shows must be run, or the drill has not followed it."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        """``environment``: what the page's ``export`` lines leave to the reader, and where the store is."""
        text = (RUNBOOKS / name).read_text()
        head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
        self.left = {"": _commands(head)} | {part.partition("\n")[0]: _commands(part) for part in parts}
        self.environment = {"RUST_LOG": "off", **environment}

    def run(self, heading: str, count: int | None = None, **more: str) -> list[str]:
        """The next ``count`` commands of a section, or all that are left; what each said, in order."""
        self.environment.update(more)
        wanted = self.left[heading][:count]
        self.left[heading] = self.left[heading][len(wanted) :]
        return [output for command in wanted if (output := self.follow(command)) is not None]

    def follow(self, command: str, **instead: str) -> str | None:
        """What one command said; None for an ``export``."""
        told = _EXPORT.match(command)
        if told is not None:
            assert told[1] in self.environment, command
            return None
        got, said = shell(command, **{**self.environment, **instead})
        assert got == Command.of(command).exits_with, f"{command}\nended with {got}:\n{said}"
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            missing = [_EXPORT.match(command) for commands in self.left.values() for command in commands]
            assert all(told[1] in self.environment for told in missing if told is not None)
            left = [command for commands in self.left.values() for command in commands if not _EXPORT.match(command)]
            assert not left, f"never run: {left}"


def _commands(section: str) -> list[str]:
    found: list[str] = []
    for language, text in _BLOCK.findall(section):
        found += text.splitlines() if language == "sh" else [f"python - <<'END'\n{text}END"]
    return found


def age(folder: str | Path, hours: float) -> None:
    """So many hours pass for every file below a folder."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            written = path.stat().st_mtime - hours * 3600
            os.utime(path, (written, written))
