"""verify --answers --dry-run tells what --answers then asks and reads; --answers-only checks nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.answers.asked_index import Pinned
from tests.support.run_cli import contents, run_here
from tests.support.tables.answering import SCALARS, VECTORS, make_scalars, make_vectors

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 4_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["scalars", *VECTORS, "dot"])
@pytest.mark.parametrize("max_bytes", [1 << 20, 256 << 20])
def test_a_run_asks_and_reads_no_more_than_was_told(tmp_path: Path, kind: str, max_bytes: int) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(11)
    if kind == "scalars":
        make_scalars(uri, random, COUNT)
    else:
        make_vectors(uri, random, COUNT, *(("IVF_PQ", "dot") if kind == "dot" else (kind,)))
    before = contents(uri)
    plan = run_job(uri, "verify", answers=True, dry_run=True, max_bytes=max_bytes).to_json()
    assert contents(uri) == before
    assert plan["decision"] == "dry_run"
    assert plan["max_bytes"] == max_bytes
    told = {one["index"]: one for one in plan["answers"]}
    if kind == "scalars":
        assert told.keys() == {*SCALARS, "by_phrase"}
    done = run_job(uri, "verify", answers_only=True, max_bytes=max_bytes)
    assert [one.index for one in done.answers] == [*told]
    for one in done.answers:
        assert one.bytes_at_most <= told[one.index]["bytes_at_most"], one
        if one.type != "Inverted":  # asked about more, where rows seem to be missing: an analyzer may drop words
            assert one.queries <= told[one.index]["queries"], one
        assert one.skipped or told[one.index]["queries"], "what is asked was announced"


@pytest.mark.parametrize("alone", [True, False])
def test_the_only_index_of_a_column_is_planned_once(
    tmp_path: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query of one of several is planned: pylance may answer by another one."""
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(pa.table({"id": range(COUNT)}), uri)
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    if not alone:
        dataset.create_scalar_index("id", "BITMAP", name="by_bits")
    planned, explain = [], lance.LanceScanner.explain_plan
    monkeypatch.setattr(
        lance.LanceScanner, "explain_plan", lambda scanner, **how: planned.append(1) or explain(scanner, **how)
    )
    (asked,) = run_job(uri, "verify", answers_only=True, index=["by_id"]).answers
    told = run_job(uri, "verify", answers=True, dry_run=True, index=["by_id"]).to_json()["answers"][0]["queries"]
    assert told > 4
    assert (len(planned), asked.queries) == (1, told) if alone else len(planned) >= told


def test_what_a_guard_finds_is_the_share_that_escapes_one_time_in_a_hundred(tmp_path: Path) -> None:
    """Of random sets of so many wrong rows: it compares all rows under a small new segment, and some of a large one."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(COUNT)})
    lance.write_dataset(rows.slice(0, 3_000), uri).create_scalar_index("id", "BTREE", name="by_id")
    lance.write_dataset(rows.slice(3_000), uri, mode="append")
    (index,) = run_job(uri, "catchup").indexes
    finds = index.answers.finds
    random = np.random.default_rng(5)
    escaped = [bool((random.random(1_000) >= finds).all()) for _ in range(20_000)]
    assert 0.005 < np.mean(escaped) < 0.02


def test_a_guard_reads_what_the_run_changed(tmp_path: Path) -> None:
    """Not the rows under segments that stay as they are."""
    uri = str(tmp_path / "t.lance")
    rows = pa.table({"id": range(COUNT)})
    lance.write_dataset(rows.slice(0, COUNT - 40), uri).create_scalar_index("id", "BTREE", name="by_id")
    lance.write_dataset(rows.slice(COUNT - 40), uri, mode="append")
    (index,) = run_job(uri, "catchup").indexes
    assert [len(part.fragments) for part in Pinned(lance.dataset(uri), uri).indexes["by_id"].segments] == [1, 1]
    assert 1 - (1 - index.answers.finds) ** 40 == pytest.approx(0.99, abs=0.001)


@pytest.mark.long
def test_only_the_indexes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What no reader of the newest version needs is not looked at; with --deep all is checked."""
    uri = str(tmp_path / "t.lance")
    make_scalars(uri, np.random.default_rng(3), COUNT)
    for tag in (tmp_path / "t.lance/_refs/tags", tmp_path / "t.lance/_transactions"):
        tag.mkdir(parents=True, exist_ok=True)
    lance.dataset(uri).tags.create("kept", 1)
    (tmp_path / "t.lance/_refs/tags/kept.json").write_text("{")
    alone = run_job(uri, "verify", answers_only=True)
    assert (alone.decision, dict(alone.checked)) == ("healthy", {})
    assert len(alone.answers) > 5
    assert run_job(uri, "verify", answers_only=True, answers=True).decision == "healthy"
    assert run_job(uri, "verify", answers_only=True, deep=True).decision == "findings"
    shown = run_here(capfd, "verify", uri, "--answers-only", "--index", "by_number")
    assert (shown.code, "only indexes were asked;" in shown.out) == (0, True)
    refused = run_here(capfd, "verify", uri, "--dry-run")
    assert (refused.code, "--answers asks them" in refused.err) == (2, True)
    with pytest.raises(InvalidUsageError, match="no index 'nobody'"):
        run_job(uri, "verify", index=["nobody"], dry_run=True)
