"""Read the log of a legacy MemWAL: the hook, and its implementation for logs of Lance and Arrow files.

The specification leaves the storage of entries to the implementer (S1-014). A hook is a function ``read(store,
entries)``:

* ``store`` is the log's root as an object store (:class:`memwal_ops.storage.api.Store`);
* ``entries`` are the ids that belong to the log (:class:`~memwal_ops.formats.lance.wire.legacy_index.U64Segment`).
  Anything else there is not part of it: a writer that lost a conflict put it, and got an error (S1-016);
* it yields the rows of each entry as a ``pyarrow.Table``, in the order of the ids;
* it raises :class:`memwal_ops.errors.ObjectNotFoundError` for an entry that is missing, and
  :class:`memwal_ops.errors.InvalidFormatError` for one that cannot be read. It never leaves one out.

``--wal-reader package.module:read`` names one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, ObjectNotFoundError
from memwal_ops.formats.lance.files.blobs import ALIGNED, lance_rows
from memwal_ops.formats.lance.wire.names import parse_bit_reversed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.formats.lance.wire.legacy_index import U64Segment
    from memwal_ops.storage.api import Store

    WalReader = Callable[[Store, U64Segment], Iterator[pa.Table]]

SUFFIXES = ("lance", "arrow")
_BITS = 64
_FILE_MAGIC = b"ARROW1"


def read_files(store: Store, entries: U64Segment) -> Iterator[pa.Table]:
    """The rows of entries that are files ``{id}.lance`` or ``{id}.arrow`` directly at the root.

    The id is decimal, with leading zeros or without, or 64 binary digits with the lowest bit first. An Arrow file is a
    stream or a file of Arrow's IPC format.

    Raises:
        ObjectNotFoundError: an entry has no file.
        InvalidFormatError: a file cannot be read, or two files have one id.
    """
    if not entries.count:
        return
    paths: dict[int, str] = {}
    for meta in store.list():
        entry_id = entry_of(meta.path)
        if entry_id is None or entry_id not in entries:
            continue
        if entry_id in paths:
            raise InvalidFormatError(f"WAL entry {entry_id} has two files: {paths[entry_id]} and {meta.path}.")
        paths[entry_id] = meta.path
    for entry_id in entries:
        if entry_id not in paths:
            raise ObjectNotFoundError(f"WAL entry {entry_id} has no file at {store.root}.")
        yield entry_rows(store.get(paths[entry_id]), paths[entry_id])


def entry_of(path: str) -> int | None:
    """The id of the entry whose file that is; None for any other file."""
    stem, dot, suffix = path.rpartition(".")
    if not dot or suffix not in SUFFIXES or not (stem.isascii() and stem.isdigit()):
        return None
    number = parse_bit_reversed(stem) if len(stem) == _BITS else int(stem)
    return number if number is not None and number < 1 << _BITS else None


def wal_reader(name: str | None) -> WalReader:
    """The hook that ``--wal-reader`` names; by default :func:`read_files`.

    Raises ``InvalidUsageError``: it cannot be imported.
    """
    if name is None:
        return read_files
    module, _, attribute = name.partition(":")
    try:
        reader = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidUsageError(
            f"--wal-reader {name} cannot be imported: {error}", remedy="Give package.module:function."
        ) from error
    return cast("WalReader", reader)


def entry_rows(data: bytes, path: str) -> pa.Table:
    """The rows in a file of a log. Raises ``InvalidFormatError`` if it cannot be read."""
    if path.endswith(".lance"):
        return lance_rows(data, f"WAL entry {path}").replace_schema_metadata(None)
    try:
        opened = pa.ipc.open_file if data.startswith(_FILE_MAGIC) else pa.ipc.open_stream
        with opened(pa.py_buffer(data), options=ALIGNED) as reader:
            return reader.read_all().replace_schema_metadata(None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidFormatError(f"WAL entry {path} is no readable Arrow file: {error}") from error
