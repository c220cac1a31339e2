"""Azurite, Microsoft's emulator of Azure Blob Storage: an npm package."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import re
import shutil
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from tests.support.servers import RealStore, UnavailableError, cache, may_fetch, process, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = "3.37.0"
ACCOUNT = "devstoreaccount1"
CONTAINER = "test"
_API = "2021-12-02"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def start(folder: Path) -> Iterator[RealStore]:
    """Start it on a free port, with an empty container; everything that it writes is in ``folder``."""
    package = _package(folder)
    key = _key(package)
    log = folder / "azurite.log"
    (folder / "data").mkdir()
    main = package / "dist/src/blob/main.js"
    arguments = ("--blobHost", "127.0.0.1", "--blobPort", "0", "--location", folder / "data", "--silent")
    with process("node", main, *arguments, "--disableTelemetry", log=log) as server:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"successfully listens on http://127\.0\.0\.1:(\d+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"Azurite did not start: {log.read_text()[-1000:]}")
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{found[1]}/{ACCOUNT}"
        _create_container(endpoint, key)
        yield RealStore(
            f"az://{CONTAINER}",
            {
                "azure_storage_account_name": ACCOUNT,
                "azure_storage_account_key": key,
                "azure_storage_endpoint": endpoint,
                "allow_http": "true",
            },
        )


def account_sas(store: RealStore, permissions: str) -> dict[str, str]:
    """The options with an account SAS for containers and objects instead of the key."""
    until = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = f"{ACCOUNT}\n{permissions}\nb\nco\n\n{until}\n\n\n{_API}\n\n"
    return _by_sas(store, {"sv": _API, "ss": "b", "srt": "co", "sp": permissions, "se": until}, text)


def container_sas(store: RealStore, permissions: str) -> dict[str, str]:
    """The options with a SAS for the container instead of the key."""
    until = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    place = f"/blob/{ACCOUNT}/{CONTAINER}"
    text = "\n".join([permissions, "", until, place, "", "", "", _API, "c", *[""] * 7])
    return _by_sas(store, {"sv": _API, "sr": "c", "sp": permissions, "se": until}, text)


def _by_sas(store: RealStore, parts: dict[str, str], text: str) -> dict[str, str]:
    options = dict(store.options)
    signature = _signature(options.pop("azure_storage_account_key"), text)
    return {**options, "azure_storage_sas_token": urlencode({**parts, "sig": signature})}


def _signature(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()


def _package(folder: Path) -> Path:
    home = cache() / f"azurite-{VERSION}"
    package = home / "node_modules/azurite"
    if shutil.which("node") is None:
        raise UnavailableError("Azurite needs node")
    if not (home / "complete").exists():
        may_fetch(f"Azurite {VERSION}")
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "complete").exists():
                quiet = ("--no-fund", "--no-audit", "--ignore-scripts", "--no-package-lock", "--loglevel=error")
                run("npm", "install", "--prefix", home, *quiet, f"azurite@{VERSION}", log=folder / "npm.log")
                (home / "complete").touch()
    return package


def _key(package: Path) -> str:
    """The emulator's account key: public, the same everywhere, and so taken from the package."""
    text = (package / "dist/src/blob/utils/constants.js").read_text()
    found = re.search(r'EMULATOR_ACCOUNT_KEY_STR = "([^"]+)"', text)
    if found is None:
        raise UnavailableError(f"This Azurite is not {VERSION}: its account key is elsewhere.")
    return found[1]


def _create_container(endpoint: str, key: str) -> None:
    date = formatdate(usegmt=True)
    place = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signature = _signature(key, "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_API}\n{place}")
    headers = {
        "x-ms-date": date,
        "x-ms-version": _API,
        "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
    }
    address = f"{endpoint}/{CONTAINER}?restype=container"
    _NO_PROXY.open(urllib.request.Request(address, method="PUT", headers=headers), timeout=10).close()
