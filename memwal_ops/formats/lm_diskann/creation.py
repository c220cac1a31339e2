"""Create an empty index folder."""

from __future__ import annotations

import os
import shutil
import uuid
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import publishing
from memwal_ops.formats.lm_diskann.changes import State
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA, io_error, replace_file, sync_folder
from memwal_ops.formats.lm_diskann.folders import local_path
from memwal_ops.formats.lm_diskann.locks import READERS, WRITER
from memwal_ops.formats.lm_diskann.store import NAME, Store
from memwal_ops.formats.lm_diskann.vectors import real, whole
from memwal_ops.formats.lm_diskann.wire import parameters as wire

if TYPE_CHECKING:
    from memwal_ops.formats.lm_diskann.source import Source


def create(
    folder: str | os.PathLike[str],
    *,
    dimension: int,
    metric: str = "l2",
    R: int = 70,  # noqa: N803 - named as in the paper, like L
    alpha: float = 1.2,
    L: int = 100,  # noqa: N803
    quantizer: str = "pq",
    follows: Source | None = None,
) -> None:
    """Create an empty index folder, and its parents. With ``follows``, ``catchup`` inserts the rows of a table.

    Raises:
        InvalidUsageError: a parameter is of another type, or out of bounds; or the folder is not empty.
        StorageError: the disk is full, or failed.
        UnsupportedFeatureError: the folder is remote.
    """
    path = local_path(folder)
    parameters = wire.Parameters(
        whole("dimension", dimension), metric, whole("R", R), real("alpha", alpha), whole("L", L), quantizer,
        uuid.uuid4(),
    )  # fmt: skip
    # Created under a temporary name: a killed run never leaves a partial index under the final name.
    fresh = f"{path}.{parameters.uuid.hex}.new"
    try:
        os.makedirs(os.path.join(fresh, READERS))
        for name in (GRAPH, WRITER):
            with open(os.path.join(fresh, name), "xb") as file:
                os.fsync(file.fileno())
        Store.create(os.path.join(fresh, NAME), parameters.uuid)
        publishing.first_view(fresh, parameters, State(1))
        if follows is not None:
            follows.write(fresh)
        replace_file(fresh, METADATA, [wire.encode(parameters)])
        sync_folder(fresh)
        os.rename(fresh, path)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if os.path.lexists(path):
            raise InvalidUsageError(
                f"{path} exists already, and is not an empty folder.", remedy="Choose another name for the folder."
            ) from error
        raise io_error(error) from error
    sync_folder(os.path.dirname(path) or "/")
