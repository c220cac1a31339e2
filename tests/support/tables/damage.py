"""Ways in which tables break. Each function damages one local table in place: give it a copy.

Nothing here is undone again; `copy_table` first.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import uuid
from pathlib import Path

import lance
import pyarrow as pa
from lance import LanceOperation
from lance.dataset import Index

from tests.support.tables import wire
from tests.support.tables.files import Files

_PROGRESS = 9  # MemWalIndexDetails.merged_generations
_BASE_PATHS, _BASE_PATH_TEXT = 18, 4  # Manifest.base_paths, BasePath.path
# prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE); for anybody but root it has no effect, and needs none
_DROP_AND_EXEC = """
import ctypes, os, sys
for right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if ctypes.CDLL(None).prctl(24, right, 0, 0, 0) and os.geteuid() == 0:
        sys.exit("cannot drop the right to override permissions")
os.execvp(sys.argv[1], sys.argv[1:])
"""


def copy_table(source: str, target: str) -> str:
    """A copy that stands alone: generations of the region layout point into the copy's own `wal/`."""
    shutil.copytree(source, target)
    old, new = os.path.abspath(source).encode(), os.path.abspath(target).encode()
    for path in Path(target).glob("_mem_wal/*/*_gen_*/_versions/*.manifest"):
        manifest = wire.parse_manifest(path.read_bytes())
        fields = []
        for field in manifest.fields:
            if field.number == _BASE_PATHS and isinstance(field.value, bytes):
                base = [
                    wire.Field(f.number, f.value.replace(old, new, 1))
                    if f.number == _BASE_PATH_TEXT and isinstance(f.value, bytes)
                    else f
                    for f in wire.decode(field.value)
                ]
                field = wire.Field(field.number, wire.encode(base))
            fields.append(field)
        moved = wire.ManifestFile(fields, manifest.index, manifest.transaction, manifest.tail)
        path.write_bytes(wire.build_manifest(moved))
    return target


# -- region manifests


def region_manifest_path(uri: str, region: str, version: int | None = None) -> Path:
    """File of one manifest version, the newest by default."""
    if version is None:
        version = wire.region_manifest(Files(uri), region).version
    return Path(uri, "_mem_wal", region, "manifest", f"{wire.bit_reversed(version)}.binpb")


def truncate_region_manifest(uri: str, region: str, *, keep: int | None = None) -> Path:
    """Cut the newest version short: to half, or to `keep` bytes."""
    path = region_manifest_path(uri, region)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if keep is None else keep])
    return path


def flip_region_manifest(uri: str, region: str) -> Path:
    """Invert every byte of the newest version; its length stays."""
    path = region_manifest_path(uri, region)
    path.write_bytes(bytes(b ^ 0xFF for b in path.read_bytes()))
    return path


def remove_region_manifest_version(uri: str, region: str, version: int) -> Path:
    """A gap, where `version` is neither the first nor the newest."""
    path = region_manifest_path(uri, region, version)
    path.unlink()
    return path


# -- generations


def generation_path(uri: str, region: str, generation: int) -> Path:
    """Folder of one generation, as the newest region manifest names it."""
    name = wire.region_manifest(Files(uri), region).generations[generation]
    return Path(uri, "_mem_wal", region, name)


def remove_generation(uri: str, region: str, generation: int) -> Path:
    """The folder is gone, the region manifest still lists it."""
    path = generation_path(uri, region, generation)
    shutil.rmtree(path)
    return path


def truncate_generation_manifest(uri: str, region: str, generation: int) -> Path:
    """The generation's newest version manifest is cut to half."""
    folder = generation_path(uri, region, generation)
    path = folder / wire.newest_manifest(Files(str(folder)))[0]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def remove_generation_data(uri: str, region: str, generation: int) -> Path:
    """The first data file is gone: below the generation (shard layout) or in `wal/` (region layout)."""
    folder = generation_path(uri, region, generation)
    data = lance.dataset(str(folder)).get_fragments()[0].metadata.files[0]
    path = folder / "data" / data.path if data.base_id is None else folder.parent / "wal" / data.path
    path.unlink()
    return path


# -- the base table


def set_progress(uri: str, generation: int, *, region: bytes | None = None) -> None:
    """Set the progress of the first region that has one, or give one to a further region, in the newest version."""
    name, manifest = wire.newest_manifest(Files(uri))
    details = wire.decode(wire.mem_wal_details(manifest))
    first = next(field for field in details if field.number == _PROGRESS)
    entry = [wire.Field(2, generation) if field.number == 2 else field for field in wire.decode(first.value)]
    if region is not None:
        entry = [wire.Field(1, wire.encode([wire.Field(1, region)])), wire.Field(2, generation)]
    others = [field for field in details if region is not None or field is not first]
    changed = wire.encode([*others, wire.Field(_PROGRESS, wire.encode(entry))])
    Path(uri, name).write_bytes(wire.build_manifest(wire.with_details(manifest, changed)))


def set_feature_flag(uri: str, bit: int = 40, *, reader: bool = True, writer: bool = True) -> None:
    """Set a feature flag that no release knows in the newest version manifest, in place."""
    files = Files(uri)
    path, manifest = wire.newest_manifest(files)
    for number, wanted in ((9, reader), (10, writer)):
        if wanted:
            flags = int(wire.get(manifest.fields, number))
            manifest = manifest.replaced(**{f"f{number}": flags | 1 << bit})
    Path(uri, path).write_bytes(wire.build_manifest(manifest))


def put_empty_details(uri: str) -> None:
    """Add a MemWAL index without any setting: what pylance itself refuses on a table without a primary key."""
    dataset = lance.dataset(uri)
    added = _index(str(uuid.uuid4()), dataset.version, wire.DETAILS_URL, b"")
    lance.LanceDataset.commit(uri, LanceOperation.CreateIndex([added], []), read_version=dataset.version)


def put_legacy_details(uri: str) -> None:
    """Replace (or add) the MemWAL index by one of Lance 0.31 to 1.x: details begin with byte 0x0A.

    One OPEN generation 0 in region "r": MemWal { id { region, generation }, mem_table_location,
    wal_location, wal_entries (empty range), state OPEN, owner_id, last_updated_dataset_version }.
    """
    dataset = lance.dataset(uri)
    mem_wal_id = wire.encode([(1, b"r"), (2, 0)])
    entries = b"\x0a\x00"  # U64Segment: an empty range
    mem_wal = wire.encode([(1, mem_wal_id), (2, b"memory://r/0"), (3, b"wal/r/0"), (4, entries), (6, b"owner"), (7, 1)])
    details = wire.encode([(1, mem_wal)])
    assert details[0] == 0x0A
    if wire.mem_wal_entry(wire.newest_manifest(Files(uri))[1]) is not None:
        dataset.drop_index(wire.MEM_WAL_INDEX)
        dataset = lance.dataset(uri)
    added = _index(str(uuid.uuid4()), dataset.version, wire.DETAILS_URL, details)
    lance.LanceDataset.commit(uri, LanceOperation.CreateIndex([added], []), read_version=dataset.version)


def _index(index_uuid: str, version: int, url: str, details: bytes) -> Index:
    return Index(
        uuid=index_uuid, name=wire.MEM_WAL_INDEX, fields=[], dataset_version=version,
        fragment_ids=set(), index_version=0, index_details=(url, details),
    )  # fmt: skip


def mix_manifest_names(uri: str) -> Path:
    """Rename the oldest V2-named manifest to its V1 name, so that both schemes stand in one folder."""
    files = Files(uri)
    names = wire.manifest_names(files)
    if len(names) < 2:
        raise ValueError("needs a table with two versions")
    version = min(names)
    path = Path(uri, "_versions", f"{version}.manifest")
    Path(uri, names[version]).rename(path)
    return path


def make_v1_named_table(uri: str, rows: pa.Table) -> lance.LanceDataset:
    """A table whose manifests are named `{version}.manifest`, the scheme of old releases."""
    return lance.write_dataset(rows, uri, enable_v2_manifest_paths=False)


# -- the store


def make_read_only(uri: str) -> None:
    """Take the write permission from every file and folder of the table.

    Root is not held by permissions: start the program under test as a child process, by the command
    that `held_by_permissions` gives. Undo with `make_writable`, or the folder cannot be cleaned up.
    """
    _change_mode(uri, lambda mode: mode & ~0o222)


def make_writable(uri: str) -> None:
    """Undo `make_read_only`."""
    _change_mode(uri, lambda mode: mode | stat.S_IWUSR)


def _change_mode(uri: str, change) -> None:  # type: ignore[no-untyped-def]
    for folder, _, names in os.walk(uri):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            os.chmod(path, change(os.stat(path).st_mode))


def held_by_permissions(command: list[str]) -> list[str]:
    """The command to run instead, so that file permissions also hold a child of root.

    Linux only: the right to override them leaves the bounding set, and with the exec the process.
    """
    return [sys.executable, "-c", _DROP_AND_EXEC, *command]
