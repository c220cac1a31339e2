"""Find the files of an index segment, and open one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from lance.file import LanceFileReader

from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import lance_options
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.named_files import absolute_base
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.locations import Location

# In pylance's error.
_FIRST_FORMAT = "read v1 metadata"
CREATE_AGAIN = (
    "Create it again yourself: dataset.drop_index(NAME), then dataset.create_index(..., name=NAME). With replace=True, "
    "pylance may keep a part of the old one, and nobody could read the index. Where there is a log, create one under "
    "another name instead: then memwal-ops catchup URI --migrate-codebook OLD NEW."
)


def index_folder(table: Table, entry: table_pb2.IndexMetadata) -> str:
    """The URI of the files of an index segment."""
    name = f"{INDICES_FOLDER}/{UUID(bytes=entry.uuid.uuid)}"
    if not entry.HasField("base_id"):
        return f"{table.location.folder}/{name}"
    for base in table.manifest.manifest.base_paths:
        if base.id == entry.base_id:
            folder = absolute_base(table.location.folder, base.path.rstrip("/"))
            return f"{folder}/{name if base.is_dataset_root else name.rsplit('/', 1)[-1]}"
    raise UnsupportedFeatureError(f"Index {entry.name} is in base {entry.base_id}, which the table does not define.")


def open_index_file(location: Location, path: str, columns: list[str] | None = None) -> LanceFileReader:
    """Open a file of an index of the table at a location.

    Args:
        path: its URI.
        columns: those that are read; None: all.

    Raises:
        UnsupportedFeatureError: it is of Lance's first format, which pylance reads in queries alone.
        StorageError: it cannot be read.
    """
    try:
        with lance_errors("read index", path):
            return LanceFileReader(path, storage_options=lance_options(location), columns=columns)
    except StorageError as error:
        if _FIRST_FORMAT not in str(error):
            raise
        raise UnsupportedFeatureError(
            f"{path} is of Lance's first format, as releases up to 0.20 wrote indexes.", remedy=CREATE_AGAIN
        ) from error
