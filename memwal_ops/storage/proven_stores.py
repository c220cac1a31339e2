"""Cache, for a day and in the user's cache folder, which stores passed the probe of conditional writes.

One small file for each store. Whatever cannot be read, is older than a day, comes from the future, or from another
release of this package or of the client library, is ignored: the store is probed again. A failed probe is never
cached, and with a folder that cannot be written, every process probes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import obstore

from memwal_ops.storage.options import is_lance_only
from memwal_ops.storage.redaction import is_secret_key
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from memwal_ops.storage.locations import Location

CACHE_VARIABLE = "MEMWAL_OPS_CACHE"
_VALID_SECONDS = 86_400.0
_RELEASES = f"memwal-ops {__version__}, obstore {obstore.__version__}"
# Parts of the names of variables that lead requests elsewhere or change them; client libraries read them themselves.
_ENDPOINT_VARIABLES = ("ENDPOINT", "ACCOUNT_NAME", "EMULATOR", "AZURITE", "PROXY", "CONDITIONAL", "BASE_URL")
_USER = re.compile(r"(?<=://)[^/@]*@")


def service_of(location: Location) -> str | None:
    """Identify the service behind a location: scheme, bucket, and all options but credentials.

    None for what is not remembered beyond this process: memory, and local files, where a probe takes some
    milliseconds, and the same path may be another file system a minute later.

    Only the user in a URL is left out of a value. The redactor of messages masks more: all of a host that is a user's
    name too, and the port behind a name like ``disaster-recovery``, so that two services would be one.
    """
    if location.scheme in {"file", "memory"}:
        return None
    bucket = location.uri.split("://", 1)[1].partition("/")[0]
    options = sorted(
        (key, _USER.sub("", value))
        for key, value in location.lance_options.items()
        if not is_secret_key(key) and not is_lance_only(key)
    )
    variables = sorted(
        (name, _USER.sub("", value))
        for name, value in os.environ.items()
        if any(part in name.upper() for part in _ENDPOINT_VARIABLES)
    )
    digest = hashlib.sha256(json.dumps([location.scheme, bucket, options, variables]).encode()).hexdigest()
    return f"{location.scheme}://{bucket} {digest}"


def is_proven(service: str) -> bool:
    """Whether the store was seen, by this release and within a day, to enforce conditional writes."""
    path = _path(service)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(4096))
        age = time.time() - float(found["proven"])
        return bool(found["service"] == service and found["releases"] == _RELEASES and 0 <= age < _VALID_SECONDS)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False


def remember(service: str) -> None:
    """Remember a success; the file is renamed into place, so that another process reads all of it or nothing."""
    path = _path(service)
    if path is None:
        return
    document = {"service": service, "releases": _RELEASES, "proven": time.time()}
    with suppress(OSError):
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _remove_old(folder)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump(document, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def forget(service: str) -> None:
    """Remove a cached success."""
    path = _path(service)
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _path(service: str) -> str | None:
    """The path of its cache file; None if there is no cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given is None:
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
        given = os.path.join(base, "memwal-ops")
    if not os.path.isabs(given):
        return None
    return os.path.join(given, "proven-stores", f"{hashlib.sha256(service.encode()).hexdigest()}.json")


def _remove_old(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _VALID_SECONDS:
                    os.unlink(entry.path)
