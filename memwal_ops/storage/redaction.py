"""Keeps secrets out of every text that leaves the process: log lines, messages, reprs.

Two nets: values that were registered as secrets when options were resolved (:func:`remember`),
and text that looks like a secret by the name beside it. The second one is for texts of client
libraries, which quote requests and answers that we never saw. May not enter: I/O.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MASK = "***"

_SENSITIVE = (
    r"(?:secret|token|password|passwd|pwd|access[_-]?key|account[_-]?key|master[_-]?key|storage[_-]?key"
    r"|credential|signature|sas|api[_-]?key|authorization|private[_-]?key|service_account_key|customer_key)"
)
_SECRET_KEY = re.compile(_SENSITIVE, re.IGNORECASE)
# A file's name is no secret, and a message without it helps nobody.
_NOT_SECRET_KEY = re.compile(r"(?:_file|_path|_uri|_url)$|^google_service_account$", re.IGNORECASE)

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s,;&"'<>(){}\[\]]+)"""
# No longer names: with any number here, a text of 5,000 letters takes a minute.
_SOME = "{0,128}"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # https://user:password@host
    (re.compile(r"(?<=://)[^/\s@]+@"), f"{MASK}@"),
    # the parts of an S3 error answer that repeat the request's credentials
    (
        re.compile(
            r"<(AWSAccessKeyId|StringToSign|StringToSignBytes|SignatureProvided|CanonicalRequest"
            r"|CanonicalRequestBytes|Token-0)>.*?</\1>",
            re.DOTALL,
        ),
        rf"<\1>{MASK}</\1>",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}\b"), MASK),
    # KEY=value and KEY = 'value', also as part of a query string
    (re.compile(rf"({_SENSITIVE}[\w.%-]{_SOME}\s*=\s*){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    # the same in JSON or in a dict's repr
    (re.compile(rf"""(["'][\w.-]{_SOME}{_SENSITIVE}[\w.-]{_SOME}["']\s*:\s*){_VALUE}""", re.IGNORECASE), rf"\1{MASK}"),
    # key_with_underscore: value, Header-Name: value. A bare word is left alone: that is prose.
    (
        re.compile(
            rf"(\b(?=[\w.-]{_SOME}[_-])[\w.-]{_SOME}{_SENSITIVE}[\w.-]{_SOME}:\s*|\bauthorization:\s*){_VALUE}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
)

_SHORTEST_ANYWHERE = 8
_SHORTEST_AS_WORD = 4
_MOST_REMEMBERED = 512
_known: OrderedDict[str, re.Pattern[str]] = OrderedDict()
_lock = threading.Lock()


def is_secret_key(key: str) -> bool:
    """Whether an option of this name carries a secret."""
    return _SECRET_KEY.search(key) is not None and _NOT_SECRET_KEY.search(key) is None


def remember(values: Iterable[str | None]) -> None:
    """Register secret values; from now on :func:`redact` removes them from any text.

    Values shorter than 4 characters are not registered: masking every ``a`` would destroy the
    text and tell the secret at once. Values of 4 to 7 are masked as whole words only. The 512
    values that were used last are kept, so that refreshed credentials do not pile up.
    """
    with _lock:
        for value in values:
            if value is None or len(value) < _SHORTEST_AS_WORD:
                continue
            for form in {value, quote(value, safe=""), value.replace("/", "\\/")}:
                pattern = re.escape(form)
                if len(value) < _SHORTEST_ANYWHERE:
                    pattern = rf"(?<![\w]){pattern}(?![\w])"
                _known[form] = re.compile(pattern)
                _known.move_to_end(form)
        while len(_known) > _MOST_REMEMBERED:
            _known.popitem(last=False)


def remember_options(options: Mapping[str, str]) -> None:
    """Register the values of all options whose key names a secret."""
    remember(value for key, value in options.items() if is_secret_key(key))


def redact(text: str) -> str:
    """The text without known secret values and without anything that looks like one."""
    with _lock:
        # Longest first: a secret that contains another one must not leave its tail behind.
        patterns = sorted(_known.items(), key=lambda item: len(item[0]), reverse=True)
    for form, pattern in patterns:
        if form in text:
            text = pattern.sub(MASK, text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options with the values of secret keys masked and all others redacted."""
    return {key: MASK if is_secret_key(key) else redact(str(value)) for key, value in options.items()}


class RedactedOptions(dict[str, str]):
    """A dict that a client library can use as it is, and that prints without secrets."""

    def __repr__(self) -> str:
        """Keys with their values, secrets masked."""
        return repr(redact_options(self))

    __str__ = __repr__
