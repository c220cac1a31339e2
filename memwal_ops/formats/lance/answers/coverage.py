"""Compare the rows that an index claims to cover with the rows that its files hold.

See :mod:`memwal_ops.formats.lance.indexes.held_rows` for what is read of the files.

Estimate what asking the indexes of a table costs, before they are asked: only the rows to ask for are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal_ops.core.answers import IndexAnswers
from memwal_ops.core.verification import AnswersOptions, AnswersPlan
from memwal_ops.formats.lance.answers.ask import Pinned
from memwal_ops.formats.lance.answers.check import chosen_indexes, not_described
from memwal_ops.formats.lance.answers.sample import sample_queries
from memwal_ops.formats.lance.answers.vector import MULTIVECTOR_QUERIES, metric_of
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import covered_by
from memwal_ops.formats.lance.indexes.held_rows import LISTED, MAPPED, fragments_held, row_ids_in
from memwal_ops.formats.lance.indexes.index_faults import FRAGMENTS_IN, fragments_in
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, fragments_of, had_moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.answers.ask import AskedIndex
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


_MAX_ROWS = 8 << 20
_LOOKED_AT = 256
_TEXTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Coverage:
    """What files of an index lack.

    Attributes:
        fragments: fragments that the index claims, and of which its files have no row.
        rows: addresses of rows (up to 256 random ones) that it claims and has to hold, and that its files lack.
        lacking: how many rows its files lack, null values included.
        bytes_at_most: an upper bound of what was read.
        unread: why the files were not compared; empty: they were.
    """

    fragments: Sequence[int] = ()
    rows: Sequence[int] = ()
    lacking: int = 0
    bytes_at_most: int = 0
    unread: str = ""


def coverage_bytes(pinned: Pinned, index: AskedIndex, max_bytes: int) -> int:
    """An upper bound of what :func:`coverage_of` reads with the same arguments."""
    if index.type in FRAGMENTS_IN or (index.type in MAPPED and index.size <= max_bytes):
        return index.size
    if index.type not in LISTED and not index.is_vector:
        return 0
    cost = 8 * sum(pinned.physical(one) for one in index.covered if pinned.live.get(one))
    return cost if cost <= max_bytes else 0


def coverage_of(
    table: Table,
    pinned: Pinned,
    index: AskedIndex,
    base: BaseIndex,
    usable: Callable[[pa.ChunkedArray], NDArray[np.bool_]],
    max_bytes: int,
) -> Coverage:
    """Compare one index.

    Args:
        base: the same in the manifest.
        usable: for values whether an index of this type has to hold them.
        max_bytes: about how much may be read.

    Raises:
        StorageError: a file of the index cannot be read.
    """
    claimed = sorted(one for one in index.covered if pinned.live.get(one))
    rows = sum(pinned.live[one] for one in claimed)
    if had_moves(table.manifest):
        return Coverage(unread="a compaction left it to readers to find the rows that it moved")
    stable = bool(table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS)
    cost = 8 * sum(pinned.physical(one) for one in claimed)
    if index.type in FRAGMENTS_IN or (index.type in MAPPED and not stable and index.size <= max_bytes):
        read = fragments_in if index.type in FRAGMENTS_IN else fragments_held
        return Coverage(
            tuple(sorted(one for entry in base.segments for one in _not_held(pinned, entry, read(table, base, entry)))),
            bytes_at_most=index.size,
        )
    if index.type not in LISTED and not index.is_vector:
        return Coverage(unread=f"files of {index.type} have no list of rows")
    if rows > _MAX_ROWS or cost > max_bytes:
        return Coverage(unread=f"it has {rows:,} rows, more than the budget lets be read")
    version = max((int(entry.index_version) for entry in base.segments), default=0)
    by_address = not stable or (index.type == "BTree" and version > 0)
    with lance_errors("read row ids of", pinned.uri):
        live = pinned.dataset.scanner(
            columns=[],
            fragments=[pinned.fragments[one] for one in claimed],
            with_row_address=True,
            with_row_id=True,
            use_scalar_index=False,
        ).to_table()
    addresses = live[ROW_ADDRESS].to_numpy()
    ids = addresses if by_address else live[ROW_ID].to_numpy()
    lacking = np.sort(addresses[_lacking(table, base, addresses, ids, by_segment=not stable)])
    if not lacking.size:
        return Coverage(bytes_at_most=cost)
    text = index.type == "Inverted"
    chosen = np.sort(np.random.default_rng(table.version).permutation(lacking)[: _TEXTS if text else _LOOKED_AT])
    values = _values(pinned, index, chosen)
    needed = chosen[usable(values)]
    if text and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        # An analyzer leaves nothing of many rows that are alike: stop words, signs. One of each is enough.
        _, first = np.unique(values.combine_chunks().dictionary_encode().indices.fill_null(-1), return_index=True)
        needed = np.intersect1d(needed, chosen[first])[:_LOOKED_AT]
    gone = [one for one in _fragment_ids(needed) if (fragments_of(lacking) == one).sum() == pinned.live[one]]
    return Coverage(tuple(gone), tuple(int(one) for one in needed), int(lacking.size), cost)


def _lacking(
    table: Table, index: BaseIndex, addresses: NDArray[np.uint64], ids: NDArray[np.uint64], *, by_segment: bool
) -> NDArray[np.bool_]:
    """Which rows the files lack: each segment those that it claims; with stable row ids, all together.

    (An update moves rows with stable ids to fragments that it adds to what any segment claims.)
    """
    if not by_segment:
        parts = [one for entry in index.segments for one in row_ids_in(table, index, entry)]
        return ~np.isin(ids, np.concatenate([np.empty(0, np.uint64), *parts]))
    lacking = np.zeros(len(ids), bool)
    for entry in index.segments:
        held = np.concatenate([np.empty(0, np.uint64), *row_ids_in(table, index, entry)])
        claimed = np.isin(fragments_of(addresses), np.array(sorted(covered_by([entry])), np.int64))
        lacking |= claimed & ~np.isin(ids, held)
    return lacking


def _not_held(pinned: Pinned, entry: table_pb2.IndexMetadata, held: frozenset[int]) -> frozenset[int]:
    return frozenset(one for one in covered_by([entry]) - held if pinned.live.get(one))


def _fragment_ids(addresses: NDArray[np.uint64]) -> list[int]:
    return [int(one) for one in np.unique(fragments_of(addresses))]


def _values(pinned: Pinned, index: AskedIndex, addresses: NDArray[np.uint64]) -> pa.ChunkedArray:
    """The values of rows, in order of their addresses, which is that of the dataset's fragments."""
    positions: list[int] = []
    for fragment in _fragment_ids(addresses):
        with lance_errors("read rows of", pinned.uri):
            live = pinned.dataset.scanner(
                columns=[], fragments=[pinned.fragments[fragment]], with_row_address=True, use_scalar_index=False
            ).to_table()[ROW_ADDRESS]
        inside = addresses[fragments_of(addresses) == fragment]
        positions += (pinned.starts[fragment] + np.searchsorted(live.to_numpy(), inside)).tolist()
    return pinned.take(sorted(positions), index)[index.column]


if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.verification import VerifyOptions, VerifyReport
    from memwal_ops.formats.lance.answers.ask import AskedIndex
    from memwal_ops.formats.lance.table import Table

    Verify = Callable[[Table, VerifyOptions, RunContext | None], VerifyReport]


def or_plan(verify: Verify) -> Callable[..., VerifyReport | AnswersPlan]:
    """A job that verifies a table by ``verify``, or, with ``dry_run``, estimates what asking its indexes costs."""

    def verified_or_planned(
        table: Table, options: VerifyOptions, context: RunContext | None = None
    ) -> VerifyReport | AnswersPlan:
        if isinstance(options, AnswersOptions) and options.dry_run:
            return plan_answers(table, options)
        return verify(table, options, context)

    return verified_or_planned


def plan_answers(table: Table, options: AnswersOptions) -> AnswersPlan:
    """What :func:`memwal_ops.formats.lance.answers.check.check_answers` would ask and read with the same options.

    Raises:
        InvalidUsageError: there is no index of a name that was given.
        StorageError: the drawn rows cannot be read.
    """
    pinned = Pinned(table.dataset, table.location.uri)
    names = chosen_indexes(table, options)
    left, seed = options.max_bytes, options.seed_at(table.version)
    planned = []
    for number, name in enumerate(names):
        index = pinned.indexes.get(name)
        if index is None:
            planned.append(not_described(table, name))
            continue
        one = _planned(pinned, index, options.samples, seed, left // (len(names) - number))
        left = max(0, left - one.bytes_at_most)
        planned.append(one)
    return AnswersPlan(table.version, planned, options.max_bytes)


def _planned(pinned: Pinned, index: AskedIndex, samples: int, seed: int, max_bytes: int) -> IndexAnswers:
    held = coverage_bytes(pinned, index, max_bytes // 4)
    drawn = sample_queries(pinned, index, samples, seed, max_bytes - held)
    queries, cost = len(drawn.queries), drawn.bytes_at_most
    if index.is_vector and drawn.rows is not None:
        queries = drawn.rows.num_rows
        if pa.types.is_list(index.arrow):
            queries = min(queries, MULTIVECTOR_QUERIES)
            cost *= queries
        elif metric_of(pinned, index) == "dot":  # its codes are compared, too
            cost += cost + index.size
    skipped = drawn.skipped
    if not skipped and index.is_vector and not drawn.fragments:
        skipped = "no fragment fits into --max-bytes"
    return IndexAnswers(index=index.name, type=index.type, queries=queries, bytes_at_most=cost + held, skipped=skipped)
