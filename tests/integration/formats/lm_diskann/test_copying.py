"""A copy of an index folder that is made while it is written to has the rows of one epoch."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import copying
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_rows, check_sound


def test_a_copy_beside_writers(folder: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_diskann.create(folder, dimension=16, R=8, L=40)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1200), vectors[:1200])
        index.delete(np.arange(100))
        index.insert(np.arange(2000, 2030), vectors[2000:2030])
    rows = {row: vectors[row] for row in [*range(100, 1200), *range(2000, 2030)]}
    plain, wrote = copying._copy_file, threading.Event()

    def beside(source: str, target: str, length: int | None = None) -> str:
        if source.endswith("graph.lmd"):
            for _ in range(3):
                with lm_diskann.open(folder, wait=5) as index:  # the lock is released
                    index.insert(np.arange(200, 260), vectors[3000:3060])
                    index.merge()
            wrote.set()
        return plain(source, target, length)

    monkeypatch.setattr(copying, "_copy_file", beside)
    copy = f"{folder}.copy"
    epoch = lm_diskann.snapshot(folder, copy)
    assert wrote.is_set()
    assert View(copy).epoch == epoch
    check_rows(copy, rows)
    check_sound(copy)
    with lm_diskann.open(copy) as index:
        index.insert([1], vectors[:1])
        assert index.search(vectors[:1], k=1)[0].tolist() == [[1]]
    check_sound(folder)
    with pytest.raises(InvalidUsageError, match="exists already"):
        copying.snapshot(folder, copy)


def test_a_copy_that_fails_leaves_nothing(folder: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_diskann.create(folder, dimension=16)

    def full(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(copying, "_copy_file", full)
    with pytest.raises(ZeroDivisionError):
        copying.snapshot(folder, f"{folder}.copy")
    assert [name for name in os.listdir(os.path.dirname(folder)) if "copy" in name] == []
