"""Namespaces become Lance tables on Spark: the same tables as on one machine, also after kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import FragmentCorruptError, InvariantViolatedError, SparkUnavailableError
from memwal_ops.formats import zeppelin
from memwal_ops.formats.lance.export import LanceSink
from memwal_ops.formats.zeppelin.jobs import migrate_spark
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.support.zeppelin.server import edit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("spark")]


@pytest.fixture(autouse=True)
def few_rows_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_spark, "_ROWS_PER_TASK", 4)


def namespace(path: Path, dialect: str) -> NamespaceUnderTest:
    """A segment, and a log that replaces and deletes rows of it."""
    found = NamespaceUnderTest(str(path / "ns"), dialect)
    found.write()
    run_job(found.uri, "merge", clusters=2)
    found.put("g", "b", deletes=("d", "never"))
    found.put("h", deletes=("e",))
    found.put("e")
    return found


@pytest.fixture
def made(tmp_path: Path) -> NamespaceUnderTest:
    return namespace(tmp_path, "native")


def go(made: NamespaceUnderTest, engine: str = "spark", *, apply: bool = True) -> dict[str, Any]:
    target = Path(made.uri).parent / f"{engine}.lance"
    return run_job(made.uri, "migrate", target=str(target), engine=engine, apply=apply).to_json()


def rows(made: NamespaceUnderTest, engine: str = "spark") -> list[dict[str, Any]]:
    found = lance.dataset(str(Path(made.uri).parent / f"{engine}.lance")).to_table()
    return sorted(found.to_pylist(), key=lambda row: row["id"])


def same(made: NamespaceUnderTest) -> None:
    assert (
        {
            row.pop("id"): (tuple(row.pop("vector")), {name: one for name, one in row.items() if one is not None})
            for row in rows(made)
        }
        == made.expected()
        == made.read()
    )


@pytest.mark.parametrize(("dialect", "broadcast"), [("wiki", 0), ("native", 1000)])
def test_the_same_table_as_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, broadcast: int
) -> None:
    made = namespace(tmp_path, dialect)
    monkeypatch.setattr(migrate_spark, "_BROADCAST", broadcast)
    values = [
        {
            "mixed": "a",
            "number": 1,
            "huge": 2**70 if dialect == "wiki" else 2**60,
            "list": [1, 2.5],
            "dotted.name": True,
            "none": [],
        },
        None,
    ]
    values += [{"mixed": 3, "number": 2.5, "list": [], "text": "é\n", "long": 2**60, "texts": ["x"]}]
    more = [{"id": f"v{at}", "values": [at, 0, 0, 1], "attributes": one} for at, one in enumerate(values)]
    zeppelin.open_writer(made.uri).append(more)
    planned = go(made, apply=False)
    assert (planned["decision"], planned["engine"], planned["upserts"]) == ("planned", "spark", len(made.model) + 3)
    assert not (Path(made.uri).parent / "spark.lance").exists()
    reports = [go(made, engine) for engine in ("spark", "local")]
    for one in reports:
        for name in ("target", "target_version", "seconds", "engine"):
            del one[name]
    assert reports[0] == reports[1]
    assert (reports[0]["decision"], reports[0]["compared_rows"]) == ("migrated", len(made.model) + 3)
    assert rows(made) == rows(made, "local")
    tables = [lance.dataset(str(Path(made.uri).parent / f"{engine}.lance")) for engine in ("spark", "local")]
    assert tables[0].schema.equals(tables[1].schema)
    assert open_table(tables[0].uri).primary_key == ("id",)
    assert go(made)["decision"] == "nothing_to_migrate"


def test_what_came_since_is_carried_over(made: NamespaceUnderTest) -> None:
    """From the log, and by comparison on executors where a compaction replaced segments."""
    go(made)
    made.put("a", "new", deletes=("b",))
    done = go(made)
    assert (done["upserts"], done["deletes"]) == (2, 1)
    same(made)
    made.put("new", "x", deletes=("a",))
    zeppelin.open_writer(made.uri).append([{"id": "y", "values": [1, 2, 3, 4], "attributes": {"size": 3}}])
    made.model["y"] = ((1.0, 2.0, 3.0, 4.0), {"size": 3})
    run_job(made.uri, "merge")
    planned, done = go(made, apply=False), go(made)
    assert [(one["upserts"], one["deletes"]) for one in (planned, done)] == [(3, 1)] * 2
    same(made)


@pytest.mark.parametrize("name", ["create", "set_record", "load"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_commit_and_repeated(
    made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    class Killed(BaseException):
        pass

    def dies(self: Any, *arguments: Any) -> None:
        if after:
            real(self, *arguments)
        raise Killed

    real = getattr(LanceSink, name)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LanceSink, name, dies)
        go(made)
    made.put("late", deletes=("f",))
    run_job(made.uri, "merge")
    assert go(made)["decision"] == "migrated"
    same(made)
    assert go(made)["decision"] == "nothing_to_migrate"


def test_a_later_segment_and_pending_ids_override(tmp_path: Path) -> None:
    """Wiki: of two live segments the later one counts, and pending ids hide rows of both, and of the log."""
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    path = Path(made.uri, "manifest.json")
    made.put("a", "b", "c", "d")
    run_job(made.uri, "merge", clusters=2)
    older = json.loads(path.read_text())["segments"]
    made.put("a", "b", deletes=("c",))
    run_job(made.uri, "merge", retrain=True)
    manifest = json.loads(path.read_text())
    manifest |= {"segments": [*older, *manifest["segments"]], "pending_deletes": ["d", "e"]}
    path.write_text(json.dumps(manifest))
    made.put("e", "f")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"pending_deletes": ["d", "f"]}))
    assert {*made.read()} == {"a", "b", "c", "e"}, "the premise: c is in the older segment, d and f are hidden"
    made.model = made.read()
    assert go(made)["rows"] == 4
    same(made)


def test_a_namespace_that_only_a_server_writes(made: NamespaceUnderTest) -> None:
    edit(made.uri, lambda found: found.update(manifest_binding_version="v3_roots"))
    path = Path(made.uri, "manifest.json")
    before = path.read_bytes()
    done = go(made)
    assert done["decision"] == "migrated"
    assert "only a Zeppelin server understands" in done["not_carried"][0]
    assert path.read_bytes() == before
    assert rows(made) == [
        {"id": name, "vector": list(vector), "color": more.get("color")}
        for name, (vector, more) in sorted(made.model.items())
    ]


def test_a_damaged_fragment_is_named(made: NamespaceUnderTest) -> None:
    key = open_table(made.uri).manifest.fragments[1].key
    path = Path(made.uri, key)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(FragmentCorruptError, match=key):
        go(made)
    assert not (Path(made.uri).parent / "spark.lance").exists()


def test_rows_that_differ_are_reported(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LanceSink.load
    monkeypatch.setattr(LanceSink, "load", lambda self, found: real(self, found.where("id <> 'h'")))
    with pytest.raises(InvariantViolatedError, match="and they differ"):
        go(made)
    monkeypatch.undo()
    assert go(made)["upserts"] == 1
    same(made)


def test_without_java(made: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    for apply in (False, True):
        with pytest.raises(SparkUnavailableError, match=r"Java was not found: JAVA_HOME"):
            go(made, apply=apply)
    assert not (Path(made.uri).parent / "spark.lance").exists()


def test_an_empty_namespace(tmp_path: Path, spark: SparkSession) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    assert go(made)["rows"] == 0
    made.put("a")
    assert go(made)["upserts"] == 1
    same(made)
    assert spark.range(3).count() == 3, "the caller's session goes on"
