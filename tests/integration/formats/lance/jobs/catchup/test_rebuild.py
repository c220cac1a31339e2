"""``catchup --rebuild``: an index of each type built anew by its own parameters, beside the old one, and exchanged."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.indices import IndexConfig
from lance.query import DocumentGranularity

from memwal_ops import open_table, run_job
from memwal_ops.errors import CommitConflictError, InvalidUsageError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.codebook import read_codebook
from memwal_ops.formats.lance.indexes.index_arguments import parameters_of, without_hints
from memwal_ops.formats.lance.jobs.catchup import building
from memwal_ops.memwal import create_mem_wal
from tests.support.tables import indexed
from tests.support.tables.plain import PlainTable
from tests.support.tables.schemas import PRIMARY_KEY
from tests.support.tables.templates import copy_of

if TYPE_CHECKING:
    from collections.abc import Callable


DIMENSION, ROWS, ADDED = 8, 600, 100
_POINT = {"ARROW:extension:name": "geoarrow.point"}


def rows(start: int, end: int) -> pa.Table:
    numbers = np.arange(start, end)
    vectors = np.random.default_rng(start).random((len(numbers), DIMENSION), dtype=np.float32)
    vector = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)
    words = pa.array([f"Word{number % 7} of number {number}" for number in numbers])
    inner = pa.StructArray.from_arrays([pa.array(numbers), words], ["a.b", "text"])
    point = pa.StructArray.from_arrays([pa.array(numbers, pa.float64())] * 2, ["x", "y"])
    columns = {
        "id": pa.array(numbers),
        "text": words,
        "tags": pa.array([[f"t{number % 5}", "all"] for number in numbers]),
        "document": pa.array([json.dumps({"x": int(number)}) for number in numbers], pa.json_()),
        "vector": vector,
        "in": inner,
        "point": point,
    }
    fields = [pa.field(name, one.type, metadata=_POINT if name == "point" else None) for name, one in columns.items()]
    return pa.Table.from_arrays([*columns.values()], schema=pa.schema(fields))


def scalar(column: str, kind: Any, **more: Any) -> Callable[[lance.LanceDataset], object]:
    return lambda dataset: dataset.create_scalar_index(column, kind, name="one", **more)


def vector(kind: str, **more: Any) -> Callable[[lance.LanceDataset], object]:
    return lambda dataset: dataset.create_index("vector", kind, name="one", num_partitions=3, **more)


PQ = {"num_sub_vectors": 4, "num_bits": 4}
GRAPH = {"m": 10, "ef_construction": 70}
INDEXES: dict[str, Callable[[lance.LanceDataset], object]] = {
    "btree": scalar("id", "BTREE"),
    "btree-pages": scalar("id", IndexConfig("btree", {"zone_size": 128})),
    "btree-nested": scalar("in.`a.b`", "BTREE"),
    "bitmap": scalar("text", "BITMAP"),
    "label-list": scalar("tags", "LABEL_LIST"),
    "ngram": scalar("text", "NGRAM"),
    "zonemap": scalar("id", IndexConfig("zonemap", {"rows_per_zone": 50})),
    "bloomfilter": scalar("id", IndexConfig("bloomfilter", {"number_of_items": 50, "probability": 0.01})),
    "rtree": scalar("point", IndexConfig("rtree", {"page_size": 64})),
    "inverted": scalar("text", "INVERTED"),
    "inverted-german": scalar(
        "text",
        "INVERTED",
        with_position=True,
        stem=False,
        language="German",
        lower_case=False,
        max_token_length=20,
        custom_stop_words=["of"],
    ),
    "inverted-ngram": scalar("text", "INVERTED", base_tokenizer="ngram", min_ngram_length=2, prefix_only=True),
    "inverted-v1": scalar("in.text", "INVERTED", format_version=1),
    "inverted-blocks": scalar("text", "INVERTED", block_size=256),
    "inverted-elements": scalar("tags", "INVERTED", document_granularity=DocumentGranularity.LIST_ELEMENT),
    "minhash": scalar("text", IndexConfig("minhashlsh", {"num_hashes": 64, "num_bands": 8, "shingle_size": 2})),
    "json": scalar("document", IndexConfig("json", {"target_index_type": "btree", "path": "x"})),
    "json-bitmap": scalar("document", IndexConfig("json", {"target_index_type": "bitmap", "path": "$.x"})),
    "ivf-flat": vector("IVF_FLAT", metric="cosine"),
    "ivf-pq": vector("IVF_PQ", metric="dot", **PQ),
    "ivf-sq": vector("IVF_SQ"),
    "ivf-rq": vector("IVF_RQ", num_bits=3),
    "ivf-hnsw-flat": vector("IVF_HNSW_FLAT", **GRAPH),
    "ivf-hnsw-pq": vector("IVF_HNSW_PQ", metric="cosine", **PQ, **GRAPH),
    "ivf-hnsw-sq": vector("IVF_HNSW_SQ", **GRAPH),
}


def described(uri: str) -> tuple[Any, ...]:
    """What pylance describes of the index, and what its files have."""
    [one] = lance.dataset(uri).describe_indices()
    table = open_table(uri)
    index = base_indexes(table)["one"]
    parameters = {json.dumps(parameters_of(table, index, entry), sort_keys=True) for entry in index.segments}
    return one.index_type, one.field_names, without_hints(one.details), parameters


def is_complete(uri: str) -> bool:
    table = open_table(uri)
    return coverage(base_indexes(table)["one"].covered, table.manifest).complete


def unnamed_segments(uri: str, folder: Path) -> set[str]:
    """Folders of index files that no version names."""
    named = set()
    for version in lance.dataset(uri).versions():
        table = open_table(uri)
        dataset = lance.dataset(uri, version=version["version"])
        named |= {str(segment.uuid) for index in dataset.describe_indices() for segment in index.segments}
        del table
    return {path.name for path in (folder / "_indices").iterdir()} - named


@pytest.mark.parametrize("target", ["bitmap", "ngram"])
def test_an_index_that_pylance_cannot_update_is_built_anew(tmp_path: Path, target: str) -> None:
    """Of a JSON path, only one with a B-tree takes new rows; the plan has the reason."""
    uri = str(tmp_path / "t.lance")
    texts = [json.dumps({"x": f"text {number}"}) for number in range(40)]
    for part in (texts[:30], texts[30:]):
        mode = "append" if part is not texts[:30] and (tmp_path / "t.lance").exists() else "create"
        lance.write_dataset(pa.table({"document": pa.array(part, pa.json_())}), uri, mode=mode)
        if mode == "create":
            config = IndexConfig("json", {"target_index_type": target, "path": "$.x"})
            lance.dataset(uri).create_scalar_index("document", config, name="one")
    [plan] = run_job(uri, "catchup", apply=False).to_json()["indexes"]
    assert (plan["decision"], plan["method"]) == ("would_update", "rebuild")
    assert "pylance adds no rows" in plan["why"]
    assert run_job(uri, "catchup").exit_code == 0
    assert is_complete(uri)
    assert run_job(uri, "catchup").decision == "unchanged"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", INDEXES)
def test_every_type_keeps_its_parameters(tmp_path: Path, kind: str) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, ROWS), uri, data_storage_version="2.2")
    INDEXES[kind](lance.dataset(uri))
    before, version = described(uri), lance.dataset(uri).version
    old = base_indexes(open_table(uri))["one"].segment_ids
    lance.write_dataset(rows(ROWS, ROWS + ADDED), uri, mode="append")
    plan = run_job(uri, "catchup", apply=False, indexes=["one"], rebuild=True)
    assert [one.decision for one in plan.indexes] == ["would_update"]
    report = run_job(uri, "catchup", indexes=["one"], rebuild=True)
    assert [(one.decision, one.method) for one in report.indexes] == [("updated", "rebuild")]
    assert described(uri) == before
    assert lance.dataset(uri).version == version + 2
    after = base_indexes(open_table(uri))["one"]
    assert len(after.segments) == 1
    assert after.segment_ids.isdisjoint(old)
    assert is_complete(uri)
    assert not unnamed_segments(uri, tmp_path / "t.lance")
    assert run_job(uri, "catchup").decision == "unchanged"


def faults(uri: str) -> set[str]:
    """What verify finds, also by asking the index; older versions keep their file as it is."""
    reports = run_job(uri, "verify").to_json(), run_job(uri, "verify", answers=True).to_json()
    return {finding["check"] for report in reports for finding in report["findings"]} - {"version_unreadable"}


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", INDEXES)
def test_the_remedy_of_each_damaged_file_helps(tmp_path: Path, kind: str) -> None:
    """Verify names a command; it works without the file, and keeps what the other files and the manifest have."""
    origin, uri = tmp_path / "origin.lance", str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, ROWS), str(origin), data_storage_version="2.2")
    INDEXES[kind](lance.dataset(str(origin)))
    kept = described(str(origin))[:3]
    for file in sorted(origin.glob("_indices/*/*")):
        for name, damage in DAMAGES.items():
            shutil.rmtree(uri, ignore_errors=True)
            shutil.copytree(origin, uri)
            path, data = Path(uri) / file.relative_to(origin), damage(file.read_bytes())
            path.unlink() if data is None else path.write_bytes(data)
            report = run_job(uri, "verify")
            assert report.exit_code == 9, (file.name, name)
            assert "memwal-ops catchup URI --index one --rebuild" in report.to_json()["findings"][0]["remedy"]
            with pytest.raises(TableCorruptError, match="nothing is deleted") as refused:
                run_job(uri, "expire", apply=True)
            assert "memwal-ops catchup URI --index one --rebuild" in refused.value.remedy
            again = run_job(uri, "catchup", indexes=["one"], rebuild=True)
            assert (again.decision, again.exit_code) == ("caught_up", 0), (file.name, name, again.describe())
            assert described(uri)[:3] == kept, (file.name, name)
            assert not faults(uri)


@pytest.mark.parametrize("kind", ["zonemap", "bloomfilter"])
def test_zones_that_cannot_be_read_are_an_error_and_built_anew(tmp_path: Path, kind: str) -> None:
    """Of the recorded size, and with a right end: queries by the index fail."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(0, ROWS), uri, data_storage_version="2.2")
    INDEXES[kind](lance.dataset(uri))
    [path] = (tmp_path / "t.lance").glob("_indices/*/*")
    data = path.read_bytes()
    path.write_bytes(data[:-200] + b"\xff" * 10 + data[-190:])
    report = run_job(uri, "verify")
    assert (report.exit_code, [finding.check for finding in report.listed]) == (9, ["index_rows"])
    assert "memwal-ops catchup URI" in report.listed[0].remedy
    [index] = run_job(uri, "catchup").indexes
    assert (index.decision, index.method) == ("updated", "rebuild")
    assert not faults(uri)
    assert lance.dataset(uri).count_rows("id = 7") == 1


@pytest.mark.parametrize("file", ["index.idx", "auxiliary.idx"])
def test_a_damaged_codebook_of_a_log_is_migrated(tmp_path: Path, file: str) -> None:
    """It is in no other file, so that the error names the way to a new one, which does not read the old files."""
    uri = str(tmp_path / "t.lance")
    schema = rows(0, 1).schema.set(0, pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY))
    lance.write_dataset(rows(0, ROWS).cast(schema), uri, data_storage_version="2.2")
    INDEXES["ivf-pq"](lance.dataset(uri))
    lance.dataset(uri).initialize_mem_wal()
    [path] = (tmp_path / "t.lance").glob(f"_indices/*/{file}")
    path.write_bytes(path.read_bytes()[:100])
    [index] = run_job(uri, "catchup", indexes=["one"], rebuild=True).indexes
    assert "memwal-ops catchup URI --migrate-codebook one NEW" in index.error.remedy
    for _ in range(9):
        if run_job(uri, "catchup", migrate_codebook=("one", "two")).decision == "done":
            break
    assert set(base_indexes(open_table(uri))) == {"two"}
    assert not faults(uri)


WRITES: dict[str, Callable[[PlainTable], object]] = {
    "append": lambda made: made.append(5),
    "delete": lambda made: made.delete(3, 450),
    "upsert": lambda made: made.upsert(4, 460, 900),
    "update": lambda made: made.update(7, text="new words"),
    "compaction": lambda made: made.dataset.optimize.compact_files(),
    "index": lambda made: made.dataset.create_scalar_index("id", "BTREE", name="id_btree", replace=True),
    "rebuild": lambda made: run_job(made.uri, "catchup", indexes=["id_btree"], rebuild=True),
}
CONFLICTS = {"compaction", "index", "rebuild"}


@pytest.fixture
def made(tmp_path: Path) -> PlainTable:
    """400 rows under indexes of every kind, and 100 that none covers; some rows are deleted."""
    return copy_of(partly_covered, str(tmp_path / "t.lance"))


def partly_covered(uri: str) -> PlainTable:
    made = PlainTable(uri).create(rows=400).create_indexes()
    made.append(100)
    made.delete(*range(100, 160))
    return made


def found(made: PlainTable, condition: str) -> list[int]:
    return sorted(made.dataset.to_table(filter=condition, columns=["id"])["id"].to_pylist())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", WRITES)
def test_others_commit_while_an_index_is_built(made: PlainTable, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """What they write is found; what took the ground from the build makes it be built again."""
    builds, create = [], building.create_index

    def slow(*args: object, **more: object) -> object:
        done = create(*args, **more)  # type: ignore[arg-type]
        builds.append(args[1])
        if len(builds) == 1:
            WRITES[write](made)
        return done

    monkeypatch.setattr(building, "create_index", slow)
    report = run_job(made.uri, "catchup", indexes=["id_btree"], rebuild=True)
    assert [one.decision for one in report.indexes] == ["updated"]
    assert len(builds) == (1 + (write in CONFLICTS) + (write == "rebuild"))
    assert report.commit_conflicts == (write in CONFLICTS)
    assert made.read() == made.model
    assert found(made, "id >= 0") == sorted(made.model)
    for number in (3, 4, 7, 450, 460, 499, 900):
        assert found(made, f"id = {number}") == ([number] if number in made.model else [])
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"


def _rebuild_in_process(uri: str, start: Any, told: Any) -> None:
    start.wait(60)
    try:
        told.put([one.decision for one in run_job(uri, "catchup", indexes=["id_btree"], rebuild=True).indexes])
    except CommitConflictError as error:
        told.put([error.reason])


@pytest.mark.long
def test_two_processes_at_once(made: PlainTable) -> None:
    context = multiprocessing.get_context("spawn")
    start, told = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_rebuild_in_process, args=(made.uri, start, told)) for _ in range(2)]
    for process in processes:
        process.start()
    try:
        outcomes = [told.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert ["updated"] in outcomes
    assert all(one in (["updated"], ["failed"], ["commit_conflict"]) for one in outcomes)
    assert found(made, "id >= 0") == sorted(made.model)
    assert len(base_indexes(open_table(made.uri))["id_btree"].segments) == 1
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vector_kind", ["IVF_FLAT", "IVF_PQ", "IVF_HNSW_FLAT", "IVF_HNSW_PQ"])
def test_beside_a_log_with_the_same_codebook(tmp_path: Path, vector_kind: str) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), vector=vector_kind)
    indexed.write(uri, 0)
    table = open_table(uri)
    names = [*base_indexes(table)]
    codebooks = {read_codebook(table, one) for one in base_indexes(table)["vector_idx"].segments}
    report = run_job(uri, "catchup", indexes=names, rebuild=True)
    assert {(one.decision, one.method) for one in report.indexes} == {("updated", "rebuild")}
    after = open_table(uri)
    assert {read_codebook(after, one) for one in base_indexes(after)["vector_idx"].segments} == codebooks
    indexed.check_claims(after)
    indexed.check_queries(uri, indexed.expected(1))
    indexed.write(uri, 1)
    assert run_job(uri, "catchup").decision == "caught_up"
    indexed.check_queries(uri, indexed.expected(2))


@pytest.mark.parametrize("vector_kind", ["IVF_SQ", "IVF_HNSW_SQ", "IVF_RQ"])
def test_beside_a_log_a_quantizer_that_pylance_trains_anew_is_refused(tmp_path: Path, vector_kind: str) -> None:
    uri = indexed.create(str(tmp_path / "t.lance"), vector=vector_kind)
    version = lance.dataset(uri).version
    for apply in (False, True):
        report = run_job(uri, "catchup", apply=apply, indexes=["vector_idx"], rebuild=True)
        [error] = report.failures
        assert isinstance(error, UnsupportedFeatureError)
        assert "--migrate-codebook vector_idx NEW" in error.remedy
    assert lance.dataset(uri).version == version


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["id_btree", "id_zonemap", "id_bloomfilter", "id_bitmap", "text_ngram", "text_inverted"]
)
def test_a_scalar_index_whose_files_are_gone_is_built_anew(made: PlainTable, name: str) -> None:
    lose_files(made, name)
    report = run_job(made.uri, "catchup", indexes=[name], rebuild=True)
    assert [one.decision for one in report.indexes] == ["updated"]
    assert found(made, "id >= 0") == sorted(made.model)
    assert found(made, "contains(text, 'of 499')") == [499]
    assert found(made, "id = 499") == [499]
    assert run_job(made.uri, "catchup").decision in {"caught_up", "unchanged"}


def test_a_vector_index_whose_files_are_gone_is_built_with_the_default_partitions(made: PlainTable) -> None:
    """How many it had is known by them alone; its metric and codes stand in the manifest."""
    before = base_indexes(open_table(made.uri))["vector_index"]
    lose_files(made, "vector_index")
    report = run_job(made.uri, "catchup", indexes=["vector_index"], rebuild=True)
    assert (report.decision, report.exit_code) == ("caught_up", 0), report.describe()
    after = base_indexes(open_table(made.uri))["vector_index"]
    assert (after.type, after.segments[0].index_details.type_url) == (
        before.type,
        before.segments[0].index_details.type_url,
    )
    assert run_job(made.uri, "verify", answers=True).exit_code == 0


def lose_files(made: PlainTable, name: str) -> None:
    [entry] = base_indexes(open_table(made.uri))[name].segments
    shutil.rmtree(Path(made.uri) / "_indices" / str(UUID(bytes=entry.uuid.uuid)))


def test_other_parameters_are_not_published(made: PlainTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pylance that ignores a parameter."""
    files, version = made.files("_indices"), made.dataset.version
    create = lance.LanceDataset.create_scalar_index

    def ignoring(self: object, column: str, kind: Any, **more: Any) -> None:
        create(self, column, IndexConfig("btree", {"zone_size": 77}), **more)  # type: ignore[arg-type]

    monkeypatch.setattr(lance.LanceDataset, "create_scalar_index", ignoring)
    [error] = run_job(made.uri, "catchup", indexes=["id_btree"], rebuild=True).failures
    assert "zone_size" in str(error)
    assert made.dataset.version == version
    assert made.files("_indices") == files


def test_what_contradicts_is_refused(made: PlainTable) -> None:
    with pytest.raises(InvalidUsageError, match="rebuild"):
        run_job(made.uri, "catchup", rebuild=True, indexes=["id_btree"], retrain=True)


@pytest.mark.long
def test_without_names_all_indexes_are_built_anew(made: PlainTable) -> None:
    """The dry run shows each, and what it would write."""
    before, version = base_indexes(open_table(made.uri)), made.dataset.version
    planned = run_job(made.uri, "catchup", apply=False, rebuild=True)
    assert [(one.name, one.decision, one.method) for one in planned.indexes] == [
        (name, "would_update", "rebuild") for name in before
    ]
    assert all(one.bytes_written > 0 for one in planned.indexes)
    assert made.dataset.version == version
    report = run_job(made.uri, "catchup", rebuild=True)
    assert {one.name: (one.decision, one.method) for one in report.indexes} == dict.fromkeys(
        before, ("updated", "rebuild")
    )
    after = base_indexes(open_table(made.uri))
    assert all(after[name].segment_ids.isdisjoint(before[name].segment_ids) for name in before)
    assert found(made, "id >= 0") == sorted(made.model)
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"


@pytest.mark.long
def test_within_a_budget_each_index_has_its_turn(made: PlainTable) -> None:
    names = [*base_indexes(open_table(made.uri))]
    turns = []
    for _ in names:
        report = run_job(made.uri, "catchup", rebuild=True, max_bytes=1)
        turns += [one.name for one in report.indexes if one.decision == "updated"]
    assert sorted(turns) == names


def test_a_table_without_rows_keeps_its_indexes(made: PlainTable) -> None:
    made.dataset.delete("true")
    names, version = [*base_indexes(open_table(made.uri))], made.dataset.version
    report = run_job(made.uri, "catchup", indexes=names, rebuild=True)
    assert report.exit_code == 0
    assert {one.decision for one in report.indexes} == {"below_threshold"}
    assert made.dataset.version == version


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["BTREE", "BITMAP", "ZONEMAP"])
def test_a_nested_index_all_of_whose_rows_were_rewritten(tmp_path: Path, kind: str) -> None:
    """pylance's update looks for a column of the inner name alone: docs/upstream/nested_index_without_rows_fails.py."""
    uri = str(tmp_path / "t.lance")
    outer = pa.StructArray.from_arrays([pa.array(range(500))], ["inner"])
    dataset = lance.write_dataset(pa.table({"outer": outer, "other": range(500)}), uri)
    dataset.create_scalar_index("outer.inner", kind, name="one")
    dataset.update({"other": "other + 1"})
    assert run_job(uri, "catchup").to_json()["indexes"][0]["method"] == "rebuild"
    lance.dataset(uri).insert(lance.dataset(uri).to_table(limit=10))
    report = run_job(uri, "catchup")
    assert (report.decision, report.to_json()["indexes"][0]["method"]) == ("caught_up", "update")
    assert lance.dataset(uri).count_rows("outer.inner = 7") == 2
    assert run_job(uri, "verify", answers=True).decision == "healthy"


def test_a_codebook_of_bytes_is_refused_by_name(tmp_path: Path) -> None:
    """Beside a log, an index is built anew with its centroids; pylance takes none of bytes."""
    uri = str(tmp_path / "t.lance")
    key = pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY)
    vectors = [[(row * 7 + part) % 251 for part in range(8)] for row in range(96)]
    schema = pa.schema([key, ("v", pa.list_(pa.uint8(), 8))])
    table = pa.table({"id": [*range(96)], "v": vectors}, schema=schema)
    lance.write_dataset(table, uri).create_index("v", "IVF_FLAT", num_partitions=2, metric="hamming")
    create_mem_wal(uri)
    assert "its centroids are no floats" in " ".join(run_job(uri, "catchup", rebuild=True).describe().split())


def test_segments_that_do_not_share_centroids_are_built_anew(tmp_path: Path) -> None:
    """As Lance 9's own update leaves them: no update merges them again, whatever the tiers."""
    uri, random = str(tmp_path / "t.lance"), np.random.default_rng(7)
    for _ in range(2):
        values = pa.array(random.normal(size=300 * 8), pa.float32())
        lance.write_dataset(pa.table({"v": pa.FixedSizeListArray.from_arrays(values, 8)}), uri, mode="append")
    dataset = lance.dataset(uri)
    parts = [
        dataset.create_index_uncommitted("v", "IVF_FLAT", name="x", fragment_ids=[fragment], num_partitions=2)
        for fragment in (0, 1)
    ]
    dataset.commit_existing_index_segments("x", "v", parts)
    assert [one.decision for one in run_job(uri, "catchup").indexes] == ["unchanged"]
    planned = run_job(uri, "catchup", apply=False, max_segments=1)
    assert [(one.decision, one.method) for one in planned.indexes] == [("would_update", "rebuild")]
    report = run_job(uri, "catchup", max_segments=1)
    assert (report.exit_code, [(one.method, one.segments) for one in report.indexes]) == (0, [("rebuild", 1)])
    assert "do not share centroids" in report.describe()
    assert run_job(uri, "verify", answers=True).exit_code == 0
