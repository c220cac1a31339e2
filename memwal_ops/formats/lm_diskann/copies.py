"""Write a copy of an index folder, as a local folder or as objects of a store. It exists when it is complete.

A local copy is made in ``DEST.snapshot.new``, which is locked meanwhile, and then renamed. A copy on a store consists
of parts of the folder's files, and of a manifest, ``snapshot.lmd``, which is written last and only if there is none:
one line of JSON and the XXH3-64 of that line. Parts are named by the run that wrote them. So the parts of killed runs
never belong to a copy, and the next run deletes them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import xxhash

from memwal_ops import errors
from memwal_ops.core.anchors import Anchor, CommitGuard, GuardedTable, Unguarded, delete_proven
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.formats.lm_diskann.errors import COPY, COPY_AGAIN, IndexBusyError, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import (
    GRAPH,
    METADATA,
    READERS,
    VIEW,
    WRITER,
    Step,
    io_error,
    read_parameters,
    sync_folder,
)
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Blocked, TableFormat, TableSummary
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


PARTS = "parts"
PART_BYTES = 32 << 20
_RELEASE = 1
_FILE = re.compile(
    "|".join([*map(re.escape, (METADATA, FOLLOW, GRAPH, NAME)), r"view/(CURRENT|[0-9]{16}\.(base|log))"])
)
_OWN = re.compile(rf"{PARTS}/[0-9a-f]{{32}}/.*|_mem_wal_ops/.*")


@dataclass(frozen=True)
class File:
    """A file of the folder: its bytes (``size``), and the XXH3-64 of each of its parts."""

    path: str
    size: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class CopyManifest:
    """The files of a copy. ``run`` is the name of the run that wrote its parts."""

    uuid: str
    epoch: int
    rows: int
    run: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """The stored form."""
        line = json.dumps({"release": _RELEASE, **asdict(self)}).encode()
        return b"%b\n%b\n" % (line, digest(line).encode())


def digest(data: bytes) -> str:
    """XXH3-64, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def part_path(run: str, path: str, number: int) -> str:
    """The object of a part of a file."""
    return f"{PARTS}/{run}/{path}/{number:08d}"


def is_own(path: str) -> bool:
    """Whether an object is a part of a copy, or a lease or probe of memwal-ops."""
    return _OWN.fullmatch(path) is not None


def read_manifest(store: Store) -> CopyManifest | None:
    """The manifest; None if there is no complete copy. Raises ``TableCorruptError``, ``UnsupportedFeatureError``."""
    try:
        line, _, end = store.get(COPY).partition(b"\n")
    except errors.ObjectNotFoundError:
        return None
    if end != digest(line).encode() + b"\n":
        raise IndexCorruptError(f"{COPY} in {store.root} is damaged: bad checksum.", remedy=COPY_AGAIN)
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise IndexCorruptError(f"{COPY} in {store.root} is not JSON: {error}.", remedy=COPY_AGAIN) from error
    if document.pop("release") != _RELEASE:
        raise errors.UnsupportedFeatureError(f"{store.root} is a copy of a later release of the format.")
    files = tuple(File(entry["path"], entry["size"], tuple(entry["digests"])) for entry in document.pop("files"))
    for file in files:
        if _FILE.fullmatch(file.path) is None:
            raise IndexCorruptError(
                f"{COPY} in {store.root} names {file.path!r}, which is not a file of an index.", remedy=COPY_AGAIN
            )
    return CopyManifest(**document, files=files)


def read_parts(store: Store, manifest: CopyManifest, file: File) -> Iterator[bytes]:
    """The parts of a file, checked. Raises ``TableCorruptError``: one is missing or damaged."""
    read = 0
    for number, wanted in enumerate(file.digests):
        path = part_path(manifest.run, file.path, number)
        try:
            data = store.get(path)
        except errors.ObjectNotFoundError:
            raise IndexCorruptError(f"{path} in {store.root} is missing.", remedy=COPY_AGAIN) from None
        if digest(data) != wanted:
            raise IndexCorruptError(f"{path} in {store.root} is damaged: bad checksum.", remedy=COPY_AGAIN)
        read += len(data)
        yield data
    if read != file.size:
        raise IndexCorruptError(f"{file.path} in {store.root} has {read} bytes, not {file.size}.", remedy=COPY_AGAIN)


@dataclass(frozen=True)
class Copy(GuardedTable):
    """A copy on a store, opened as a table: ``snapshot`` restores it to a local folder."""

    location: Location
    store: Store
    manifest: CopyManifest
    guard: CommitGuard = field(default_factory=Unguarded)
    blocked: tuple[Blocked, ...] = ()

    @property
    def format(self) -> TableFormat:
        """The format of index folders."""
        return formats()["lm_diskann"]

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """Only ``snapshot``."""
        return {"snapshot": job_specs("lm_diskann")["snapshot"]}

    def why_not(self, job: str) -> errors.MemwalOpsError | None:
        """A copy is not an index folder."""
        if job in self.jobs:
            return None
        return errors.UnsupportedFeatureError(
            f"{self.location.uri} is a copy of an index folder, which cannot be used in place.",
            remedy=f"Restore it: memwal-ops snapshot {self.location.uri} FOLDER.",
        )

    @property
    def revision(self) -> int:
        """The epoch of the copy."""
        return self.manifest.epoch

    def has_revision(self, revision: int) -> bool:
        """Whether it is the epoch of the copy."""
        return revision == self.revision

    def newest(self) -> Copy:
        """Itself: a copy does not change."""
        return self

    def summary(self) -> TableSummary:
        """See :meth:`memwal_ops.core.protocols.TableFormat.summarize`."""
        return self.format.summarize(self)

    def step(self, name: str, act: Callable[[], Any]) -> Any:
        """Perform a durable step, if the guard allows it. Raises ``LeaseLostError``."""
        del name
        self.guard.check()
        return act()


def load_copy(location: Location, store: Store) -> Copy:
    """Open a copy. Raises as :func:`read_manifest`, and ``TableNotFoundError`` if there is none."""
    manifest = read_manifest(store)
    if manifest is None:
        raise errors.TableNotFoundError(f"No copy found at {location.uri}: it has no {COPY}.")
    return Copy(location, store, manifest)


_FILES = {METADATA, FOLLOW, GRAPH, NAME, LOG, f"{NAME}.tmp", WRITER, VIEW, READERS}
_ELSEWHERE = "Choose another destination; nothing was changed there."


class Identity(NamedTuple):
    """The index and the epoch that a copy has."""

    uuid: str
    epoch: int


def destination_of(uri: str, options: Mapping[str, str], step: Step) -> Destination:
    """The destination at a local path or a URI. Raises ``InvalidUsageError``: the URI or an option is invalid."""
    location = resolve(uri, options)
    if location.scheme == "file":
        return LocalFolder(location.uri, step)
    return ObjectPrefix(location.uri, open_store(location), step)


class LocalFolder:
    """A destination that can be used as an index. As a context manager, it removes an incomplete copy.

    ``staging`` is the folder for all files but the graph, while it is entered.
    """

    def __init__(self, path: str, step: Step) -> None:
        self.uri, self.staging, self._step, self._lock = path, f"{path}.snapshot.new", step, -1

    def existing(self) -> Identity | None:
        """The existing copy. Raises ``InvalidUsageError`` if there are other files."""
        if not os.path.lexists(self.uri) or (os.path.isdir(self.uri) and not os.listdir(self.uri)):
            return None
        try:
            parameters = read_parameters(self.uri)
            view = View(self.uri, parameters)
        except errors.StorageError:
            raise
        except (errors.MemwalOpsError, NotADirectoryError):
            raise errors.InvalidUsageError(
                f"{self.uri} exists already, and is not a copy of the index.", remedy=_ELSEWHERE
            ) from None
        view.close()
        return Identity(str(parameters.uuid), view.epoch)

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file of the copy."""
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
        """Make the copy visible, with the files in ``staging`` and those that were written; returns its bytes."""
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
                raise errors.InvalidUsageError(f"{self.uri} was created meanwhile.", remedy=_ELSEWHERE) from error
            raise io_error(error) from error
        return size

    def clean(self) -> None:
        """Do nothing: a complete local copy has no other files beside it."""

    def __enter__(self) -> Self:
        """Begin: files of a killed run are removed. Raises ``IndexBusyError``, ``InvalidUsageError``."""
        try:
            os.makedirs(self.staging, exist_ok=True)
            self._lock = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that had it locked has renamed it: it is a complete copy.
            if not os.path.samestat(os.fstat(self._lock), os.stat(self.staging)):
                raise BlockingIOError
            if not {*os.listdir(self.staging)} <= _FILES:
                raise errors.InvalidUsageError(f"{self.staging} has files that are not of a copy.", remedy=_ELSEWHERE)
            for name in os.listdir(self.staging):
                path = os.path.join(self.staging, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        except BaseException as error:
            self._unlock()
            if isinstance(error, BlockingIOError | FileNotFoundError):
                raise IndexBusyError(f"Another snapshot to {self.uri} is running.") from None
            if isinstance(error, OSError):
                raise io_error(error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


class ObjectPrefix:
    """As :class:`LocalFolder`, of objects below a prefix of a store, which the module describes."""

    def __init__(self, uri: str, store: Store, step: Step) -> None:
        self.uri, self._store, self._step, self._run = uri, store, step, uuid.uuid4().hex
        self.staging, self._files, self._written, self._decided = "", list[File](), list[str](), False

    def existing(self) -> Identity | None:
        """See :class:`LocalFolder`."""
        manifest = read_manifest(self._store)
        if manifest is not None:
            return Identity(manifest.uuid, manifest.epoch)
        other = next((meta.path for meta in self._store.list("") if not is_own(meta.path)), None)
        if other is not None:
            raise errors.InvalidUsageError(f"{self.uri} has {other!r}, which is not part of a copy.", remedy=_ELSEWHERE)
        return None

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """See :class:`LocalFolder`."""
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
        """See :class:`LocalFolder`. Raises ``InvalidUsageError``: another run published first."""
        for path in _paths(self.staging):
            self.write(path, _chunks(os.path.join(self.staging, path)))
        manifest = CopyManifest(identity.uuid, identity.epoch, rows, self._run, tuple(self._files))
        data = manifest.encode()
        self._decided = True  # from here on, the parts may be those of a complete copy
        done = self._step("publish the copy", lambda: self._store.put_if_absent(COPY, data))
        if not done and self._store.get(COPY) != data:
            self._decided = False
            raise errors.InvalidUsageError(
                f"Another snapshot to {self.uri} was completed meanwhile.", remedy=_ELSEWHERE
            )
        self.clean()
        return manifest.size

    def clean(self) -> None:
        """Remove the parts of other runs: since there is a manifest, none of them can become a copy.

        Raises ``TableReplacedError``: the manifest was replaced; nothing was removed.
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
        shutil.rmtree(self.staging, ignore_errors=True)
        if isinstance(error, Exception) and not self._decided:
            with suppress(errors.StorageError):
                self._store.delete_many(self._written)


Destination = LocalFolder | ObjectPrefix


def _paths(folder: str) -> list[str]:
    paths = [os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names]
    return sorted(path for path in paths if path != WRITER)


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(PART_BYTES):
            yield data
