"""Open a version with other entries of one index before it is published, to ask it."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.index_entries import FRAGMENT_REUSE
from memwal_ops.formats.lance.wire.names import DETACHED, detached_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import encode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import lance

    from memwal_ops.formats.lance.commit.publication import CommitNote
    from memwal_ops.formats.lance.table import Table


@contextmanager
def opened_with(
    table: Table, entries: Iterable[table_pb2.IndexMetadata], note: CommitNote
) -> Iterator[lance.LanceDataset]:
    """``table``'s version with these entries as its only index, so that queries are answered by it and no other one.

    Its manifest stands under a detached name, which no reader opens, and is deleted on the way out. If the process is
    killed before, gc finds it by the transaction in it.

    Raises:
        StorageError: the manifest cannot be written or opened.
    """
    transaction = note.transaction(table.version)
    kept = [one for one in table.manifest.index_entries if one.name == FRAGMENT_REUSE]
    section = table_pb2.IndexSection(indices=[*kept, *entries])
    transaction.create_index.new_indices.extend(section.indices)
    manifest = deepcopy(table.manifest.manifest)
    manifest.version = uuid.uuid4().int >> 65 | DETACHED
    manifest.transaction_file = ""
    trial = replace(table.manifest, manifest=manifest, indexes=section, transaction=transaction)
    path = f"{VERSIONS_FOLDER}/{detached_manifest_name(int(manifest.version))}"
    try:
        table.store.put(path, encode_version_manifest(trial))
        with lance_errors("open a version that is not published of", table.location.uri):
            # Of a table with entries in DynamoDB, pylance would record the version there: the newest from then on.
            dataset = open_dataset(table.location.plain, version=int(manifest.version))
        yield dataset
    finally:
        table.discard([path])
