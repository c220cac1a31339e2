"""Read version manifests by number, of the table or of a dataset below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.wire.names import NamingScheme, version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

VERSIONS_FOLDER = "_versions"
BRANCHES_FOLDER = "tree"
TRANSACTIONS_FOLDER = "_transactions"


def version_path(version: int, naming: NamingScheme, *, folder: str = "") -> str:
    """Path of a version's manifest, relative to the table's root."""
    return "/".join(filter(None, (folder, VERSIONS_FOLDER, version_manifest_name(version, naming))))


def read_version_manifest(
    store: Store, version: int, naming: NamingScheme | None = None, *, folder: str = ""
) -> VersionManifest:
    """Read one version's manifest; without ``naming`` both schemes are tried, the common one first.

    Raises:
        InvalidFormatError: it does not decode.
        ObjectNotFoundError: it does not exist.
    """
    if naming is not None:
        path = version_path(version, naming, folder=folder)
        try:
            return decode_version_manifest(store.get(path))
        except InvalidFormatError as error:
            raise InvalidFormatError(f"{path} is not a version manifest: {error}") from error
    try:
        return read_version_manifest(store, version, NamingScheme.V2, folder=folder)
    except ObjectNotFoundError:
        return read_version_manifest(store, version, NamingScheme.V1, folder=folder)
