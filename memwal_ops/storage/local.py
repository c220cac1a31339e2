"""The store on local files: links are not followed, and every name is listed.

A file system differs from an object store in four ways that matter to readers of a listing:
folders exist by themselves, links lead elsewhere, a root may be missing, and a name may be
any bytes. obstore's own listing fails as a whole at one name with a newline or that is not UTF-8, and
follows links; therefore this module walks the folders itself.
"""

from __future__ import annotations

import os
import re
import threading
from datetime import UTC, datetime, timedelta
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage import metering
from memwal_ops.storage.api import LinkError, Listing, ObjectMeta
from memwal_ops.storage.clients import local_client
from memwal_ops.storage.entity_tags import unsupported
from memwal_ops.storage.errors import translate
from memwal_ops.storage.object_store import ObjectStore, checked_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_ops.storage.clients import Client
    from memwal_ops.storage.retries import RetryPolicy


# Names that obstore does not support. It treats "x|" and "x:" as a Windows drive: it makes a folder of that
# name and then refuses put-if-absent with "exists", though no object was written there.
_UNSUPPORTED_NAME = re.compile(r"#[0-9]+$|[A-Za-z][:|]$")
# An upload of obstore in progress.
_UPLOAD = re.compile(r"#[0-9]+$")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LocalObjectStore(ObjectStore):
    """The files below one local folder.

    The folder need not exist: it then reads as empty, and the first write makes it. Deleting
    the last file of a folder removes the folder, and its parents while they are empty, but
    never the root. A name that ends in ``#`` and digits belongs to an upload in progress: it is
    refused, and not listed. A name that is not UTF-8 is listed with its bytes as surrogates
    (``os.fsdecode``), and cannot be read or written.

    The root may be a symbolic link. Below it, links to folders and links that lead
    out of the root are not followed: they are listed as links, and a path through one raises ``LinkError``.
    Otherwise ``ffffffff_gen_1 -> 0a1b2c3d_gen_1`` would be an orphan, and collecting it would delete a generation
    that is needed.
    """

    def __init__(self, root: str, *, retry: RetryPolicy | None = None) -> None:
        """``root`` is an absolute path."""
        super().__init__(None, root, delete_batch=1, retry=retry)
        self._real_root = os.path.realpath(root)
        self._lock = threading.Lock()

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects below the folder ``prefix``, streamed in no particular order; see the interface."""
        folder = self._folder(prefix)
        objects = self._walk(folder)
        if after is None:
            return objects
        first = os.fsencode(after)
        return (meta for meta in objects if os.fsencode(meta.path) > first)

    def list_level(self, prefix: str = "") -> Listing:
        """The entries directly in the folder ``prefix``; folders without any object are listed as ``empty``."""
        folder = self._folder(prefix)
        full: list[str] = []
        empty: list[str] = []
        links: list[str] = []
        objects: list[ObjectMeta] = []
        for entry in self._scan(folder):
            path = _joined(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                (empty if next(self.list(path), None) is None else full).append(path)
            elif self._is_unfollowed_link(entry):
                links.append(path)
            elif (meta := self._meta(path, entry)) is not None:
                objects.append(meta)
        return Listing(tuple(sorted(full)), tuple(objects), tuple(sorted(empty)), tuple(sorted(links)))

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Raises ``ConditionalWriteUnsupportedError``: a file system has no write conditional on a tag."""
        del path, data, e_tag
        raise unsupported(self._root, "is a local folder, which has no compare-and-swap")

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            metering.delete(self._client(), name)

    def _client(self, *, writing: bool = False) -> Client:
        with self._lock:
            if self._made_client is None:
                try:
                    if writing:
                        os.makedirs(self._real_root, exist_ok=True)
                    elif not os.path.exists(self._real_root):
                        # Every method handles this as an absent object.
                        raise FileNotFoundError(2, "No such folder", self._root)
                    self._made_client = local_client(self._real_root)
                except PermissionError as exc:
                    raise translate(exc, path=self._root, action="write" if writing else "read") from exc
            return self._made_client

    def _checked(self, path: str) -> str:
        checked_path(path)
        if _UNSUPPORTED_NAME.search(path):
            raise InvalidUsageError(f"{path!r} cannot be a local file here: its name ends in '#1', 'x:' or the like.")
        self._refuse_links(path)
        return path

    def _folder(self, prefix: str) -> str:
        # Not checked like a name for obstore: every folder in a listing can itself be listed.
        folder = prefix.removesuffix("/")
        if folder and not {"", ".", ".."}.isdisjoint(folder.split("/")):
            checked_path(folder)  # raises
        self._refuse_links(folder)
        return folder

    def _absolute(self, path: str) -> str:
        return os.path.join(self._real_root, path)

    def _refuse_links(self, path: str) -> None:
        """Raise ``LinkError`` if the path is, or contains, a link that is not followed, or is no regular file."""
        here = self._real_root
        for segment in path.split("/"):
            here = os.path.join(here, segment)
            try:
                mode = os.lstat(here).st_mode
            except (OSError, ValueError):
                return  # missing or not accessible: the read or write itself reports it
            if S_ISLNK(mode):
                if not self._leads_to_a_file_inside(here):
                    raise LinkError(self._about_link(here))
            elif not S_ISREG(mode) and not S_ISDIR(mode):
                raise LinkError(
                    f"{path!r} is a pipe, a socket or a device, not a regular file.",
                    remedy="Remove it, and restore the file from a backup if there was one.",
                )

    def _about_link(self, link: str) -> str:
        name, target = os.path.relpath(link, self._real_root), os.readlink(link)
        real = os.path.realpath(link)
        if os.path.islink(real):
            where = "leads to itself"
        elif not os.path.exists(real):
            where = "leads to nothing"
        elif self._is_inside(real):
            where = f"leads to another place in {self._root}"
        else:
            where = f"leads out of {self._root}"
        return f"{name!r} is a symbolic link to {target!r}, which {where}; links below the root are not followed."

    def _leads_to_a_file_inside(self, link: str) -> bool:
        return os.path.isfile(link) and self._is_inside(os.path.realpath(link))

    def _is_inside(self, real: str) -> bool:
        return real == self._real_root or real.startswith(self._real_root.rstrip("/") + "/")

    def _walk(self, folder: str) -> Iterator[ObjectMeta]:
        pending = [folder]
        while pending:
            here = pending.pop()
            for entry in self._scan(here):
                path = _joined(here, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif (meta := self._meta(path, entry)) is not None:
                    yield meta

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """The entries of one folder; none if the folder does not exist (any more)."""
        try:
            with os.scandir(self._absolute(folder)) as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as exc:
            raise translate(exc, path=folder or self._root, action="list") from exc

    def _is_unfollowed_link(self, entry: os.DirEntry[str]) -> bool:
        """Whether it is a link that is not followed."""
        return entry.is_symlink() and not self._leads_to_a_file_inside(entry.path)

    def _meta(self, path: str, entry: os.DirEntry[str]) -> ObjectMeta | None:
        """Metadata as obstore returns it; of the link itself if it is not followed; None if the file is gone."""
        if _UPLOAD.search(entry.name):
            return None
        try:
            state = entry.stat(follow_symlinks=not self._is_unfollowed_link(entry))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise translate(exc, path=path, action="list") from exc
        if S_ISDIR(state.st_mode):
            return None
        micros = state.st_mtime_ns // 1000
        tag = f"{state.st_ino:x}-{micros:x}-{state.st_size:x}"
        return ObjectMeta(path, state.st_size, _EPOCH + timedelta(microseconds=micros), tag)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
