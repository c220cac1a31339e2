"""Copy small generations from an object store to local files, from which pylance reads them without requests.

pylance makes nine requests or more to open a generation of one data file and to read its keys and rows. A copy needs
a listing and one request for each file. Files of a generation never change, so a copy reads like the original.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.files.referenced_files import DATA_FOLDER, file_key, references, version_of_main
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.locations import LOCAL
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.generations.generation_ref import GenerationRef
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

MAX_BYTES = 8 << 20
"""Larger generations are not copied: their bytes need most of pylance's requests anyway."""
_SHARE_OF_BUDGET = 4


@contextmanager
def copies_of(table: Table, max_bytes: int) -> Iterator[GenerationCopies | None]:
    """A temporary folder for copies; None if the table is not in an object store, or without a temporary folder.

    Args:
        max_bytes: memory budget of the work; copies use at most a quarter, as the folder may be in memory.
    """
    if table.location.scheme in LOCAL:
        yield None
        return
    try:
        # Errors of its removal are ignored: they do not affect the result.
        place = tempfile.TemporaryDirectory(prefix="memwal-ops-copies-", ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with place as folder:
        yield GenerationCopies(table, folder, max_bytes // _SHARE_OF_BUDGET)


class GenerationCopies:
    """Copies of generations in a folder. Paths are those below the table's root. Safe in threads.

    Attributes:
        location: the folder.
        store: of the folder.
    """

    def __init__(self, table: Table, folder: str, max_bytes: int) -> None:
        self.location = resolve(folder)
        self.store = open_store(self.location)
        self._table = table
        self._room = max_bytes
        self._lock = Lock()

    def add(self, ref: GenerationRef) -> bool:
        """Copy a generation: a listing, and one request for each file.

        Returns:
            Whether it was copied. It is not if it is large, if not all of its files are in its folder, if it has
            several versions, or if the folder is full; reading the original reports what is missing.
        """
        if (ref.bytes or 0) > MAX_BYTES:
            return False
        listed = {meta.path.removeprefix(f"{ref.folder}/"): meta for meta in self._table.store.list(ref.folder)}
        manifests = [meta for path, meta in listed.items() if version_of_main(path) is not None]
        # In the region layout, the rows are in the log's folder.
        if len(manifests) != 1 or not any(path.startswith(f"{DATA_FOLDER}/") for path in listed):
            return False
        try:
            content = self._table.store.get(manifests[0].path)
            files = _needed(content, listed)
            if files is None or not self._fits(sum(file.size for file in files)):
                return False
            for file in files:
                self._write(file, self._table.store.get(file.path))
            self._write(manifests[0], content)
        except (ObjectNotFoundError, InvalidFormatError, OSError):
            return False
        return True

    def _fits(self, size: int) -> bool:
        with self._lock:
            if size > min(MAX_BYTES, self._room):
                return False
            self._room -= size
            return True

    def _write(self, meta: ObjectMeta, content: bytes) -> None:
        path = Path(self.location.uri, meta.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        moment = nanoseconds(meta.last_modified)
        os.utime(path, ns=(moment, moment))


def _needed(content: bytes, listed: dict[str, ObjectMeta]) -> list[ObjectMeta] | None:
    """The data and deletion files of a version by its manifest; None if some are not in the listing or elsewhere."""
    version = decode_version_manifest(content)
    if version.manifest.base_paths:
        return None
    keys = {key for key in references(version).own if not key.startswith(f"{INDICES_FOLDER}/")}
    files = {path: meta for path, meta in listed.items() if file_key(path) in keys}
    return list(files.values()) if keys <= files.keys() else None
