"""Render the HTML pages: every text is redacted, made printable and escaped.

The Content-Security-Policy admits one style sheet, by its hash, and images. Pages of the service also load one script,
from the service itself; a page that is a file runs none.
"""

from __future__ import annotations

import hashlib
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from memwal_ops.storage.options import redact
from memwal_ops.text import printable, size_text, time_text
from memwal_ops.version import __version__

_HASH = "sha256"
_BRIEF, _WHOLE_FROM = 140, 100


@cache
def _style() -> str:
    return (files(__package__) / "templates" / "style.css").read_text(encoding="utf-8")


@cache
def script() -> bytes:
    """The script of the pages of the service: they work without it."""
    return (files(__package__) / "templates" / "console.js").read_bytes()


@cache
def content_security_policy(*, served: bool = True) -> str:
    """The policy of a page. A server adds ``frame-ancestors``, which a page cannot set itself.

    ``served``: it is a page of the service, which has a script and forms; else it is a file.
    """
    digest = b64encode(hashlib.new(_HASH, _style().encode()).digest()).decode()
    own = "img-src 'self' data:; script-src 'self'; connect-src 'self'" if served else "img-src data:"
    forms = "'self'" if served else "'none'"
    return f"default-src 'none'; style-src '{_HASH}-{digest}'; {own}; base-uri 'none'; form-action {forms}"


def render(template: str, **model: Any) -> bytes:
    """Render a template of this package as UTF-8.

    Args:
        template: its name without suffix, such as ``overview`` or ``table``.
        **model: its variables. Strings are redacted and escaped wherever they are printed, unless they are
            ``markupsafe.Markup``.
    """
    _seen.texts = {}
    now = datetime.now(UTC)
    template_ = _environment().get_template(f"{template}.html.j2")
    model = {"shell": None, **model}
    policy = Markup(content_security_policy(served=model["shell"] is not None))  # noqa: S704 - our own text
    style = Markup(_style())  # noqa: S704 - our own file
    text = template_.render(**model, now=now, release=__version__, style=style, policy=policy)
    return text.encode("utf-8", "backslashreplace")


# What the page being rendered on this thread has redacted already; kept no longer, as more secrets may be registered.
_seen = threading.local()


def _clean(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    texts: dict[str, str] = _seen.texts
    if value not in texts:
        texts[value] = printable(redact(value), lines=True)
    return texts[value]


def ago(when: datetime | str | None) -> str:
    """How long ago a time was: ``3 min ago``; ``never`` for None."""
    if when is None:
        return "never"
    moment = datetime.fromisoformat(when) if isinstance(when, str) else when
    return f"{time_text((datetime.now(UTC) - moment).total_seconds())} ago"


def until(when: datetime | str | None) -> str:
    """How long it is until a time: ``in 3 min``, ``now`` if it has passed; empty for None."""
    if when is None:
        return ""
    moment = datetime.fromisoformat(when) if isinstance(when, str) else when
    seconds = (moment - datetime.now(UTC)).total_seconds()
    return f"in {time_text(seconds)}" if seconds > 0 else "now"


def day(when: str | None) -> str:
    """A day as ``27 Nov``, with the year if it is another one; ``now`` if it has passed; empty for None."""
    if when is None:
        return ""
    moment, now = datetime.fromisoformat(when).astimezone(UTC), datetime.now(UTC)
    return "now" if moment <= now else f"{moment:%-d %b}" if moment.year == now.year else f"{moment:%-d %b %Y}"


def clock(when: datetime | str | None) -> str:
    """A time as ``2026-11-22 05:30:28``, in UTC; empty for None."""
    if when is None:
        return ""
    moment = datetime.fromisoformat(when) if isinstance(when, str) else when
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def amount_text(value: float | None, unit: str = "count") -> str:
    """A figure in the unit of its metric: ``1,024``, ``1.0 KiB`` or ``17 min``; empty for None."""
    if value is None:
        return ""
    return size_text(value) if unit == "bytes" else time_text(value) if unit == "seconds" else f"{value:,.0f}"


def compact_text(value: float | None) -> str:
    """A count in three digits or so: ``950``, ``12.3 k``, ``4.1 M``; empty for None."""
    if value is None:
        return ""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scaled = value / (1000.0 if unit == "k" else size)
            return f"{scaled:.1f} {unit}" if scaled < _WHOLE_FROM else f"{scaled:.0f} {unit}"
    return f"{value:,.0f}"


def share_text(value: float | None) -> str:
    """A share in percent, 100 % only if it is the whole; empty for None."""
    return "" if value is None else f"{int(value * 1000) / 10:g} %"


def brief(text: str) -> str:
    """The beginning of a text, for a list."""
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 1].rstrip()}…"


@cache
def runbook_title(path: str) -> str:
    """The heading of a page of the runbooks."""
    with suppress(OSError):
        page = files("memwal_ops").joinpath(*path.split("/")).read_text(encoding="utf-8")
        return page.partition("\n")[0].removeprefix("# ").replace("`", "")
    return path


def split_command(do: str) -> tuple[str, str]:
    """Split a remedy into its sentence and the command after ``: `` at its end; empty if there is none."""
    if do.endswith("."):
        return do, ""
    words, _, command = do.partition(": ")
    return (f"{words}:", command) if command else (do, "")


_FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "until": until,
    "when": day,
    "compact": compact_text,
    "share": share_text,
    "brief": brief,
    "runbook_title": runbook_title,
    "clock": clock,
    "amount": amount_text,
    "size": size_text,
    "span": time_text,
    "split_command": split_command,
    "path_segment": lambda name: quote(name, safe="", errors="surrogateescape"),
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(str(__package__)),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment
