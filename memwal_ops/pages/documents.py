"""Render pages of the runbooks, which are Markdown, as HTML with links that work in the service."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

_NOT_IN_NAMES = re.compile(r"[^\w\- ]")


def document(text: str, path: str, exists: Callable[[str], bool]) -> Markup:
    """Return a page as HTML.

    HTML in it stays text. Headings have the names by which links refer to them. A link to a page that this service
    does not have becomes its text, with the path of the page.

    ``path``: its path, without a leading slash: links are relative to it. ``exists``: whether the service has a page,
    by its path.
    """
    parser = _parser()
    tokens = parser.parse(text)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _name(tokens[at + 1].content))
        if token.type == "inline":
            for opening, closing in _links(token.children or []):
                _aim(opening, closing, path, exists)
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # noqa: S704 - the parser escapes all text


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _links(tokens: list[Any]) -> Iterator[tuple[Any, Any]]:
    opening = None
    for token in tokens:
        if token.type == "link_open":
            opening = token
        elif token.type == "link_close" and opening is not None:
            yield opening, token
            opening = None


def _aim(opening: Any, closing: Any, path: str, exists: Callable[[str], bool]) -> None:
    """Turn a link to a page that does not exist into a text with a title."""
    target = str(opening.attrGet("href") or "")
    place = target.partition("#")[0]
    if not place or target.startswith(("https://", "http://")):
        return
    aim = posixpath.normpath(posixpath.join(posixpath.dirname(path), place))
    if exists(aim):
        opening.attrSet("href", f"/{aim}{target[len(place) :]}")
        return
    opening.tag = closing.tag = "span"
    opening.attrs = {"title": f"in the documentation: {aim}"}


def _name(heading: str) -> str:
    return _NOT_IN_NAMES.sub("", heading.lower()).replace(" ", "-")
