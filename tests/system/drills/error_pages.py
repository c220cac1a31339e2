"""A page of runbooks/: its title, its commands, its links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.runbook import commands

ROOT = Path(__file__).parents[3]
RUNBOOKS = ROOT / "runbooks"

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_EXITS = re.compile(r"#.*\bexits with (\d+)")


@dataclass(frozen=True)
class Command:
    """One line of a page, and the exit code that the page says it has."""

    line: str
    exits_with: int

    @classmethod
    def of(cls, line: str) -> Command:
        said = _EXITS.search(line)
        return cls(line, int(said.group(1)) if said else 0)


@dataclass(frozen=True)
class Page:
    """One file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """All but the fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def title(self) -> str:
        return self.text.splitlines()[0].removeprefix("# ")

    @property
    def name(self) -> str:
        """From the project's root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def commands(self) -> tuple[Command, ...]:
        return tuple(Command.of(line) for line in commands(self.text))

    @cached_property
    def anchors(self) -> frozenset[str]:
        """What a link to a heading may name, by GitHub's rules."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)

    @cached_property
    def links(self) -> tuple[tuple[Path, str], ...]:
        """Each link to another file or heading of the project: the file, and the heading or an empty text."""
        found = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        here = [target.partition("#") for target in found if "://" not in target]
        return tuple(((self.path.parent / file).resolve() if file else self.path, name) for file, _, name in here)
