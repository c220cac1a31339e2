"""Read the log of a small table from one listing: one request for all regions instead of several for each.

Jobs that read every region list many folders below ``_mem_wal/``. If there are fewer than 1,000 objects, the first page
of a listing of ``_mem_wal/`` has all of them.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.versions import PAGE, VERSIONS_FOLDER, is_same_file
from memwal_ops.formats.lance.regions.manifests import HINT
from memwal_ops.formats.lance.wire.names import (
    MEM_WAL_FOLDER,
    parse_region_manifest_name,
    parse_wal_entry_name,
    region_folder,
)
from memwal_ops.formats.lance.wire.region_manifest import encode_version_hint
from memwal_ops.storage.api import LinkError, Listing
from memwal_ops.storage.locations import LOCAL
from memwal_ops.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from uuid import UUID

    from memwal_ops.storage.api import ObjectMeta, Store

_MANIFESTS = frozenset({"manifest", VERSIONS_FOLDER})
_SMALL = 64 << 10
_MAX_BYTES = 4 << 20


def listed_log(store: Store, scheme: str) -> Store:
    """A store that serves the first listing of each folder of the log from one page, where the log fits into one.

    For planning alone: no proof of a deletion, and no check before a region manifest is published, may use it.
    Requests: one; none on local files, where folders and links are listed as they are.
    """
    if scheme in LOCAL:
        return store
    before = store if isinstance(store, ListedLog) else None
    store = unlisted(store)
    page = list(islice(store.list(MEM_WAL_FOLDER), PAGE))
    # A key that ends in "/", as consoles create them, is listed as an object where others list a folder.
    if len(page) == PAGE or any(meta.path.count("/") == 1 for meta in page):
        return store
    return ListedLog(store, page, before)


def log_suffixes(store: Store, region_id: UUID) -> frozenset[str]:
    """The suffixes of a region's log entries, of the first 1,000; empty where that would need a request."""
    folder = f"{region_folder(region_id)}/wal"
    paths: Iterable[str] = ()
    if isinstance(store, ListedLog):
        paths = (path for path in store.listed if path.startswith(f"{folder}/"))
    elif store.root.startswith("/"):
        with suppress(LinkError):
            paths = [meta.path for meta in islice(store.list(folder), PAGE)]
    names = (parse_wal_entry_name(path.rsplit("/", 1)[-1]) for path in paths)
    return frozenset(name.suffix for name in names if name is not None)


def unlisted(store: Store) -> Store:
    """The store itself, if it is one of :func:`listed_log`."""
    return store.listed_store if isinstance(store, ListedLog) else store


class ListedLog(StoreWrapper):
    """A store that serves listings of the log from one page. Safe in threads.

    A folder's first listing comes from the page. The second one comes from the store, as a caller that lists again has
    found a contradiction; from then on, so do all of that region. A folder that the page lacks is always listed.
    Manifests are immutable: one that is listed as it was when it was read is not read again.

    Attributes:
        listed_store: the store that was listed.
    """

    def __init__(self, store: Store, page: Iterable[ObjectMeta], before: ListedLog | None = None) -> None:
        """``before``: an earlier page, whose manifests are kept where they are the same files."""
        super().__init__(store)
        self.listed_store = store
        self._lock = threading.Lock()
        self._files = {meta.path: meta for meta in page}
        self._asked: set[str] = set()
        self._content: dict[str, bytes] = {}
        self._content.update(self._hints())
        for meta, data in () if before is None else before.kept():
            if is_same_file(meta, self._files.get(meta.path)):
                self._content[meta.path] = data

    @property
    def listed(self) -> Iterable[str]:
        """The paths of the page."""
        return self._files

    def _hints(self) -> Iterator[tuple[str, bytes]]:
        """The hints that name the newest manifest that the page has, as their entity tags show: their MD5 sums."""
        newest: dict[str, int] = {}
        for path in self._files:
            folder, _, name = path.rpartition("/")
            if folder.endswith("/manifest") and (version := parse_region_manifest_name(name)) is not None:
                newest[folder] = max(newest.get(folder, 0), version)
        for folder, version in newest.items():
            meta = self._files.get(f"{folder}/{HINT}")
            # As encoded by pylance's writer, and by this package's.
            for data in (b'{"version":%d}' % version, encode_version_hint(version)):
                if meta is not None and meta.e_tag == hashlib.md5(data, usedforsecurity=False).hexdigest():
                    yield meta.path, data

    def kept(self) -> Sequence[tuple[ObjectMeta, bytes]]:
        """The manifests that were read."""
        with self._lock:
            return [(self._files[path], data) for path, data in self._content.items()]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """See the class."""
        # The log as a whole is listed to make a page: never from an older one.
        found = None if after is not None or prefix.strip("/") == MEM_WAL_FOLDER else self._known(prefix)
        return super().list(prefix, after=after) if found is None else iter(found)

    def list_level(self, prefix: str = "") -> Listing:
        """See the class."""
        found = self._known(prefix)
        if found is None:
            return super().list_level(prefix)
        start = len(prefix) + 1
        directories = {prefix + "/" + meta.path[start:].partition("/")[0] for meta in found if "/" in meta.path[start:]}
        return Listing(tuple(sorted(directories)), tuple(meta for meta in found if "/" not in meta.path[start:]))

    def get(self, path: str) -> bytes:
        """See the class."""
        with self._lock:
            known = self._content.get(path)
            meta = self._files.get(path)
        if known is not None:
            return known
        data = super().get(path)
        if meta is not None and meta.size <= _SMALL and path.split("/")[-2] in _MANIFESTS:
            with self._lock:
                if path in self._files and sum(map(len, self._content.values())) < _MAX_BYTES:
                    self._content[path] = data
        return data

    def head_of_page(self, path: str) -> ObjectMeta | None:
        """The object at a path as it was listed, without a request; once its region is listed again, by one."""
        region = "/".join(path.split("/")[:2]) + "/"
        with self._lock:
            if path in self._files or any(known.startswith(region) for known in self._files):
                return self._files.get(path)
        return super().head(path)

    def _known(self, prefix: str) -> Sequence[ObjectMeta] | None:
        """The page's objects below a folder; None if the store must be listed."""
        folder = prefix.removesuffix("/") + "/"
        if not folder.startswith(f"{MEM_WAL_FOLDER}/"):
            return None
        with self._lock:
            found = [meta for path, meta in self._files.items() if path.startswith(folder)]
            if not found:
                return None
            if folder not in self._asked:
                self._asked.add(folder)
                return found
            region = "/".join(folder.split("/")[:2]) + "/"
            for path in [path for path in self._files if path.startswith(region)]:
                del self._files[path]
                self._content.pop(path, None)
            return None
