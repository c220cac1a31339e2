"""The layout ``shard`` of pylance 7 and later: WAL entries are Arrow streams, generations have files of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.files.encoded_rows import read_stream
from memwal_ops.formats.lance.layouts.api import Layout
from memwal_ops.formats.lance.wire.arrow_schema import schema_end, schema_metadata
from memwal_ops.formats.lance.wire.names import WRITER_EPOCH
from memwal_ops.formats.lance.wire.snapshot_rows import shard_rows, with_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.formats.lance.wire.snapshot_rows import Row
    from memwal_ops.storage.api import Store

# Enough for a schema of about a hundred columns; a larger one costs a second request.
_SCHEMA_BYTES = 32 << 10


class ShardLayout(Layout):
    """The layout of pylance."""

    name = "shard"
    title = "shard layout"
    wal_suffix = "arrow"
    claims_with_entry = True
    generations_in_log = False
    unlisted_index_is_caught_up = False

    def writer_epoch(self, store: Store, path: str) -> bytes | None:
        """The writer epoch from the schema at the start of the Arrow stream; one request for most."""
        head = store.get_range(path, 0, _SCHEMA_BYTES)
        end = schema_end(head)
        if end > len(head) == _SCHEMA_BYTES:
            head = store.get_range(path, 0, end)
        return schema_metadata(head, WRITER_EPOCH.encode())

    def entry_rows(self, store: Store, path: str) -> int:
        """Rows of the Arrow stream."""
        return int(self.entry_table(store, path).num_rows)

    def entry_table(self, store: Store, path: str) -> pa.Table:
        """The Arrow stream."""
        try:
            return read_stream(store.get(path))
        except pa.ArrowException as error:
            raise InvalidFormatError(f"WAL entry {path} is not an Arrow stream: {error}") from error

    def emptied_entry(self, store: Store, path: str) -> bytes:
        """A stream with the same schema, whose metadata has the writer epoch, and no batch."""
        return _without_batches(self.entry_table(store, path).schema)

    def empty_entry(self, schema: pa.Schema, writer_epoch: int, path: str) -> bytes:
        """A stream without columns, as pylance writes it for a claim."""
        del schema, path
        return _without_batches(pa.schema([], metadata={"fence_sentinel": "true", WRITER_EPOCH: str(writer_epoch)}))

    def snapshot_rows(
        self,
        regions: Mapping[UUID, RegionManifest | Row],
        states: Mapping[UUID, Sequence[int | None]],
        specs: Sequence[memwal_pb2.RegionSpec],
    ) -> pa.Table:
        """Rows with the regions' ids and fields only; their states are in the schema's metadata."""
        return with_states(shard_rows([*regions.values()], specs), states)


def _without_batches(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    return bytes(sink.getvalue())


SHARD = ShardLayout()
