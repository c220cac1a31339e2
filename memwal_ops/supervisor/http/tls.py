"""The certificate of the HTTP server, read again when its files change."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidConfigError
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    import socket


class Certificate:
    """A certificate and its key. A pair that does not fit, while it is replaced, leaves the previous one in effect."""

    def __init__(self, certificate: str, key: str) -> None:
        """Read both files.

        Raises:
            InvalidConfigError: they cannot be read, or do not belong together.
        """
        self._files = (certificate, key)
        self._stamp = self._stamped()
        try:
            self._context = self._read()
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"The certificate {certificate} and the key {key} cannot be used: {_why(error)}.",
                remedy="Correct http.tls_certificate and http.tls_key: PEM files of one pair, which the service reads.",
            ) from error

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Encrypt a connection; its handshake comes with its first read."""
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        log = get_logger(__name__)
        try:
            self._context = self._read()
        except (OSError, ValueError) as error:
            log.warning("certificate_not_reloaded", file=self._files[0], error=_why(error), still="the previous one")
        else:
            log.info("certificate_reloaded", file=self._files[0])

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An empty password: a key that needs one fails, and does not ask on the terminal.
        context.load_cert_chain(*self._files, password="")
        return context

    def _stamped(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: str) -> object:
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)
