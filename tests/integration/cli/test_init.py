"""``init``: the MemWAL index of a Lance table by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.jobs.init import init
from memwal_ops.formats.lance.log.create import create_mem_wal
from memwal_ops.formats.lance.options import InitOptions
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, RegionWriter
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.integration.contracts import small
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents, run_here
from tests.support.tables.schemas import PRIMARY_KEY

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("n", pa.int32())])
RANDOM = '{"field_id": "e", "sources": ["id"], "expression": "random()", "result_type": "float64"}'


@pytest.fixture
def uri(tmp_path: Path) -> str:
    found = str(tmp_path / "t.lance")
    made = lance.write_dataset(pa.table({"id": [1, 2], "n": pa.array([1, 2], pa.int32())}, schema=SCHEMA), found)
    made.create_scalar_index("n", "BTREE")
    made.create_scalar_index("id", "BTREE")
    return found


@pytest.mark.req("S0-012", "S0-065", "S0-066", "S0-074", "S0-075")
def test_init(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = ("init", uri, "--region-field", "bucket(id, 16)", "--maintained-index", "n_idx")
    before = contents(uri)
    assert "would be created" in run_here(capfd, *given, "--dry-run").out
    dry = run_here(capfd, *given, "--dry-run", "--json")
    assert (dry.code, dry.document["decision"]) == (0, "dry_run")
    assert contents(uri) == before
    ran = run_here(capfd, *given, "--json")
    assert (ran.code, ran.document["decision"]) == (0, "created")
    (spec,) = ran.document["region_specs"]
    (field,) = spec["fields"]
    assert (spec["spec_id"], field["transform"], field["parameters"]) == (1, "bucket", {"num_buckets": "16"})
    assert [*open_table(uri).index.maintained_indexes] == ran.document["maintained_indexes"] == ["n_idx"]
    assert ran.document["version"] == open_table(uri).version
    before = contents(uri)
    again = run_here(capfd, *given, "--format", "lance")
    assert again.code == 0
    assert "exists already" in again.out
    assert contents(uri) == before
    assert "exists already" in run_here(capfd, "init", uri).out
    assert contents(uri) == before


@pytest.mark.req("S0-082", "S0-083")
def test_a_spec_and_an_index_are_added(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_here(capfd, "init", uri, "--region-field", "bucket(id, 16)")
    rows = lance.dataset(uri).to_table()
    with RegionRouter(uri) as router:
        router.put(rows)
    open_regions = sorted(str(one.region_id) for one in router.writers.values())
    before, version = contents(uri), open_table(uri).version
    given = ("init", uri, "--region-field", "bucket(id, 8)", "--maintained-index", "n_idx")

    dry = run_here(capfd, *given, "--dry-run", "--json")
    assert (dry.code, dry.document["decision"], dry.document["version"]) == (0, "dry_run", version)
    assert contents(uri) == before
    ran = run_here(capfd, *given, "--json")
    assert (ran.code, ran.document["decision"], ran.document["version"]) == (0, "added", version + 1)
    for said in (dry.document, ran.document):
        assert [one["spec_id"] for one in said["region_specs"]] == [1, 2]
        assert (said["added_region_specs"], said["added_maintained_indexes"]) == ([2], ["n_idx"])
        assert said["open_regions"] == open_regions
    assert [one.spec_id for one in open_table(uri).index.region_specs] == [1, 2]

    before = contents(uri)
    again = run_here(capfd, *given, "--json")
    assert (again.code, again.document["decision"], again.document["added_region_specs"]) == (0, "unchanged", [])
    first = run_here(capfd, "init", uri, "--region-field", "bucket(id, 16)")
    assert (first.code, "exists already" in first.out) == (0, True), "the older spec is still there"
    assert contents(uri) == before

    # What it tells to do is what the router waits for.
    text = run_here(capfd, "init", uri, "--region-field", "bucket(id, 4)", "--dry-run").out
    assert "would be extended" in text
    assert "New region specs: 3." in text
    assert open_regions[0] in text
    with pytest.raises(InvalidUsageError):
        RegionRouter(uri)
    for one in open_regions:
        RegionWriter(uri, one).seal()
    assert run_job(uri, "merge").exit_code == 0
    with RegionRouter(uri) as router:
        router.put(rows)
    assert run_here(capfd, "init", uri, "--region-field", "bucket(id, 4)", "--json").document["open_regions"] == sorted(
        str(one.region_id) for one in router.writers.values()
    )


def test_two_that_add_at_once(uri: str) -> None:
    """Another one adds a spec right before the commit: both are there, each with an id of its own."""
    location = resolve(uri)
    create_mem_wal(location, open_store(location))
    specs = [RegionSpec((RegionField.parse(f"bucket(id, {number})"),)) for number in (2, 3)]
    table: Any = open_table(uri)

    def other() -> None:
        create_mem_wal(location, open_store(location), region_specs=[specs[0]])

    store = Overtaken(table.store, 1, other, writes=True)
    assert init(location, store, InitOptions(region_fields=("bucket(id, 3)",)), dry_run=False).decision == "added"
    found = open_table(uri).index.region_specs
    assert [(one.spec_id, one.fields[0].parameters["num_buckets"]) for one in found] == [(1, "2"), (2, "3")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--region-field", "bucket(n, 4)"], "cannot use n"),
        (["--region-field", "bucket(id)"], "num_buckets"),
        (["--region-field", "shard(id, 3)"], "not a region field"),
        (["--maintained-index", "gone"], "has no index gone"),
        (["--maintained-index", "id_idx"], "that of the primary key"),
        (
            [
                "--region-field",
                '{"field_id": "e", "sources": ["id"], "expression": "random()", "result_type": "int64"}',
            ],
            "random",
        ),
    ],
)
def test_options_that_are_refused(uri: str, capfd: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    before = contents(uri)
    found = run_here(capfd, "init", uri, *given)
    assert found.code == 2
    assert message in found.err
    assert contents(uri) == before


def test_places_that_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nothing = run_here(capfd, "init", str(tmp_path / "gone"))
    assert nothing.code == 3
    (tmp_path / "empty").mkdir()
    assert run_here(capfd, "init", str(tmp_path / "empty"), "--format", "lance").code == 3
    bare = str(tmp_path / "bare.lance")
    lance.write_dataset(pa.table({"a": [1]}), bare)
    assert run_here(capfd, "init", bare).code == 6
    assert run_here(capfd, "init", bare, "--format", "zeppelin").code == 2
    pylance = small.make(str(tmp_path), small.rows(0, 1))
    assert run_here(capfd, "init", pylance).code in {0, 2}, "it has its index"


@pytest.mark.req("S0-011")
def test_two_at_once(uri: str) -> None:
    """One of two that create an index at the same version is refused, and the table has one index."""
    from memwal_ops.errors import MemwalOpsError

    location = resolve(uri)
    happened = 0
    for at in range(1, 12):
        copy = f"{uri}.{at}"
        lance.write_dataset(lance.dataset(uri).to_table(), copy)
        location = resolve(copy)
        others: list[int] = []

        def create(location=location, others=others) -> None:
            create_mem_wal(location, open_store(location))
            others.append(1)

        try:
            create_mem_wal(location, Overtaken(open_store(location), at, create))
        except MemwalOpsError:
            happened += bool(others)
        assert open_table(copy).index.merged_generations == {}, "one index"
    assert happened


@pytest.mark.parametrize("key", [["id"], ["n", "id"]])
def test_a_primary_key_is_marked(tmp_path: Path, capfd: pytest.CaptureFixture[str], key: list[str]) -> None:
    """As LanceDB writes tables: every column is nullable, and none is marked."""
    uri = str(tmp_path / "plain.lance")
    lance.write_dataset(pa.table({"id": [1, 2], "n": ["a", "a"]}), uri)
    given = (
        "init",
        uri,
        *(part for name in key for part in ("--primary-key", name)),
        "--region-field",
        "bucket(id, 4)",
    )
    before = contents(uri)
    assert run_here(capfd, *given, "--dry-run").code == 0
    assert contents(uri) == before
    assert run_here(capfd, *given, "--json").document["decision"] == "created"
    assert [*open_table(uri).primary_key] == key
    assert not any(lance.dataset(uri).schema.field(name).nullable for name in key)
    before = contents(uri)
    assert run_here(capfd, *given, "--json").document["decision"] == "unchanged"
    assert run_here(capfd, "init", uri, "--primary-key", "other").code == InvalidUsageError.exit_code
    assert contents(uri) == before
    rows = lance.dataset(uri).to_table()
    with RegionRouter(uri) as router:
        router.put(rows)
    assert run_job(uri, "merge").decision == "merged"
    assert lance.dataset(uri).to_table().sort_by("id").to_pydict() == {"id": [1, 2], "n": ["a", "a"]}


@pytest.mark.parametrize(("column", "code"), [("twice", 16), ("null", 16), ("absent", InvalidUsageError.exit_code)])
def test_what_is_no_primary_key(tmp_path: Path, capfd: pytest.CaptureFixture[str], column: str, code: int) -> None:
    uri = str(tmp_path / "plain.lance")
    lance.write_dataset(pa.table({"twice": [1, 1], "null": [1, None]}), uri)
    before = contents(uri)
    assert run_here(capfd, "init", uri, "--primary-key", column).code == code
    assert contents(uri) == before


def test_nothing_is_marked_where_the_index_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "plain.lance")
    lance.write_dataset(pa.table({"id": [1, 2]}), uri)
    before = contents(uri)
    assert run_here(capfd, "init", uri, "--primary-key", "id", "--maintained-index", "absent").code != 0
    assert contents(uri) == before


@pytest.mark.parametrize("v2_names", [True, False])
def test_inserts_by_others_are_compacted(tmp_path: Path, v2_names: bool) -> None:
    uri = str(tmp_path / "t.lance")
    table = pa.table({"id": [1, 2], "n": pa.array([1, 2], pa.int32())}, schema=SCHEMA)
    lance.write_dataset(table, uri, enable_stable_row_ids=True, enable_v2_manifest_paths=v2_names)
    create_mem_wal(resolve(uri, {}), open_store(resolve(uri, {})))
    more = pa.table({"id": [3, 4], "n": pa.array([3, 4], pa.int32())}, schema=SCHEMA)
    lance.dataset(uri).merge_insert("id").when_not_matched_insert_all().execute(more)
    assert run_job(uri, "compact").to_json()["decision"] == "compacted"
    assert lance.dataset(uri).optimize.compact_files().fragments_added == 0
    assert sorted(lance.dataset(uri).to_table()["id"].to_pylist()) == [1, 2, 3, 4]


def test_a_concurrent_commit_does_not_stop_the_creation(uri: str) -> None:
    location = resolve(uri, {})
    more = pa.table({"id": [3], "n": pa.array([3], pa.int32())}, schema=SCHEMA)
    store = Overtaken(open_store(location), 1, lambda: lance.write_dataset(more, uri, mode="append"), writes=True)
    made = create_mem_wal(location, store)
    assert made.memwal is not None
    assert made.dataset.count_rows() == 3
