"""What tests ask of a folder: brute force, soundness, and the decoder's view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops import run_job
from memwal_ops.formats.lm_diskann.library import Index
from memwal_ops.formats.lm_diskann.table import create
from tests.support.lm_diskann.decoder import View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray


class Killed(BaseException):
    """The process ends here."""


def killer(last: str) -> Callable[[str, Callable[[], Any]], Any]:
    """Performs durable steps until the one named ``last``, before which the process is killed."""
    dead = False

    def step(name: str, act: Callable[[], Any]) -> Any:
        nonlocal dead
        dead = dead or name == last
        if dead:
            raise Killed
        return act()

    return step


def partly_merged(folder: str, vectors: NDArray[np.float32]) -> None:
    """An index of the rows 0 to 339; those from 300 on are not merged."""
    create(folder, dimension=16, R=8, L=30)
    with Index(folder) as index:
        index.insert(np.arange(300), vectors[:300])
        index.merge()
        index.insert(np.arange(300, 340), vectors[300:340])


def nearest(rows: NDArray[np.int64], vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> Any:
    """The rows that an exact search gives, [m, k]."""
    distances = ((queries[:, None, :].astype(np.float64) - vectors[None]) ** 2).sum(-1)
    return rows[np.argsort(distances, axis=1, kind="stable")[:, :k]]


def recall(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    pairs = zip(found.tolist(), truth.tolist(), strict=True)
    return float(np.mean([len({*one} & {*other}) / len(other) for one, other in pairs]))


def check_sound(folder: str) -> None:
    """By verify, which reads the store, and by the decoder, which does not."""
    report = run_job(folder, "verify")
    assert report.decision == "healthy", report.describe()
    view = View(folder)
    live = view.live_rows()
    assert len(live) == view.live
    for node in view.versions:
        block = view.block(node, view.epoch)
        assert block is not None
        if block["tombstoned"] or block["overflowed"]:
            continue
        for link in block["links"]:
            other = view.block(link, view.epoch)
            assert other is not None
            if not other["tombstoned"] and not other["overflowed"]:
                assert node in other["backlinks"], (node, link)


def check_rows(folder: str, expected: Mapping[int, NDArray[np.float32]], epoch: int | None = None) -> None:
    found = View(folder).live_rows(epoch)
    assert found.keys() == expected.keys()
    assert all(found[row] == tuple(expected[row].tolist()) for row in expected)
