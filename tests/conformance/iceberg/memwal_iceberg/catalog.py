"""Read a table from the catalog that its URI names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from memwal_ops.errors import (
    InvalidUsageError,
    ObjectNotFoundError,
    StorageError,
    TableCorruptError,
    TableNotFoundError,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table as IcebergTable


def load(uri: str) -> IcebergTable:
    """The table with its current metadata.

    Raises:
        InvalidUsageError: the URI names no file, or no table in it.
        TableNotFoundError: there is no such catalog, or it has no such table.
        ObjectNotFoundError, TableCorruptError: the table's metadata file is missing, or cannot be read.
        StorageError: the catalog cannot be read.
    """
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import NoSuchTableError, ValidationError
    from sqlalchemy.exc import SQLAlchemyError

    parts = urlsplit(uri)
    path, name = unquote(parts.path), unquote(parts.fragment)
    if parts.netloc or not path or "." not in name:
        raise InvalidUsageError(f"{uri} names no table; write {parts.scheme}:///PATH/catalog.db#NAMESPACE.TABLE.")
    if not os.path.isfile(path):  # SQLite would create it
        raise TableNotFoundError(f"There is no catalog {path}.")
    try:
        # Its tables are not created: a catalog is only read here.
        return SqlCatalog("default", uri=f"sqlite:///{path}", init_catalog_tables="false").load_table(name)
    except NoSuchTableError as error:
        raise TableNotFoundError(f"The catalog {path} has no table {name}.") from error
    except SQLAlchemyError as error:
        raise StorageError(f"The catalog {path} cannot be read: {error}") from error
    except FileNotFoundError as error:
        raise ObjectNotFoundError(f"The metadata file of {name} is missing: {error}") from error
    except (ValidationError, ValueError) as error:
        raise TableCorruptError(f"The metadata file of {name} cannot be read: {error}") from error
