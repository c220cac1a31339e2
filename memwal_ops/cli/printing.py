"""Print to the terminal, for all commands: human-readable text without control characters, and JSON for scripts."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import click

import memwal_ops
from memwal_ops.errors import runbook
from memwal_ops.storage.redaction import redact
from memwal_ops.text import printable

_PAGE = re.compile(r"\b(?:docs|runbooks)/[\w/.-]+\.md\b")

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.errors import MemwalOpsError


def echo(text: str, *, err: bool = False) -> None:
    """Print human-readable text, of one line or several (:func:`memwal_ops.text.printable`)."""
    click.echo(printable(text, lines=True), err=err)


def echo_json(document: object, *, default: Callable[[object], object] | None = None) -> None:
    """Print one JSON document on stdout; characters that are not ASCII are escaped, so none is lost.

    ``default``: as of ``json.dumps``.
    """
    click.echo(json.dumps(document, indent=2, default=default))


def echo_result(document: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command: its document, or its human-readable text."""
    if as_json:
        echo_json(document)
    else:
        echo(text)


def page_path(page: str) -> str:
    """The path of a page of ``runbooks/`` or ``docs/``: relative in the project's folder, else in the package."""
    shipped = os.path.join(os.path.dirname(memwal_ops.__file__), page)
    return page if os.path.exists(page) or not os.path.exists(shipped) else shipped


def with_pages(text: str) -> str:
    """A text with the pages that it names as paths that a reader can open."""
    return _PAGE.sub(lambda match: page_path(match[0]), text)


def error_document(error: MemwalOpsError) -> dict[str, object]:
    """Return the document that every command prints with ``--json`` on failure; without secrets."""
    texts = {"message": redact(str(error)), "remedy": redact(error.remedy)}
    fields = {
        "reason": error.reason,
        **texts,
        "exit_code": error.exit_code,
        "runbook": runbook(error.exit_code, error.reason),
    }
    return {"error": fields}
