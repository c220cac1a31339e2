"""Complete paths of tables and of files in a shell."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class PathText(click.types.StringParamType):
    """Text that shells complete as a path. What else it may be, such as a URI, is left as it is."""

    def __init__(self, kind: str) -> None:
        """Complete paths of that kind: ``dir`` or ``file``."""
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        """The word itself, with the kind by which the shell completes it."""
        return [CompletionItem(incomplete, type=self._kind)]


TABLE = PathText("dir")
FILE = PathText("file")
