"""The store on local files: links are not followed, and every name is listed.

A file system differs from an object store in four ways that matter to readers of a listing:
folders exist by themselves, links lead elsewhere, a root may be missing, and a name may be
any bytes. obstore's own listing fails as a whole at one name with a newline or that is not UTF-8, and
follows links; therefore this module walks the folders itself.

A file system has no write that is conditional on a tag. A lock file replaces it: a swap takes the lock (``flock``,
which the kernel releases if the process dies, but not if it is suspended: so no lock is waited for without a limit),
compares the hash of the content, and renames a synced file into place. It is
**safe among processes of memwal-ops on one machine only**: another program that writes the file does not take
the lock, and not every network file system supports locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from stat import S_ISDIR, S_ISLNK, S_ISREG

from obstore.store import LocalStore

from memwal_ops import errors
from memwal_ops.storage import api, metering
from memwal_ops.storage.errors import RetryPolicy, call, translate
from memwal_ops.storage.object_store import NO_SEGMENTS, ObjectStore, checked_path
from memwal_ops.storage.probe import unsupported

_PAGE = 1000


class FolderListings:
    """Lists folders in few requests. They are asked for in ascending order, and read from one listing of their parent.

    The listing is read on from folder to folder. At the end of a page that does not reach the next one, it is begun
    again there: so it takes no more requests than a listing of each folder, but one for each that ends with a page.
    It may be a page older than the call: an object that was added meanwhile may be missing.

    A folder in which it finds fewer objects than are expected is listed by itself: some are gone, the store does not
    list in order (local files, S3 Express), or the folder was asked for out of order.
    """

    def __init__(self, store: api.Store, parent: str) -> None:
        self._store, self._parent = store, parent
        self._listing: Iterator[api.ObjectMeta] = iter(())
        self._next: api.ObjectMeta | None = None
        self._read = 0
        self._in_order = not store.root.startswith("/")

    def objects(self, folder: str, expected: int) -> dict[str, int]:
        """Path and bytes of all objects below ``folder``, which had ``expected`` of them when it was seen last."""
        sizes = self._read_on(folder) if self._in_order else {}
        if expected and len(sizes) >= expected:
            return sizes
        return {meta.path: meta.size for meta in self._store.list(folder)}

    def _read_on(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        inside, end = f"{folder}/", f"{folder}0".encode()  # "0" is the character after "/"
        if self._read == 0:
            self._begin(inside)
        while self._next is not None and self._next.path.encode() < end:
            if self._next.path.startswith(inside):
                sizes[self._next.path] = self._next.size
            elif self._read % _PAGE == 0:
                self._begin(inside)
                continue
            self._advance()
            if not self._in_order:
                return {}
        return sizes

    def _begin(self, after: str) -> None:
        self._listing, self._next, self._read = self._store.list(self._parent, after=after), None, 0
        self._advance()

    def _advance(self) -> None:
        last, self._next = self._next, next(self._listing, None)
        self._read += 1
        self._in_order = last is None or self._next is None or last.path.encode() < self._next.path.encode()


_PAUSE = 0.02
_LOCKS = "/proc/locks"


def lock_within(file: int, wait: float, *, announced: bool = True) -> str | None:
    """Lock an open file exclusively.

    Args:
        file: its descriptor, open for writing; the lock is released when it is closed.
        wait: how long to wait for another process that has it, in seconds.
        announced: whether to write this process's id into it.

    Returns:
        None: it is locked. Else the id of the process that still has it, or ``unknown``.
    """
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return holder_of(file)
            time.sleep(_PAUSE)
        else:
            break
    if announced:
        with suppress(OSError):  # it is only for messages: a full disk is no error
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return None


def holder_of(file: int) -> str:
    """The id of the process that has an open file locked: as the kernel lists it, else as the file names it."""
    named = os.pread(file, 100, 0).decode(errors="replace").strip() or "unknown"
    # The file may name a process that was killed, and whose id another one has by now.
    holders = _listed(os.fstat(file).st_ino)
    return named if not holders or named in holders else holders[0]


def _listed(inode: int) -> list[str]:
    try:
        with open(_LOCKS, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:  # not Linux
        return []
    # "3: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF"; a waiting process has "->" before FLOCK.
    return [line[4] for line in lines if line[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and line[5].endswith(f":{inode}")]


# A swap takes milliseconds. A process that has the lock for longer is suspended, or its disk does not respond.
_wait: ContextVar[float] = ContextVar("swap_wait", default=10.0)
LOCK_PATH = "_mem_wal_ops/swap.lock"
# Names with this suffix are uploads in progress, hidden in listings. The lock allows one writer, so one name is enough.
_TEMPORARY = "#0"


@contextmanager
def swaps_wait(wait: timedelta) -> Iterator[None]:
    """In the block, swaps wait that long for another process's swap before they are ``busy``; 0: ten seconds."""
    token = _wait.set(wait.total_seconds() or _wait.get())
    try:
        yield
    finally:
        _wait.reset(token)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _sync(path: str) -> None:
    with suppress(FileNotFoundError):  # deleted meanwhile
        for target in (path, os.path.dirname(path)):
            handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


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
        super().__init__(None, root, delete_batch=64, retry=retry)  # a batch is checked for links before its first
        self._real_root = os.path.realpath(root)
        self._lock = threading.Lock()

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """All objects below the folder ``prefix``, streamed in no particular order; see the interface."""
        folder = self._folder(prefix)
        objects = self._walk(folder)
        if after is None:
            return objects
        first = os.fsencode(after)
        return (meta for meta in objects if os.fsencode(meta.path) > first)

    def list_level(self, prefix: str = "") -> api.Listing:
        """The entries directly in the folder ``prefix``; folders without any object are listed as ``empty``."""
        folder = self._folder(prefix)
        full: list[str] = []
        empty: list[str] = []
        links: list[str] = []
        objects: list[api.ObjectMeta] = []
        for entry in self._scan(folder):
            path = _joined(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                try:
                    has_none = next(self.list(path), None) is None
                except errors.StorageCredentialsError:
                    has_none = False  # it may not be read, and does not hide those beside it
                (empty if has_none else full).append(path)
            elif self._is_unfollowed_link(entry):
                links.append(path)
            elif (meta := self._meta(path, entry)) is not None:
                objects.append(meta)
        return api.Listing(tuple(sorted(full)), tuple(objects), tuple(sorted(empty)), tuple(sorted(links)))

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Raises ``ConditionalWriteUnsupportedError``: a file system has no write conditional on a tag."""
        del path, data, e_tag
        raise unsupported(self._root, "is a local folder, which has no compare-and-swap")

    def get(self, path: str) -> bytes:
        """The whole file, for a third of what obstore takes for a small one. Raises ``ObjectNotFoundError``."""
        name = os.path.join(self._real_root, self._checked(path))
        data = call(partial(_content, name), path=path, action="read", policy=self._retry)
        metering.LOCAL.count("get", read=len(data))
        return data

    def _delete(self, names: Sequence[str]) -> None:
        metering.LOCAL.count("delete", len(names))
        for name in names:
            try:
                os.unlink(f"{self._real_root}/{name}")
            except FileNotFoundError:
                continue
        for nearest in {name.rpartition("/")[0] for name in names}:
            folder = nearest
            with suppress(OSError):  # it has other files
                while folder:
                    os.rmdir(os.path.join(self._real_root, folder))
                    folder = os.path.dirname(folder)

    def _client(self, *, writing: bool = False) -> metering.Client:
        with self._lock:
            if self._made_client is None:
                try:
                    if writing:
                        os.makedirs(self._real_root, exist_ok=True)
                    elif not os.path.exists(self._real_root):
                        # Every method handles this as an absent object.
                        raise FileNotFoundError(2, "No such folder", self._root)
                    self._made_client = LocalStore(self._real_root)
                except PermissionError as exc:
                    raise translate(exc, path=self._root, action="write" if writing else "read") from exc
            return self._made_client

    def _checked(self, path: str, folders: set[str] | None = None) -> str:
        checked_path(path)
        if _UNSUPPORTED_NAME.search(path):
            raise errors.InvalidUsageError(
                f"{path!r} cannot be a local file here: its name ends in '#1', 'x:' or the like."
            )
        self._refuse_links(path, set() if folders is None else folders)
        return path

    def _check_of_batch(self) -> Callable[[str], str]:
        return partial(self._checked, folders=set())

    def _folder(self, prefix: str) -> str:
        # Not checked like a name for obstore: every folder in a listing can itself be listed.
        folder = prefix.removesuffix("/")
        if folder and not NO_SEGMENTS.isdisjoint(folder.split("/")):
            checked_path(folder)  # raises
        self._refuse_links(folder, set())
        return folder

    def _refuse_links(self, path: str, folders: set[str]) -> None:
        """Raise ``LinkError`` if the path is, or contains, a link that is not followed, or is not a regular file.

        ``folders``: those that were checked before, which are not checked again; those of the path are added.
        """
        here = self._real_root
        for segment in path.split("/"):
            here = f"{here}/{segment}"
            if here in folders:
                continue
            try:
                mode = os.lstat(here).st_mode
            except (OSError, ValueError):
                return  # missing or not accessible: the read or write itself reports it
            if S_ISLNK(mode):
                if not self._leads_to_a_file_inside(here):
                    raise api.LinkError(self._about_link(here))
            elif S_ISDIR(mode):
                folders.add(here)
            elif not S_ISREG(mode):
                raise api.LinkError(
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

    def _walk(self, folder: str) -> Iterator[api.ObjectMeta]:
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
            with os.scandir(os.path.join(self._real_root, folder)) as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as exc:
            raise translate(exc, path=folder or self._root, action="list") from exc

    def _is_unfollowed_link(self, entry: os.DirEntry[str]) -> bool:
        return entry.is_symlink() and not self._leads_to_a_file_inside(entry.path)

    def _meta(self, path: str, entry: os.DirEntry[str]) -> api.ObjectMeta | None:
        """Metadata as obstore returns it; of the link itself if it is not followed; None if the file is gone."""
        if _UPLOAD.search(entry.name):
            return None
        try:
            state = entry.stat(follow_symlinks=entry.is_symlink() and self._leads_to_a_file_inside(entry.path))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise translate(exc, path=path, action="list") from exc
        if S_ISDIR(state.st_mode):
            return None
        micros = state.st_mtime_ns // 1000
        tag = f"{state.st_ino:x}-{micros:x}-{state.st_size:x}"
        return api.ObjectMeta(path, state.st_size, _EPOCH + timedelta(microseconds=micros), tag)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


class LockedFolder(LocalObjectStore):
    """The files below one local folder. ``compare_and_swap`` compares the hash of the content, under a lock file."""

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """The content and its hash. Raises ``ObjectNotFoundError``."""
        data = self.get(path)
        return data, _hash(data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """See the interface; the file is synced, since a synced manifest will refer to it."""
        created = super().put_if_absent(path, data)
        if created:
            with self._translated(path):
                _sync(os.path.join(self._real_root, path))
        return created

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """Replace the file if its content still has that hash; False if it has another one, or is absent.

        Killed anywhere: the file has either the old or the new content, and the lock is free. Raises ``BusyError``:
        another process still has the lock after the wait (:func:`swaps_wait`).
        """
        self._checked(path)
        with self._translated(path), self._lock_file():
            try:
                current = self.get(path)
            except errors.ObjectNotFoundError:
                return False
            if _hash(current) != e_tag:
                return False
            target = os.path.join(self._real_root, path)
            with open(target + _TEMPORARY, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(target + _TEMPORARY, target)
            _sync(os.path.dirname(target))
            return True

    @contextmanager
    def _lock_file(self) -> Iterator[None]:
        lock = os.path.join(self._real_root, LOCK_PATH)
        os.makedirs(os.path.dirname(lock), exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        wait = _wait.get()
        try:
            holder = lock_within(handle, wait)
            if holder is not None:
                raise errors.BusyError(
                    f"Process {holder} is writing to {self._root}, and did not end that within {wait:g} s.",
                    remedy=f"If process {holder} is suspended, continue it (kill -CONT {holder}) or end it, then run "
                    "this again. What was published before stays.",
                )
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate(error, path=path, action="write") from error
