"""Indexes that claim fragments of which their files have nothing, as compactions of older releases leave them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lance
from google.protobuf import any_pb2

from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.version_manifest import (
    VersionManifest,
    decode_version_manifest,
    encode_fragment_bitmap,
    encode_version_manifest,
)


def compact_and_leave(uri: str, *names: str, release: str = "13.0.0") -> None:
    """Compact, and let these indexes claim all fragments with the files that they had before, as a release did it.

    pylance 12 and 13 do so with a B-tree of version 1, 7 to 12 with zone maps and bloom filters; each of a table with
    stable row ids.
    """
    before = {one.name: one for one in entries(newest(uri))}
    assert lance.dataset(uri).optimize.compact_files().fragments_removed
    manifest = newest(uri)
    bitmap = encode_fragment_bitmap(frozenset(one.id for one in manifest.manifest.fragments))
    kept = [one for one in entries(manifest) if one.name not in names]
    for name in names:
        before[name].fragment_bitmap = bitmap
    section = table_pb2.IndexSection(indices=[*kept, *(before[name] for name in names)])
    _store(uri, replace(manifest, indexes=section), release)


def written_by(uri: str, release: str) -> None:
    """Let the newest version be one that this release of Lance wrote."""
    _store(uri, newest(uri), release)


def with_index_version(uri: str, name: str, version: int) -> None:
    """Give the entry of an index another version; its files stay as they are."""
    changed = entries(newest(uri))
    next(one for one in changed if one.name == name).index_version = version
    manifest = newest(uri)
    _store(uri, replace(manifest, indexes=table_pb2.IndexSection(indices=changed)), lance.__version__)


def with_details_named(uri: str, name: str, url: str) -> None:
    """Give an index details of another type, without a value, as another release names them."""
    changed = entries(newest(uri))
    next(one for one in changed if one.name == name).index_details.CopyFrom(any_pb2.Any(type_url=url))
    _store(uri, replace(newest(uri), indexes=table_pb2.IndexSection(indices=changed)), lance.__version__)


def newest(uri: str) -> VersionManifest:
    """The newest version's manifest."""
    return decode_version_manifest(_path(uri).read_bytes())


def entries(manifest: VersionManifest) -> list[table_pb2.IndexMetadata]:
    """The entries of a version's indexes."""
    return [] if manifest.indexes is None else [*manifest.indexes.indices]


def index_versions(uri: str) -> dict[str, int]:
    """The version of each index, by name."""
    return {one.name: int(one.index_version) for one in entries(newest(uri))}


def _store(uri: str, manifest: VersionManifest, release: str) -> None:
    changed = table_pb2.Manifest()
    changed.CopyFrom(manifest.manifest)
    changed.writer_version.version = release
    _path(uri).write_bytes(encode_version_manifest(replace(manifest, manifest=changed)))


def _path(uri: str) -> Path:
    return Path(uri, version_path(lance.dataset(uri).version, NamingScheme.V2))
