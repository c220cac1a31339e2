"""The layout ``region`` of the specification: WAL entries are Lance files, and generations refer to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.encoded_rows import lance_bytes, lance_rows
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.wire.lance_file import check_lance_file
from memwal_ops.formats.lance.wire.names import WRITER_EPOCH
from memwal_ops.formats.lance.wire.snapshot_rows import region_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.formats.lance.wire.snapshot_rows import Row
    from memwal_ops.storage.api import Store

# Enough for the column metadata of most files; more costs another request.
_TAIL_BYTES = 32 << 10
_EMPTY_VERSION = "2.0"


class RegionLayout(Layout):
    """The layout of the specification."""

    name = "region"
    title = "region layout"
    wal_suffix = "lance"
    claims_with_entry = False
    generations_in_log = True
    unlisted_index_is_caught_up = True

    def writer_epoch(self, store: Store, path: str) -> bytes | None:
        """The writer epoch from the footer of the Lance file; two requests for most."""
        meta = store.head(path)
        if meta is None:
            raise ObjectNotFoundError(f"WAL entry {path} does not exist.")
        tail = store.get_range(path, max(0, meta.size - _TAIL_BYTES), _TAIL_BYTES)
        schema = check_lance_file(tail, meta.size) or check_lance_file(store.get(path), meta.size)
        return None if schema is None else schema.metadata.get(WRITER_EPOCH)

    def entry_rows(self, store: Store, path: str) -> int:
        """Rows of the Lance file."""
        return int(self.entry_table(store, path).num_rows)

    def entry_table(self, store: Store, path: str) -> pa.Table:
        """The Lance file."""
        return lance_rows(store.get(path), f"WAL entry {path}")

    def emptied_entry(self, store: Store, path: str) -> bytes:
        """A file with the same columns and metadata, in which is the writer epoch, and no rows."""
        data = store.get(path)
        rows, found = lance_rows(data, f"WAL entry {path}"), check_lance_file(data, len(data))
        metadata = {} if found is None else dict(found.metadata)
        return lance_bytes(rows.slice(0, 0).replace_schema_metadata(metadata), _EMPTY_VERSION, f"WAL entry {path}")

    def empty_entry(self, schema: pa.Schema, writer_epoch: int, path: str) -> bytes:
        """A file with these columns."""
        rows = schema.with_metadata({WRITER_EPOCH: str(writer_epoch)}).empty_table()
        return lance_bytes(rows, _EMPTY_VERSION, f"WAL entry {path}")

    def snapshot_rows(
        self,
        regions: Mapping[UUID, RegionManifest | Row],
        states: Mapping[UUID, Sequence[int | None]],
        specs: Sequence[memwal_pb2.RegionSpec],
    ) -> pa.Table:
        """Rows that contain the complete manifests (S0-106 to S0-109)."""
        del states
        return region_rows([*regions.values()], specs)


REGION = RegionLayout()
