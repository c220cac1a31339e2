"""``read(uri)``: look-ups and searches see each key's newest row, in each place where it can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.errors import GenerationMissingError, InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lance.engines.read import unmerged
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.support.tables import damage
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.tables.lsm_table import LsmTable

WIDTH = 16
REGION = UUID(int=7)
WORDS = ("red", "blue", "green", "stone", "river", "cloud", "paper", "iron")
SCHEMA = pa.schema([
    pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
    pa.field("text", pa.string()),
    pa.field("vector", pa.list_(pa.float32(), WIDTH)),
])  # fmt: skip


def rows(random: np.random.Generator, ids: np.ndarray) -> pa.Table:
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in ids]
    vectors = random.normal(size=(len(ids), WIDTH)).astype(np.float32)
    return pa.table([pa.array(ids), pa.array(texts), pa.array(list(vectors), SCHEMA.field("vector").type)], SCHEMA)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, pa.Table]]:
    """Base rows with indexes, three generations, and a log; and the rows that are live."""
    uri = str(tmp_path_factory.mktemp("made") / "t.lance")
    random = np.random.default_rng(3)
    base = rows(random, np.arange(600))
    dataset = lance.write_dataset(base, uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("text", "INVERTED")
    dataset.create_index("vector", "IVF_FLAT", num_partitions=1, metric="cosine")
    create_mem_wal(uri)
    live = {row["id"]: row for row in base.to_pylist()}
    with RegionWriter(uri, REGION) as writer:
        for number in range(4):
            changed = rows(random, random.choice(700, 60, replace=False))
            writer.put(changed)
            live.update({row["id"]: row for row in changed.to_pylist()})
            gone = random.choice(sorted(live), 15, replace=False)
            writer.delete(pa.table({"id": pa.array(gone)}))
            for one in gone:
                del live[one]
            if number < 3:
                writer.flush()
        yield uri, pa.Table.from_pylist(list(live.values()), SCHEMA)


def by_id(found: pa.Table) -> dict[int, dict[str, object]]:
    assert found.num_rows == len({*found["id"].to_pylist()}), "each key once"
    return {row["id"]: row for row in found.to_pylist()}


@pytest.mark.req("S0-204")
def test_every_key_is_found_where_it_is(made: tuple[str, pa.Table]) -> None:
    uri, live = made
    assert by_id(read(uri).get(range(800))) == by_id(live)
    some = [5, 601, 5, 799]
    assert by_id(read(uri).get(some)) == {key: row for key, row in by_id(live).items() if key in some}
    assert by_id(read(uri).get(pa.table({"id": some}))) == by_id(read(uri).get({"id": some}))
    assert read(uri).get([]).num_rows == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("merge", [False, True])
def test_look_ups_equal_the_model(tmp_path: Path, kind: type[LsmTable], merge: bool) -> None:
    table = kind(11, regions=2, base_rows=50).create(str(tmp_path / "t.lance"))
    for _ in range(4):
        table.step(15)
        table.flush()
    table.close()
    if merge:
        run_job(table.uri, "merge", max_generations=3)
    expected = table.expected()
    found = read(table.uri).scan().to_table()
    keys = found.select(table.model.keys)
    again = read(table.uri).get(keys)
    (key,) = table.model.keys
    assert_same({row[key]: row for row in again.to_pylist()}, {row[key]: row for row in found.to_pylist()})
    assert again.num_rows == len(expected)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *product(("region", "shard"), (pa.uint32(), pa.large_string(), pa.int8(), pa.bool_())),
        ("region", pa.float16()),  # which pylance's writer refuses
    ],
    ids=str,
)
def test_look_ups_of_key_types_that_pylance_does_not_hash(tmp_path: Path, layout: str, kind: pa.DataType) -> None:
    uri, values = str(tmp_path / "t.lance"), pa.array([1, 0]).cast(kind)
    key = pa.field("k", kind, nullable=False, metadata=SCHEMA.field("id").metadata)
    schema = pa.schema([key, pa.field("n", pa.int64()), pa.field("v", pa.list_(pa.float32(), 2))])

    def written(n: int) -> pa.Table:
        return pa.table([values, [n, n], pa.array([[n, 0.0], [n, 0.0]], schema.field("v").type)], schema)

    lance.write_dataset(written(0), uri)
    if layout == "region":
        create_mem_wal(uri)
        with RegionWriter(uri) as writer:
            writer.put(written(1))
    else:
        lance.dataset(uri).initialize_mem_wal()
        with lance.dataset(uri).mem_wal_writer(str(REGION)) as shard:
            shard.put(written(1))
    reader = read(uri)
    assert reader.get(values)["n"].to_pylist() == [1, 1]
    assert reader.nearest("v", [0.0, 0.0], 2)["n"].to_pylist() == [1, 1]
    assert reader.scan().to_table()["n"].to_pylist() == [1, 1]
    run_job(uri, "merge")
    assert lance.dataset(uri).to_table()["n"].to_pylist() == [1, 1]


@pytest.mark.long
@pytest.mark.req("S0-215", "S0-216", "S0-218")
def test_only_generations_that_may_have_a_key_are_opened(made: tuple[str, pa.Table]) -> None:
    uri, live = made
    reader, keys = read(uri), live["id"].to_pylist()[::12]
    found = [reader.find([key]) for key in keys]
    assert all(one.rows.num_rows == 1 for one in found)
    assert sum(one.opened for one in found) <= 1.2 * len(keys), "goal of the look-up: 1.2 generations for a key"
    assert max(one.opened for one in found) == 1, "older generations are not asked for a key that was found"
    assert reader.find([10_000]).opened == 0


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("content", ["half", "of another generation", "empty", "zeros"])
def test_a_filter_that_lacks_keys_is_not_believed(tmp_path: Path, kind: type[LsmTable], content: str) -> None:
    table = kind(4, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for key in range(3):
        table.put([key, key + 20])
        table.flush()
    table.close()
    paths = sorted(Path(table.uri).glob("_mem_wal/*/*_gen_*/bloom_filter.bin"))
    stored = [path.read_bytes() for path in paths]
    for path, data, other in zip(paths, stored, stored[1:] + stored[:1], strict=True):
        changed = {"half": data[: len(data) // 2], "empty": b"", "zeros": bytes(len(data))}
        path.write_bytes(changed.get(content, other))
    found = read(table.uri).scan().to_table()
    (key,) = table.model.keys
    got = read(table.uri).get(found.select([key]))
    assert_same({row[key]: row for row in got.to_pylist()}, {row[key]: row for row in found.to_pylist()})
    named = {one["place"] for one in run_job(table.uri, "verify").to_json()["findings"] if one["severity"] == "error"}
    assert named == {str(path.relative_to(table.uri)) for path in paths}


@pytest.mark.req("S0-141")
def test_a_reader_reads_filters_and_generations_once(
    made: tuple[str, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, live = made
    reader = read(uri)
    asked = live["id"].to_pylist()
    reader.get(asked)
    paths: list[str] = []
    real = type(reader.table.store).get
    monkeypatch.setattr(type(reader.table.store), "get", lambda self, path: paths.append(path) or real(self, path))
    assert reader.get(asked).num_rows == len(asked)
    assert paths, "manifests and logs are read anew"
    assert not [path for path in paths if "_gen_" in path]


@pytest.mark.sampled(1)
@pytest.mark.req("S0-205")
@pytest.mark.parametrize("k", [1, 10, 100])
def test_the_nearest_are_those_of_one_table(made: tuple[str, pa.Table], tmp_path: Path, k: int) -> None:
    uri, live = made
    one = lance.write_dataset(live, str(tmp_path / "one.lance"))
    random = np.random.default_rng(5)
    for _ in range(10):
        query = random.normal(size=WIDTH).astype(np.float32)
        found = read(uri).nearest("vector", query, k)
        exact = one.to_table(nearest={"column": "vector", "q": query, "k": k, "metric": "cosine", "use_index": False})
        assert found["_distance"].to_pylist() == pytest.approx(exact["_distance"].to_pylist(), abs=1e-5)
        assert {*found["id"].to_pylist()} == {*exact["id"].to_pylist()}


@pytest.mark.req("S0-206")
def test_scores_are_those_of_one_table(made: tuple[str, pa.Table], tmp_path: Path) -> None:
    uri, live = made
    one = lance.write_dataset(live, str(tmp_path / "one.lance"))
    one.create_scalar_index("text", "INVERTED")
    for text in ("river", "red iron", "paper cloud stone"):
        found = read(uri).search("text", text, 10)
        exact = one.to_table(full_text_query={"columns": ["text"], "query": text}, limit=10)
        wanted = sorted(exact["_score"].to_pylist(), reverse=True)
        assert found["_score"].to_pylist() == pytest.approx(wanted, rel=1e-5)
        assert all(any(word in row["text"] for word in text.split()) for row in found.to_pylist())


def test_a_text_search_with_a_filter_scores_as_without(made: tuple[str, pa.Table]) -> None:
    uri, live = made
    reader = read(uri)
    everything = {row["id"]: row["_score"] for row in reader.search("text", "river", live.num_rows).to_pylist()}
    found = reader.search("text", "river", 5, filter="id % 2 = 1").to_pylist()
    best = sorted((score for key, score in everything.items() if key % 2), reverse=True)[:5]
    assert [row["_score"] for row in found] == pytest.approx(best)
    assert all(row["id"] % 2 and everything[row["id"]] == row["_score"] for row in found)
    assert {row["id"]: {**row, "_score": 0} for row in found} == {
        row["id"]: {**by_id(live)[row["id"]], "_score": 0} for row in found
    }, "all columns, of the newest row"


def test_a_text_search_reads_words_as_the_index_of_the_base(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(1)
    base = rows(random, np.arange(4))
    lance.write_dataset(base, uri).create_scalar_index("text", "INVERTED", stem=False, lower_case=False)
    create_mem_wal(uri)
    with RegionWriter(uri, REGION) as writer:
        writer.put(base.slice(0, 2).set_column(1, SCHEMA.field(1), pa.array(["Rivers", "river"])))
        assert read(uri).search("text", "Rivers")["id"].to_pylist() == [0]
        assert read(uri).search("text", "rivers").num_rows == 0


@pytest.mark.req("S0-206", "S0-202")
def test_the_plan_of_a_text_search(made: tuple[str, pa.Table]) -> None:
    reader = read(made[0])
    assert reader.explain_search("text", "red iron", 3).splitlines() == [
        "GlobalLimitExec: limit=3",
        "  SortExec: order_by=[_bm25 DESC]",
        "    GlobalBM25Exec: one index of all live rows, as text_idx",
        '      FTSExec: text, query="red iron"',
        *(" " * 8 + line for line in reader.explain().splitlines()),
    ]


@pytest.mark.req("S0-203")
def test_the_plan_names_what_is_read(made: tuple[str, pa.Table]) -> None:
    lines = read(made[0]).explain().splitlines()
    assert lines == [
        "DeduplicateExec: partition_by=[id], order_by=[_gen DESC, _rowaddr DESC]",
        "  UnionExec",
        f"    ScanExec: base_table[gen=-1], version={read(made[0]).table.version}",
        f"    ScanExec: {REGION}[gen=4], log, rows=75",
        *(f"    ScanExec: {REGION}[gen={number}]" for number in (3, 2, 1)),
    ]
    assert "log" not in read(made[0], "manifests").explain()
    filtered = read(made[0]).scan(filter="id > 3").explain().splitlines()
    assert all(line.endswith(", filter=[id > 3]") for line in filtered[2:])


@pytest.mark.req("S0-204", "S0-216", "S0-218")
def test_the_plan_of_a_look_up(made: tuple[str, pa.Table]) -> None:
    guarded = [
        line
        for number in (3, 2, 1)
        for line in (
            f"  BloomFilterGuardExec: bf[{REGION}][gen={number}]",
            f"    TakeLastExec: {REGION}[gen={number}], filter=[`id` IN (7)]",
        )
    ]
    assert read(made[0]).explain_get([7]).splitlines() == [
        "CoalesceFirstExec: return_first_non_null",
        f"  TakeLastExec: {REGION}[gen=4], log, rows=75, filter=[`id` IN (7)]",
        *guarded,
        "  TakeLastExec: base_table[gen=-1], filter=[`id` IN (7)], index=btree",
    ]


def test_manifests_leave_the_log_out(made: tuple[str, pa.Table]) -> None:
    uri, live = made
    assert by_id(read(uri, "manifests").scan().to_table()) != by_id(live)
    assert by_id(read(uri, "manifests").get(range(800))) == by_id(read(uri, "manifests").scan().to_table())


def test_regions_that_are_made_after_a_reader_was_opened(tmp_path: Path) -> None:
    """Each call reads the regions anew: the rows that were acknowledged before it, whichever region they went to."""
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(1)
    lance.write_dataset(rows(random, np.arange(3)), uri)
    create_mem_wal(uri)
    with RegionWriter(uri, REGION) as first:
        first.put(rows(random, np.arange(3, 5)))
        reader, written = read(uri), read(uri, "manifests")
        assert reader.scan(["id"]).to_table().num_rows == 5
        assert written.scan(["id"]).to_table().num_rows == 3
        with RegionWriter(uri) as second:
            second.put(rows(random, np.arange(5, 9)))
            assert sorted(reader.scan(["id"]).to_table()["id"].to_pylist()) == [*range(9)]
            assert reader.get([4, 6]).num_rows == 2
    assert sorted(written.scan(["id"]).to_table()["id"].to_pylist()) == [*range(9)]


def test_bad_questions_are_refused(made: tuple[str, pa.Table]) -> None:
    uri, _ = made
    for keys in ([None], ["five"], {"other": [1]}, pa.table({"other": [1]})):
        with pytest.raises(InvalidUsageError, match="key"):
            read(uri).get(keys)  # type: ignore[arg-type]  # some are wrong on purpose
    with pytest.raises(InvalidUsageError, match="no column"):
        read(uri).nearest("none", [0.0] * WIDTH)
    with pytest.raises(InvalidUsageError, match="k is 0"):
        read(uri).search("text", "red", 0)
    with pytest.raises(MemwalOpsError):
        read(uri).nearest("vector", [0.0], 3)


def test_what_is_missing_is_an_error_and_no_row(tmp_path: Path) -> None:
    table = Workload(2, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    table.put([1, 2])
    table.flush()
    table.close()
    damage.remove_generation(table.uri, table.regions[0], 1)
    with pytest.raises(GenerationMissingError):
        read(table.uri).get(read(table.uri, "snapshot").scan().to_table().select(table.model.keys))


def test_a_tombstone_that_is_null_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is deleted only if it says so; a writer of others may leave the column NULL."""
    uri = str(tmp_path / "t.lance")
    random = np.random.default_rng(1)
    lance.write_dataset(rows(random, np.arange(3)), uri)
    create_mem_wal(uri)
    real = unmerged.read_log

    def without_tombstones(*given: object) -> Iterator[object]:
        for entry in real(*given):  # type: ignore[arg-type]  # as it was called
            at = entry.rows.schema.get_field_index("_tombstone")
            nothing = pa.nulls(entry.rows.num_rows, pa.bool_())
            yield replace(entry, rows=entry.rows.set_column(at, pa.field("_tombstone", pa.bool_()), nothing))

    monkeypatch.setattr(unmerged, "read_log", without_tombstones)
    with RegionWriter(uri, REGION) as writer:
        writer.put(rows(random, np.arange(2, 5)))
        assert sorted(read(uri).scan(["id"]).to_table()["id"].to_pylist()) == [0, 1, 2, 3, 4]
        assert sorted(read(uri).get([2, 4, 5])["id"].to_pylist()) == [2, 4]
