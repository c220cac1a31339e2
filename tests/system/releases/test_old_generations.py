"""Generations that older releases of pylance really wrote, merged by today's (see make.py)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.layouts import SHARD

ARCHIVES = sorted(Path(__file__).parent.glob("written-by-*.tar.gz"))


def test_the_archives_are_there() -> None:
    assert len(ARCHIVES) == 4


@pytest.mark.req("S0-192")
@pytest.mark.parametrize("slices", [1, None], ids=["one-by-one", "at-once"])
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_merged_as_they_were_written(tmp_path: Path, archive: Path, slices: int | None) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    uri = str(tmp_path / "t.lance")
    expected = {int(key): row for key, row in json.loads((tmp_path / "t.lance.json").read_text()).items()}
    table = open_table(uri)
    assert table.layout is SHARD
    report = merge.apply(table, merge.MergeOptions(max_generations=slices))
    assert report.decision == "merged"
    rows = lance.dataset(uri).to_table().to_pylist()
    assert len(rows) == len(expected)
    assert {row["id"]: {"b": row["b"], "c": row["c"]} for row in rows} == expected
