"""A listing that survives a failed page.

obstore's stream is of no use after an error. Stores list in order of their keys, so a new
stream that starts after the last object seen goes on where the old one broke, and memory holds
one page. May not enter: when and how long to retry (:mod:`memwal_ops.storage.retries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore

from memwal_ops.storage.api import ObjectMeta
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memwal_ops.storage.clients import Client

_PAGE = 1000


class Pages:
    """The pages of one recursive listing, in order; :meth:`attempt` may be called again after an error."""

    def __init__(self, client: Callable[[], Client], folder: str, after: str | None = None) -> None:
        """List below ``folder``, all if it is empty, what sorts after ``after``.

        ``client`` is asked at each new stream.
        """
        self._client = client
        self._folder = folder
        self._stream: Iterator[Sequence[obstore.ObjectMeta]] | None = None
        self._last = after
        self._in_order = True

    def attempt(self) -> tuple[ObjectMeta, ...] | None:
        """The next page of at most 1,000 objects; None after the last.

        Raises:
            StorageError: a page failed in a listing that is not in order (S3 Express): going on
                from the last object could skip others, and a file that is not listed looks absent.
            Exception: obstore's own, after which this may be called again.
        """
        try:
            if self._stream is None:
                self._stream = iter(
                    obstore.list(self._client(), self._folder or None, offset=self._last, chunk_size=_PAGE)
                )
            page = tuple(to_meta(entry) for entry in next(self._stream))
        except StopIteration:
            return None
        except Exception as exc:
            self._stream = None
            if not self._in_order:
                raise translate(exc, path=self._folder, action="list") from exc
            raise
        for meta in page:
            self._in_order = self._in_order and (self._last is None or self._last.encode() < meta.path.encode())
            self._last = meta.path
        return page


def to_meta(found: obstore.ObjectMeta) -> ObjectMeta:
    """Obstore's metadata as ours."""
    return ObjectMeta(
        path=found["path"], size=found["size"], last_modified=found["last_modified"], e_tag=found["e_tag"]
    )
