"""Resume a listing after a failed page.

obstore's stream cannot be used after an error. Stores list in the order of their keys, so a new
stream that starts after the last object continues where the old one failed, and memory holds
one page. The start of a listing is only a hint to the store: a server may ignore it
(releases of Azurite did), so objects that sort before it are skipped here. For retries see
:mod:`memwal_ops.storage.retries`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.storage import metering
from memwal_ops.storage.api import ObjectMeta
from memwal_ops.storage.entity_tags import bare
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import obstore

    from memwal_ops.storage.clients import Client


class Pages:
    """The pages of one recursive listing, in order. :meth:`attempt` may be called again after an error."""

    def __init__(self, client: Callable[[], Client], folder: str, after: str | None = None) -> None:
        """List the objects below ``folder`` that sort after ``after`` (by bytes in UTF-8); empty: below the root.

        ``client`` is called for each new stream.
        """
        self._client = client
        self._folder = folder
        self._stream: Iterator[Sequence[obstore.ObjectMeta]] | None = None
        self._after = after
        self._last: str | None = None
        self._seen: str | None = None
        self._in_order = True

    def attempt(self) -> tuple[ObjectMeta, ...] | None:
        """The next page of at most 1,000 objects, possibly empty; None after the last.

        Raises:
            StorageError: a page failed in a listing that is not in order (S3 Express): continuing
                from the last object could skip others, and a file that is not listed would be taken for absent.
            Exception: obstore's own errors, after which this can be called again.
        """
        try:
            if self._stream is None:
                self._stream = self._begin()
            page = [to_meta(entry) for entry in next(self._stream)]
        except StopIteration:
            return None
        except Exception as exc:
            self._stream = None
            if not self._in_order or (self._last is not None and not _same_in_every_order(self._last)):
                raise translate(exc, path=self._folder, action="list") from exc
            raise
        objects = []
        for meta in page:
            self._in_order = self._in_order and (self._seen is None or _sorts_after(meta.path, self._seen))
            self._seen = meta.path
            if self._after is None or _sorts_after(meta.path, self._after):
                self._last = meta.path
                objects.append(meta)
        return tuple(objects)

    def _begin(self) -> Iterator[Sequence[obstore.ObjectMeta]]:
        if self._last is not None:
            self._after = self._last
        self._seen = None
        offset = self._after if self._after is not None and _same_in_every_order(self._after) else None
        return metering.pages(self._client(), self._folder or None, offset)


def _sorts_after(path: str, other: str) -> bool:
    return path.encode() > other.encode()


def _same_in_every_order(path: str) -> bool:
    """Whether the same names sort after it by bytes (S3, GCS) as by UTF-16 units (Azurite).

    The orders differ from U+D800 on. Such a name is never sent as the start of a listing: a store with another
    order would skip objects, and an object that is not listed would be taken for absent.
    """
    return all(character < "\ud800" for character in path)


def to_meta(entry: obstore.ObjectMeta) -> ObjectMeta:
    """Convert obstore's metadata of an object."""
    e_tag = entry["e_tag"]
    return ObjectMeta(
        path=entry["path"],
        size=entry["size"],
        last_modified=entry["last_modified"],
        e_tag=None if e_tag is None else bare(e_tag),
    )
