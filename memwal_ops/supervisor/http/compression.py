"""Compress responses by gzip, where that tells nobody a secret.

A page for someone who is signed in has the value that its forms send back, beside words of the address: by the sizes of
many compressed pages, another site could find the value out (BREACH). Such a page is sent as it is.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memwal_ops.supervisor.http.exchange import Response

_KINDS = frozenset({"text/html", "text/plain", "text/javascript", "application/json", "image/svg+xml"})
# Less gains nothing; more, such as the status of ten thousand tables, would keep a thread busy for seconds.
_MIN_BYTES, _MAX_BYTES = 1400, 8 << 20
_LEVEL = 5
_REFUSED = re.compile(r"q=0(\.0*)?")


def is_compressible(response: Response) -> bool:
    """Return whether the body depends on what encodings a client accepts."""
    kind = response.kind.partition(";")[0]
    return not response.secret and kind in _KINDS and _MIN_BYTES <= len(response.body) <= _MAX_BYTES


def accepts_gzip(header: str) -> bool:
    """Return whether a client accepts gzip, by its ``Accept-Encoding``."""
    found: dict[str, bool] = {}
    for part in header.lower().split(","):
        name, *parameters = (one.strip() for one in part.split(";"))
        found[name] = not any(_REFUSED.fullmatch(one.replace(" ", "")) for one in parameters)
    return found.get("gzip", found.get("*", False))


def compressed(body: bytes) -> bytes:
    """Return a body by gzip."""
    return gzip.compress(body, _LEVEL, mtime=0)
