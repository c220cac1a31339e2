"""The tasks of a pass whose newest rows the driver has found: delete superseded rows, and write the newest ones.

Their inputs are positions, masks and keys, their results the written files; no rows are transferred. Like those of
:mod:`.tasks`, they may run twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.spark.faults import reported
from memwal_ops.formats.lance.engines.merge.locate import count_deleted, matching_rows, replaced_ids, scan_keys
from memwal_ops.formats.lance.engines.spark.tasks import TASK_BYTES, Pass, write_masked
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS
from memwal_ops.formats.lance.files.encoded_rows import stream_bytes
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from pyspark import Broadcast

    ItemTask = Callable[[Iterable[Any]], Iterator[dict[str, Any]]]

_CHUNK_BYTES = TASK_BYTES // 16


@dataclass(frozen=True, slots=True)
class Group:
    """The rows that one task writes.

    Attributes:
        ordinals: of its generations.
        masks: for each of them, which of its live rows are written; one bit for each.
        row_ids: with stable row ids, for each of them the id of the base row that each row replaces, or -1.
    """

    ordinals: Sequence[int]
    masks: Sequence[npt.NDArray[np.uint8]]
    row_ids: Sequence[npt.NDArray[np.int64]] | None


def to_bytes(keys: pa.Table) -> bytes:
    """Encode keys for sending them to executors.

    Not pickled: the result of a grouping has many chunks, each a slice of one buffer, and is pickled with all of
    it for each chunk. 1,800,000 numbers took 794 MB.
    """
    return stream_bytes(keys.combine_chunks())


def group_writer(work: Pass) -> ItemTask:
    """A task from a :class:`Group` to new fragments."""

    def write_groups(groups: Iterable[Group]) -> Iterator[dict[str, Any]]:
        with reported():
            for group in groups:
                rows = [work.generations[one].live_rows for one in group.ordinals]
                masks = [
                    np.unpackbits(mask, count=count).view(np.bool_)
                    for mask, count in zip(group.masks, rows, strict=True)
                ]
                row_ids = None if group.row_ids is None else np.concatenate(group.row_ids)
                yield {"fragments": write_masked(work, group.ordinals, masks, row_ids)}

    return write_groups


def address_deleter(work: Pass) -> ItemTask:
    """A task from addresses of superseded base rows (ascending, uint64) to deletion vectors."""

    def write_deletion_vectors(parts: Iterable[npt.NDArray[np.uint64]]) -> Iterator[dict[str, Any]]:
        with reported():
            for addresses in parts:
                yield work.without(addresses)

    return write_deletion_vectors


def key_scanner(work: Pass, sought: Broadcast[tuple[bytes, npt.NDArray[np.bool_]]]) -> ItemTask:
    """A task from ids of base fragments to deletion vectors that hide the rows that have one of the ``sought`` keys.

    Args:
        sought: the keys of winners, of :func:`to_bytes`, and which of them are tombstones.
    """

    def scan_and_delete(parts: Iterable[Sequence[int]]) -> Iterator[dict[str, Any]]:
        with reported():
            content, is_tombstone = sought.value
            keys = pa.ipc.open_stream(content).read_all()
            base = work.base()
            for ids in parts:
                with lance_errors("read the keys of", work.location.uri):
                    found = [fragment for one in ids if (fragment := base.get_fragment(one)) is not None]
                    assert len(found) == len(ids)  # noqa: S101 - the driver saw them in the same version
                    scanned = scan_keys(base, work.primary_key, _CHUNK_BYTES, stable=work.stable, fragments=found)
                    hits = matching_rows(scanned, keys, _CHUNK_BYTES)
                if hits is None:
                    continue
                result = work.without(np.sort(hits.column(ROW_ADDRESS).to_numpy()))
                result["deleted"] = count_deleted(hits, keys, is_tombstone)
                if work.stable:
                    result["replacing"], result["row_ids"] = replaced_ids(hits, keys)
                yield result

    return scan_and_delete
