"""Which host names and origins are this service's own: no page of another host reads it, or acts, by a browser."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HostNames:
    """The names of a service bound to ``host``. ``allowed``: more of them, as of a proxy before it."""

    def __init__(self, host: str, allowed: Iterable[str]) -> None:
        own = socket.gethostname() if host in EVERYWHERE else host
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._names = {"localhost", own.lower().rstrip("."), *self._allowed}

    def is_own(self, host: str) -> bool:
        """Whether a ``Host`` header names this service: by one of its names, or by an address, which no DNS rebinds."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return name in self._names or bool(ip_address(name))
        except ValueError:
            return False

    def is_own_origin(self, origin: str, host: str | None) -> bool:
        """Whether an ``Origin`` is that of a page of this service, which was requested by the ``Host``.

        That of another port is not: cookies are shared by all ports of a host. Behind a proxy that sends another
        ``Host``, it is a name of ``http.allowed_hosts``.
        """
        try:
            parts = urlsplit(origin)
            name, port = (parts.hostname or "").rstrip("."), parts.port
            default = _DEFAULT_PORTS[parts.scheme]
            asked = urlsplit(f"//{host or ''}")
            same = (name, port or default) == ((asked.hostname or "").rstrip("."), asked.port or default)
        except (KeyError, ValueError):
            return False
        return bool(name) and (same or (name in self._allowed and port in {None, default}))
