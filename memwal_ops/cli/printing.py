"""Print to the terminal, for all commands: text without control characters, JSON for scripts, files of ``-o FILE``."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

import memwal_ops
from memwal_ops import errors
from memwal_ops.storage.options import redact
from memwal_ops.text import printable

_PAGE = re.compile(r"(?<![\w/.-])(?:docs|runbooks)/[\w/.-]+\.md\b")


def echo(text: str, *, err: bool = False) -> None:
    """Print human-readable text, of one line or several (:func:`memwal_ops.text.printable`)."""
    click.echo(printable(text, lines=True), err=err)


def echo_json(document: object, *, default: Callable[[object], object] | None = None) -> None:
    """Print one JSON document on stdout; characters that are not ASCII are escaped, so none is lost.

    ``default``: as of ``json.dumps``.
    """
    click.echo(json.dumps(document, indent=2, default=default))


def echo_result(document: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command: its document, or its human-readable text, with pages as paths to open."""
    if as_json:
        echo_json(document)
    else:
        echo(with_pages(text))


def page_path(page: str) -> str:
    """The path of a page of ``runbooks/`` or ``docs/``: relative in the project's folder, else in the package."""
    shipped = os.path.join(os.path.dirname(memwal_ops.__file__), page)
    return page if os.path.exists(page) or not os.path.exists(shipped) else shipped


def with_pages(text: str) -> str:
    """A text with the pages that it names as paths that a reader can open."""
    return _PAGE.sub(lambda match: page_path(match[0]), text)


def error_document(error: errors.MemwalOpsError) -> dict[str, object]:
    """Return the document that every command prints with ``--json`` on failure; without secrets."""
    texts = {"message": redact(str(error)), "remedy": redact(error.remedy)}
    fields = {
        "reason": error.reason,
        **texts,
        "exit_code": error.exit_code,
        "runbook": errors.runbook(error.exit_code, error.reason),
    }
    return {"error": fields}


_HEAD_BYTES = 1024


def check_replaceable(path: str, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Refuse a path at which there is something else than an earlier file of this kind.

    ``is_ours``: whether a file with these first bytes may be replaced. ``what``: its kind, with an article.

    Raises:
        InvalidUsageError: it must not be replaced.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise errors.InvalidUsageError(
            f"{path} cannot be read: {error.strerror}.", remedy="Give another -o."
        ) from error
    if not is_ours(head):
        raise errors.InvalidUsageError(
            f"{path} exists and is not {what} of memwal-ops; it was not changed.",
            remedy="Give another -o, or --force to replace it.",
        )


@contextmanager
def written_file(path: str) -> Iterator[IO[bytes]]:
    """A file that appears under its name when the block ends well: a reader never sees a part of it.

    Raises ``InvalidUsageError``: it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)[:100]}.", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise errors.InvalidUsageError(
            f"{path} cannot be written: {error.strerror}.", remedy="Give another -o."
        ) from error
