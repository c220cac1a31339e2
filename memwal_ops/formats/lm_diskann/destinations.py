"""Write a copy of an index folder: as a local folder, or as objects of a store. It exists when it is complete.

A local copy is made in ``DEST.snapshot.new``, which is locked meanwhile, and then renamed. A copy on a store has a
manifest, written last and only if there is none. The files of a killed run are removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from memwal_ops.core.anchors import Anchor, delete_proven
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, StorageError
from memwal_ops.formats.lm_diskann.copies import (
    PART_BYTES,
    PARTS,
    File,
    Manifest,
    digest,
    is_own,
    part_path,
    read_manifest,
)
from memwal_ops.formats.lm_diskann.errors import IndexBusyError
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA, VIEW, io_error, sync_folder
from memwal_ops.formats.lm_diskann.folders import read_parameters
from memwal_ops.formats.lm_diskann.locks import READERS, WRITER
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.formats.lm_diskann.wire.names import COPY
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.storage.api import Store

_FILES = {METADATA, FOLLOW, GRAPH, NAME, LOG, f"{NAME}.tmp", WRITER, VIEW, READERS}
_ELSEWHERE = "Choose another destination; nothing was changed there."


class Identity(NamedTuple):
    """The index and the epoch that a copy has."""

    uuid: str
    epoch: int


class Destination(Protocol):
    """The destination of a copy. As a context manager, it removes an incomplete copy."""

    uri: str
    staging: str
    """A local folder, for all files but the graph; while the destination is entered."""

    def existing(self) -> Identity | None:
        """The existing copy. Raises ``InvalidUsageError`` if there are other files."""

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file of the copy."""

    def publish(self, identity: Identity, rows: int) -> int:
        """Make the copy visible, with the files in ``staging`` and those that were written; returns its bytes."""

    def clean(self) -> None:
        """Remove the files that killed runs left beside a complete copy."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""


def destination_of(uri: str, options: Mapping[str, str], step: Step) -> Destination:
    """The destination at a local path or a URI of a store.

    Raises:
        InvalidUsageError: the URI or an option is invalid.
    """
    location = resolve(uri, options)
    if location.scheme == "file":
        return LocalFolder(location.uri, step)
    return Objects(location.uri, open_store(location), step)


class LocalFolder:
    """A folder that can be used as an index."""

    def __init__(self, path: str, step: Step) -> None:
        self.uri, self.staging, self._step, self._lock = path, f"{path}.snapshot.new", step, -1

    def existing(self) -> Identity | None:
        """See the interface."""
        if not os.path.lexists(self.uri) or (os.path.isdir(self.uri) and not os.listdir(self.uri)):
            return None
        try:
            parameters = read_parameters(self.uri)
            view = View(self.uri, parameters)
        except StorageError:
            raise
        except (MemwalOpsError, NotADirectoryError):
            raise InvalidUsageError(
                f"{self.uri} exists already, and is not a copy of the index.", remedy=_ELSEWHERE
            ) from None
        view.close()
        return Identity(str(parameters.uuid), view.epoch)

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """See the interface."""
        target = os.path.join(self.staging, path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise io_error(error) from error

    def publish(self, identity: Identity, rows: int) -> int:
        """See the interface."""
        del identity, rows  # derived from the folder
        try:
            os.makedirs(os.path.join(self.staging, READERS), exist_ok=True)
            with open(os.path.join(self.staging, WRITER), "wb"):
                pass
            sync_folder(os.path.join(self.staging, VIEW))
            sync_folder(self.staging)
            size = sum(os.path.getsize(os.path.join(self.staging, path)) for path in _paths(self.staging))
            # This fails if the folder has files meanwhile.
            self._step("publish the copy", lambda: os.rename(self.staging, self.uri))
            sync_folder(os.path.dirname(self.uri))
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise InvalidUsageError(f"{self.uri} was created meanwhile.", remedy=_ELSEWHERE) from error
            raise io_error(error) from error
        return size

    def clean(self) -> None:
        """Do nothing: a complete local copy has no other files beside it."""

    def __enter__(self) -> Self:
        """Begin, in an empty folder: files of a killed run are removed.

        Raises:
            IndexBusyError: another snapshot to this destination is running.
            InvalidUsageError: the folder has files that are not of an index.
        """
        try:
            os.makedirs(self.staging, exist_ok=True)
            self._lock = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that had it locked has renamed it: it is a complete copy.
            if not os.path.samestat(os.fstat(self._lock), os.stat(self.staging)):
                raise BlockingIOError
            if not {*os.listdir(self.staging)} <= _FILES:
                raise InvalidUsageError(f"{self.staging} has files that are not of a copy.", remedy=_ELSEWHERE)
            for name in os.listdir(self.staging):
                path = os.path.join(self.staging, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        except (BlockingIOError, FileNotFoundError):
            self._unlock()
            raise IndexBusyError(f"Another snapshot to {self.uri} is running.") from None
        except OSError as error:
            self._unlock()
            raise io_error(error) from error
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what is not complete."""
        if kind is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


class Objects:
    """Objects below a prefix of a store; :mod:`memwal_ops.formats.lm_diskann.copies` describes them."""

    def __init__(self, uri: str, store: Store, step: Step) -> None:
        self.uri, self._store, self._step, self._run = uri, store, step, uuid.uuid4().hex
        self.staging, self._files, self._written, self._decided = "", list[File](), list[str](), False

    def existing(self) -> Identity | None:
        """See the interface."""
        manifest = read_manifest(self._store)
        if manifest is not None:
            return Identity(manifest.uuid, manifest.epoch)
        other = next((meta.path for meta in self._store.list("") if not is_own(meta.path)), None)
        if other is not None:
            raise InvalidUsageError(f"{self.uri} has {other!r}, which is not part of a copy.", remedy=_ELSEWHERE)
        return None

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """See the interface."""
        digests, size = [], 0
        for number, data in enumerate(chunks):
            name = part_path(self._run, path, number)
            self._written.append(name)
            # The name is unique to this run: if it exists, the client repeated the request.
            self._step("upload a part", partial(self._store.put_if_absent, name, data))
            digests.append(digest(data))
            size += len(data)
        self._files.append(File(path, size, tuple(digests)))

    def publish(self, identity: Identity, rows: int) -> int:
        """See the interface.

        Raises:
            InvalidUsageError: another run published first.
        """
        for path in _paths(self.staging):
            self.write(path, _chunks(os.path.join(self.staging, path)))
        manifest = Manifest(identity.uuid, identity.epoch, rows, self._run, tuple(self._files))
        data = manifest.encode()
        self._decided = True  # from here on, the parts may be those of a complete copy
        done = self._step("publish the copy", lambda: self._store.put_if_absent(COPY, data))
        if not done and self._store.get(COPY) != data:
            self._decided = False
            raise InvalidUsageError(f"Another snapshot to {self.uri} was completed meanwhile.", remedy=_ELSEWHERE)
        self.clean()
        return manifest.size

    def clean(self) -> None:
        """Remove the parts of other runs: since there is a manifest, none of them can become a copy.

        Raises:
            TableReplacedError: the manifest was replaced; nothing was removed.
        """
        meta, manifest = self._store.head(COPY), read_manifest(self._store)
        if meta is not None and manifest is not None:
            own_prefix = f"{PARTS}/{manifest.run}/"
            others = [part.path for part in self._store.list(PARTS) if not part.path.startswith(own_prefix)]
            if others:
                anchors = (Anchor("The manifest of the copy", meta),)
                self._step("remove the parts of killed runs", lambda: delete_proven(self._store, others, anchors))

    def __enter__(self) -> Self:
        """Begin. Raises ``ConditionalWriteUnsupportedError``: the store cannot publish a manifest."""
        probe_conditional_writes(self._store)
        self.staging = tempfile.mkdtemp(prefix="memwal-ops-snapshot-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what is not complete."""
        shutil.rmtree(self.staging, ignore_errors=True)
        if isinstance(error, Exception) and not self._decided:
            with suppress(StorageError):
                self._store.delete_many(self._written)


def _paths(folder: str) -> list[str]:
    """All files of a staging folder that are part of a copy."""
    found = [os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if path != WRITER)


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(PART_BYTES):
            yield data
