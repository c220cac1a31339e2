"""Find an index folder, and read its fixed parameters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memwal_ops.errors import NotALanceTableError, TableNotFoundError, UnsupportedFeatureError
from memwal_ops.formats.lm_diskann.errors import COPY_METADATA, IndexCorruptError
from memwal_ops.formats.lm_diskann.files import GRAPH, METADATA, io_error
from memwal_ops.formats.lm_diskann.wire import parameters as wire

if TYPE_CHECKING:
    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters


def local_path(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a folder.

    Raises:
        UnsupportedFeatureError: it is on an object store.
    """
    text = os.fspath(folder)
    if "://" in text and not text.startswith("file://"):
        raise UnsupportedFeatureError(
            f"An LM-DiskANN index cannot be at {text.partition('://')[0]}://...: pages of one file are written in "
            "place and synced, which object stores do not support.",
            remedy="Put the folder on a local disk.",
        )
    return os.path.abspath(os.path.expanduser(text.removeprefix("file://")))


def read_parameters(path: str) -> Parameters:
    """Read the fixed parameters of the index in a folder.

    Raises:
        TableNotFoundError, NotALanceTableError: there is none.
        TableCorruptError, UnsupportedFeatureError: ``metadata.lmd`` cannot be used, or only it is missing.
        StorageError: it cannot be read.
    """
    try:
        with open(os.path.join(path, METADATA), "rb") as file:
            return wire.decode(file.read())
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.exists(os.path.join(path, GRAPH)):
            raise IndexCorruptError(f"{METADATA} in {path} is missing.", remedy=COPY_METADATA) from error
        if os.path.isfile(path) or (os.path.isdir(path) and os.listdir(path)):
            raise NotALanceTableError(f"{path} is not an index folder: it has no {METADATA}.") from error
        raise TableNotFoundError(f"No index found at {path}.") from error
    except OSError as error:
        raise io_error(error) from error
