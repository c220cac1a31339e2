"""Requests to other servers: they follow no redirect, and their errors quote no URL, which may have secrets."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import InvalidURL
from typing import Any

from memwal_ops.storage.redaction import redact
from memwal_ops.text import printable


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: tokens and messages go where they were configured to go, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the redirect as an error with its status."""
        return None  # noqa: RET501 - the base class's result


def failure_text(error: Exception, url: str = "") -> str:
    """Return why a request failed, without its URL; that of an invalid URL would quote its path."""
    if isinstance(error, InvalidURL):
        return "its URL is invalid: it has a space, a control character, or a port that is not a number"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = f"{type(error).__name__}: {reason}"
    return printable(redact(text.replace(url, "URL") if url else text))
