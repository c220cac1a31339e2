"""The format of a copy on an object store: parts of the folder's files, and a manifest that is written last.

The manifest, ``snapshot.lmd``, is one line of JSON and the XXH3-64 of that line. Parts are named by the run that wrote
them. So the parts of killed runs never belong to a copy, and are deletable once there is a manifest.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from memwal_ops.core.guard import CommitGuard, GuardedTable, Unguarded
from memwal_ops.core.registry import formats, job_specs
from memwal_ops.errors import ObjectNotFoundError, TableNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lm_diskann.errors import COPY_AGAIN, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import NAME
from memwal_ops.formats.lm_diskann.wire.names import COPY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import Blocked, TableFormat, TableSummary
    from memwal_ops.errors import MemwalOpsError
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
class Manifest:
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


def read_manifest(store: Store) -> Manifest | None:
    """The manifest; None if there is no complete copy.

    Raises:
        TableCorruptError: it is damaged.
        UnsupportedFeatureError: it is of a later release.
    """
    try:
        line, _, end = store.get(COPY).partition(b"\n")
    except ObjectNotFoundError:
        return None
    if end != digest(line).encode() + b"\n":
        raise IndexCorruptError(f"{COPY} in {store.root} is damaged: bad checksum.", remedy=COPY_AGAIN)
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise IndexCorruptError(f"{COPY} in {store.root} is not JSON: {error}.", remedy=COPY_AGAIN) from error
    if document.pop("release") != _RELEASE:
        raise UnsupportedFeatureError(f"{store.root} is a copy of a later release of the format.")
    files = tuple(File(one["path"], one["size"], tuple(one["digests"])) for one in document.pop("files"))
    for file in files:
        if _FILE.fullmatch(file.path) is None:
            raise IndexCorruptError(
                f"{COPY} in {store.root} names {file.path!r}, which is not a file of an index.", remedy=COPY_AGAIN
            )
    return Manifest(**document, files=files)


def read_parts(store: Store, manifest: Manifest, file: File) -> Iterator[bytes]:
    """The parts of a file, checked.

    Raises:
        TableCorruptError: one is missing or damaged.
    """
    read = 0
    for number, wanted in enumerate(file.digests):
        path = part_path(manifest.run, file.path, number)
        try:
            data = store.get(path)
        except ObjectNotFoundError:
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
    manifest: Manifest
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

    def why_not(self, job: str) -> MemwalOpsError | None:
        """A copy is not an index folder."""
        del job
        return UnsupportedFeatureError(
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
        raise TableNotFoundError(f"No copy found at {location.uri}: it has no {COPY}.")
    return Copy(location, store, manifest)
