"""A drill: bring an error about, then do what its page says, in the page's order."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.support.run_cli import contents
from tests.system.drills.error_pages import RUNBOOKS, Page
from tests.system.drills.lines import run_line

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.run_cli import Outcome

ERRORS = RUNBOOKS / "errors"


class Drill:
    """One page of runbooks/errors, and how far its commands have been followed."""

    def __init__(self, page: Page, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.page = page
        self.code, self.reason = _named(page)
        self.wrap: Callable[[list[str]], list[str]] | None = None
        self._capfd, self._patch = capfd, patch
        self._at = 0

    def given(self, **variables: str) -> None:
        """The variables that the page's commands name."""
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def run(self, line: str) -> Outcome:
        """Any command; ``wrap``, where it is set, goes before it."""
        return run_line(self._capfd, line, wrap=self.wrap)

    def refused(self, line: str) -> dict[str, str]:
        """The command ends with the page's error and changes no file of a local table; the error's document."""
        before = self._files()
        document = self.told(self.run(f"{line} --json"))
        assert self._files() == before
        return document

    def _files(self) -> dict[str, tuple[int, bytes]]:
        uri = os.environ.get("URI", "")
        return {} if "://" in uri or not os.path.isdir(uri) else contents(uri)

    def told(self, outcome: Outcome) -> dict[str, str]:
        """The page's error, in its exit code, in its document, and in the page that it names; the document."""
        assert outcome.code == self.code, outcome
        error: dict[str, str] = outcome.document["error"]
        assert (error["reason"], error["exit_code"]) == (self.reason, self.code)
        assert error["runbook"] == self.page.name
        assert outcome.err.endswith(f"See {self.page.name}\n")
        return error

    def follow(self, number: int = 1) -> list[Outcome]:
        """Run the page's next commands; each exits as the page says."""
        outcomes = []
        for _ in range(number):
            command = self.page.commands[self._at]
            self._at += 1
            outcomes.append(self.run(command.line))
            assert outcomes[-1].code == command.exits_with, f"{command.line}\n{outcomes[-1]}"
        return outcomes

    def follow_until(self, solved: Callable[[], object], *, before: str) -> list[Outcome]:
        """Run all that comes before the command that begins so, then let the trouble end, then the rest."""
        lines = [command.line for command in self.page.commands]
        at = max(number for number, line in enumerate(lines) if line.startswith(before))
        assert at >= self._at
        outcomes = self.follow(at - self._at)
        solved()
        return outcomes + self.rest()

    def rest(self) -> list[Outcome]:
        """Run all that is left."""
        return self.follow(len(self.page.commands) - self._at)

    @property
    def followed(self) -> bool:
        """Whether every command was run."""
        return self._at == len(self.page.commands)


def _named(page: Page) -> tuple[int, str]:
    match = re.fullmatch(r"(\d\d)-(\w+)", page.path.stem)
    assert match is not None, page.path
    return int(match.group(1)), match.group(2)
