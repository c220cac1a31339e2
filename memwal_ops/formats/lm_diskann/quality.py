"""Check whether the codes in the links of a graph still guide searches to the nearest rows.

A codebook is trained on the rows that there are at that time. If other rows follow, around other centres, their codes
become alike: searches by the codes go astray, and so do the links that inserts choose and prune by them. No link is
missing, so only searches show it; longer candidate lists hide it. And a codebook that was trained on few rows knows
these by heart: as others take their place, the codes get worse, though nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.formats.lm_diskann import codebook
from memwal_ops.formats.lm_diskann.build import TRAIN_AT
from memwal_ops.formats.lm_diskann.healing import around
from memwal_ops.formats.lm_diskann.kernels.distances import mean_error
from memwal_ops.formats.lm_diskann.kernels.reading import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.view import View

K, LONGER = 10, 4
_TRAINED_ON, _TESTED_ON, _SEARCHED = 1024, 256, 128
_FEWEST = 32
_LOST = 0.005
_STALE = 2.0
_WORN, _MATTERS = 0.1, 0.02
_ROUNDING, _ZERO = np.float32(1 + 1e-5), np.float32(1e-6)  # compiled code may add up a distance in another order


def code_error_ratio(view: View) -> float:
    """The error of the codes of the rows since the last build, in multiples of that of the rows before; 0: unknown.

    Of at most 128 rows each, by the published view alone: a poll asks whether ``is_stale`` has to be measured.
    """
    epoch, nodes = view.epoch, view.state.next_node_id
    built = view.built_nodes(epoch)
    if not view.state.codebook_id or min(built, nodes - built) < _SEARCHED:
        return 0.0
    random = np.random.default_rng(epoch)
    errors = []
    for first, last in ((0, built), (built, nodes)):
        chosen = np.setdiff1d(random.integers(first, last, 4 * _SEARCHED), view.dead)
        chosen = random.permutation(chosen)[:_SEARCHED]
        vectors = np.empty((len(chosen), view.parameters.dimension), np.float32)
        count = gather(view.source, view.parameters.layout, chosen, epoch, vectors, np.empty(len(chosen), np.int64))
        if count < _FEWEST:
            return 0.0
        errors.append(mean_error(view.book, vectors[:count]))
    return errors[1] / errors[0] if errors[0] else 0.0


def is_stale(index: Index, store: Store) -> bool:
    """Whether a build of the graph anew, with a codebook trained on the rows of now, finds rows that searches lose.

    Raises:
        TableCorruptError: a block cannot be read.
    """
    if not store.state.codebook_id or store.state.live < TRAIN_AT:
        return False
    random = np.random.default_rng(store.state.epoch)
    wear = wear_of(index.view, store, random)
    if wear.more < _WORN * wear.trained:
        return False
    return _has_outworn(index, store, wear) or _has_drifted(index, store, random)


@dataclass(frozen=True)
class Wear:
    """The error of the codes, and its cause.

    Attributes:
        share: of the rows that came since the last build.
        trained: mean squared error of the codes of the rows before: the codebook was trained on them.
        more: by how much that of all rows is larger.
        rows: vectors of some rows of both kinds.
    """

    share: float
    trained: float
    more: float
    rows: NDArray[np.float32]


def wear_of(view: View, store: Store, random: np.random.Generator) -> Wear:
    """Of at most 256 rows before and since the last build: a few milliseconds."""
    nodes, epochs = store.columns(
        "SELECT node_id, added_epoch FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id"
    )
    [built] = store.columns(  # it added more entry points than any commit since
        "SELECT added_epoch FROM lmd_entry_points WHERE removed_epoch IS NULL "
        "GROUP BY added_epoch ORDER BY count(*) DESC, added_epoch DESC LIMIT 1"
    )
    since = epochs > built[0]
    share, none = float(since.mean()), np.zeros((0, view.parameters.dimension), np.float32)
    if share in {0.0, 1.0}:
        return Wear(share, 1.0 - share, 0.0, none)
    vectors = []
    for which in (~since, since):
        there = nodes[which].astype(np.int64)
        chosen = random.choice(there, min(len(there), _TESTED_ON), replace=False)
        vectors.append(around(view, store, np.sort(chosen), view.epoch).vectors)
    trained, other = (mean_error(view.book, one) for one in vectors)
    return Wear(share, trained, share * (other - trained), np.concatenate(vectors))


def _has_outworn(index: Index, store: Store, wear: Wear) -> bool:
    """Whether a small index lost the advantage of a codebook that knows its rows by heart.

    Codes of other rows, however alike, have up to 1.6 times the error of those on which it was trained, if these are
    few. It matters if that is not small beside the distances that searches compare. With at least a tenth of the rows
    new, a build takes at most about twice the time of the upkeep of these.
    """
    if store.state.live > codebook.SAMPLE or wear.share < _WORN or wear.more <= 0:
        return False
    queries = wear.rows[:: max(1, len(wear.rows) // _SEARCHED)]
    _, distances = index.search(queries, k=K + 1, as_of=index.view.epoch)
    return bool(wear.more > _MATTERS * distances[:, -1].mean())


def _has_drifted(index: Index, store: Store, random: np.random.Generator) -> bool:
    """Whether searches lose rows that longer ones find, and a new codebook would have at most half the error.

    Both are measured on at most 1,280 random rows: about as much work as 640 searches and reading these blocks.
    """
    view = index.view
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    count = min(len(live), _TRAINED_ON + _TESTED_ON)
    chosen = random.choice(live.astype(np.int64), count, replace=False)
    vectors = around(view, store, np.sort(chosen), view.epoch).vectors
    vectors = vectors[random.permutation(count)]
    if _lost(index, vectors[:_SEARCHED]) < _LOST:
        return False
    tested = vectors[-max(1, count // 5) :]
    fresh = codebook.train(index.parameters, vectors[: -len(tested)])
    return bool(mean_error(view.book, tested) > _STALE * mean_error(fresh, tested))


def _lost(index: Index, queries: NDArray[np.float32]) -> float:
    """The share of the nearest rows that a search with the index's own list does not find, but a longer one does.

    All of them, for a row that a search by its own vector does not find.
    """
    view = index.view
    _, short = index.search(queries, k=K, as_of=view.epoch)
    _, longer = index.search(queries, k=K, L=LONGER * index.parameters.search_list, as_of=view.epoch)
    lost = (short > longer[:, -1:] * _ROUNDING) | (short[:, :1] > _ZERO)
    return float(lost.mean())
