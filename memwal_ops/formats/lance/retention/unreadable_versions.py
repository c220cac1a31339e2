"""Find listed versions that cannot be read, because files to which they refer are missing or damaged.

A clean-up that deletes data before manifests leaves such versions if it is killed or refused, as does manual
deletion of files. Sizes are compared with those that are recorded; deletion files, of which none is, are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.named_files import Place, Places, files_of
from memwal_ops.formats.lance.files.referenced_files import missing_files, references
from memwal_ops.formats.lance.files.versions import decode_named, version_path
from memwal_ops.formats.lance.retention.newest_files import newest_damage
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import check_writable
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from memwal_ops.formats.lance.files.named_files import Damage, NamedFile
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta

_CONCURRENT_READS = 16
_MANIFEST_BYTES = 32 << 20
_FILES = 1000
_VERSIONS = 1000


@dataclass(slots=True)
class VersionsCheck:
    """The result of checking the versions of main.

    Attributes:
        listed: the number of versions.
        checked: how many of them were checked, the oldest first; this includes the newest, which is open.
        unreadable: one missing or damaged file for each unreadable version.
        newest: a damaged file of the newest version, which is not among these.
    """

    listed: int
    checked: int = 1
    unreadable: dict[int, str] = field(default_factory=dict)
    newest: Damage | None = None

    def to_json(self, *, limit: int = 100) -> dict[str, object]:
        """The ``versions`` entry of ``inspect --json``."""
        entries = [{"version": version, "missing": path} for version, path in sorted(self.unreadable.items())]
        return {
            "listed": self.listed,
            "checked": self.checked,
            "unreadable": entries[:limit],
            "damaged": None if self.newest is None else self.newest.path,
        }


def missing_of_version(table: Table, version: int) -> str | None:
    """A missing or damaged file to which the version refers; None if there is none, or no such version.

    One request for each file that the version does not share with ``table``'s. Of ``table``'s own, a listing of the
    folders of its files; an index does not count.

    Raises:
        TableCorruptError: the version's manifest does not decode.
    """
    if version == table.version:
        damage = newest_damage(table)
        return None if damage is None or damage.folder == INDICES_FOLDER else damage.path
    path = version_path(version, table.naming)
    try:
        found = decode_named(path, table.store.get(path))
        check_writable(found.manifest)
        return missing_of_manifest(table, found, besides=_needed_files(table, table.manifest))
    except ObjectNotFoundError:
        return None
    except InvalidFormatError as error:
        raise TableCorruptError(f"{path} cannot be read: {error}") from error


def missing_of_manifest(table: Table, version: VersionManifest, besides: Collection[str] = ()) -> str | None:
    """A missing or damaged file that a version of the table needs, but for ``besides``. One request for each file.

    Raises:
        InvalidFormatError: the manifest contradicts itself.
    """
    needed = _needed_files(table, version)
    return min(_unreadable(table, {key: file for key, file in needed.items() if key not in besides}), default=None)


def check_versions(table: Table, first: Collection[int] = ()) -> VersionsCheck:
    """Check the versions for missing and damaged files: these first, then the oldest, as a clean-up begins there.

    Bounded: it ends after 1,000 versions, 32 MiB of manifests, or 1,000 files that are not of the first ones; one
    request for each. A manifest that does not decode is counted as unreadable by its own path.
    """
    manifests = {version: meta for version, meta in table.history.listed().items() if version < table.version}
    check = VersionsCheck(len(manifests) + 1, newest=_damage(table))
    newest = _needed_files(table, table.manifest).keys()
    is_unreadable: dict[str, bool] = {}
    oldest = sorted(manifests.items(), key=lambda listed: (listed[0] not in first, listed[0]))[:_VERSIONS]
    sizes = accumulate(meta.size for _, meta in oldest)
    bounded = [one for one, size in zip(oldest, sizes, strict=True) if size <= _MANIFEST_BYTES]
    read = partial(_listed_files, table)
    for (version, meta), found in concurrently(read, bounded, threads=_CONCURRENT_READS):
        if found is None:
            check.unreadable[version] = meta.path
            check.checked += 1
            continue
        older = found.keys() - newest
        fresh = {key: found[key] for key in older - is_unreadable.keys()}
        if version not in first and len(is_unreadable) + len(fresh) > _FILES:
            break
        lost = _unreadable(table, fresh)
        is_unreadable |= {key: key in lost for key in fresh}
        if gone := [key for key in older if is_unreadable[key]]:
            check.unreadable[version] = min(gone)
        check.checked += 1
    # The files of a version that was expired meanwhile are not missing but deleted.
    for version in [*check.unreadable]:
        if table.store.head(manifests[version].path) is None:
            del check.unreadable[version]
    return check


def _damage(table: Table) -> Damage | None:
    """A damaged file of the newest version; None: there is none, or it was expired since."""
    try:
        found = newest_damage(table)
    except NotExportedError:
        return None
    return None if found is None or table.store.head(version_path(table.version, table.naming)) is None else found


def _listed_files(table: Table, listed: tuple[int, ObjectMeta]) -> Mapping[str, NamedFile | None] | None:
    """The files of a listed version, none if it was expired meanwhile; None if its manifest does not decode."""
    try:
        version = table.history.manifest(listed[1])
        check_writable(version.manifest)
        return _needed_files(table, version)
    except ObjectNotFoundError:
        return {}
    except (InvalidFormatError, TableCorruptError):
        return None


def _needed_files(table: Table, version: VersionManifest) -> Mapping[str, NamedFile | None]:
    """The files without which a version is not readable, by name; None: the folder of an index of the table.

    Raises:
        InvalidFormatError: its manifest contradicts itself.
    """
    manifest = version.manifest
    folders = dict.fromkeys(key for key in references(version).own if key.startswith(f"{INDICES_FOLDER}/"))
    try:
        files = [*Places(table.location, table.store, manifest).data_files(manifest)]
    except NotExportedError:
        own = Place(table.store, "")
        files = [*files_of(manifest, lambda entry: None if entry.HasField("base_id") else own)]
    return folders | {str(file): file for file in files}


def _unreadable(table: Table, files: Mapping[str, NamedFile | None]) -> frozenset[str]:
    gone = missing_files(table.store, [key for key, file in files.items() if file is None])
    unread = [file for key, file in files.items() if file is not None and key not in table.sound]
    checked = concurrently(_is_readable, unread, threads=_CONCURRENT_READS)
    return frozenset([*gone, *(str(file) for file, readable in checked if not readable)])


def _is_readable(file: NamedFile) -> bool:
    try:
        if file.of is not None:
            return file.damage(0) is None
        meta = file.place.store.head(file.path)
    except ObjectNotFoundError:
        return False
    except LinkError:
        return True
    return meta is not None and file.size in {0, meta.size}
