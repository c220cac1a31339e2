"""A URL that is fetched after each success, for services that call somebody when it stops.

Best effort: nothing waits for it, and a failure changes nothing.
"""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote

from memwal_ops.log import get_logger
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_WAITING = 100


class Heartbeat:
    """Fetches URLs on a thread of its own. ``on_result`` gets ``succeeded`` or ``failed``."""

    def __init__(self, on_result: Callable[[str], None]) -> None:
        """Nothing is fetched yet."""
        self._on_result = on_result
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="heartbeat")
        self._waiting = 0

    def beat(self, url: str, table: str, job: str, timeout: float) -> None:
        """Fetch it soon; dropped where too many wait already."""
        if self._waiting < _MOST_WAITING:
            self._waiting += 1
            self._pool.submit(self._fetch, url.format(table=quote(table, safe=""), job=job), timeout)

    def close(self) -> None:
        """Drop what waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, url: str, timeout: float) -> None:
        self._waiting -= 1
        request = urllib.request.Request(url, headers={"User-Agent": f"memwal-ops/{__version__}"})  # noqa: S310 - the configuration allows http and https alone
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - see above
                answer.read(1)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's server does
            # Not the URL: the name in it is often all that protects it.
            get_logger(__name__).warning(
                "heartbeat_failed", error=f"{type(error).__name__}: {error}".replace(url, "URL")
            )
            self._on_result("failed")
        else:
            self._on_result("succeeded")
