"""``adopt --same-columns``: one command makes generations mergeable whose versions others cleaned up."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.generations.projection import UndecidedColumnsError
from tests.integration.contracts import small
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents, run_here

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Generation 1 updates key 5 and inserts key 100; then the base is compacted, and all older versions deleted."""
    found = small.make(tmp_path, stable_row_ids=False)
    small.flush(found, small.rows(5, 6, 7.0), small.rows(100, 101, 7.0))
    compact_and_clean(found)
    return found


def compact_and_clean(uri: str) -> None:
    """As LanceDB advises for small disks."""
    lance.dataset(uri).delete("id = 0")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    lance.dataset(uri).cleanup_old_versions(timedelta(0))


def blocked(uri: str) -> list[str]:
    return [str(one["reason"]) for one in run_job(uri, "merge").to_json()["blocked"]]


def test_one_command_as_the_error_says(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_here(capfd, "merge", uri, "--json")
    assert run.code == 10
    (fault,) = run.document["blocked"]
    assert fault["reason"] == "schema_projection"
    assert "memwal-ops adopt URI --same-columns" in fault["detail"]
    assert "lance.dataset" not in fault["detail"], "no Python to paste"
    before = contents(uri)
    run = run_here(capfd, "adopt", uri, "--same-columns")
    assert run.code == 0
    text = " ".join(run.out.split())
    assert text.startswith("planned: 1 region. region ")
    assert ": 1 generation (1), " in text
    assert "With --apply, you assert: since 2" in text
    assert "none of these columns was dropped, replaced by a restore, or added again: 'val', 'txt'" in text
    assert contents(uri) == before
    run = run_here(capfd, "adopt", uri, "--same-columns", "--apply", "--json")
    assert (run.code, run.document["decision"], run.document["as"]) == (0, "adopted", "same_columns")
    assert run.document["version"] == lance.dataset(uri).version
    assert run_job(uri, "merge").to_json()["decision"] == "merged"
    values = small.values(uri)
    assert values == {number: [7.0 if number in {5, 100} else 0.0] for number in range(1, 101)}
    run = run_here(capfd, "adopt", uri, "--same-columns", "--apply")
    assert (run.code, run.out.split(":")[0]) == (0, "nothing_to_adopt")


def test_a_renamed_column_is_named_by_both_names(tmp_path: Path) -> None:
    uri = small.make(tmp_path)
    small.flush(uri, small.rows(5, 6, 7.0))
    lance.dataset(uri).alter_columns({"path": "txt", "name": "text"})
    compact_and_clean(uri)
    assert blocked(uri) == ["schema_projection"]
    report: Any = run_job(uri, "adopt", same_columns=True, apply=True)
    assert "'txt' is 'text'" in report.regions[0].columns
    assert run_job(uri, "merge").to_json()["decision"] == "merged"
    assert lance.dataset(uri).to_table(filter="id = 5").to_pylist() == [{"id": 5, "val": 7.0, "text": "row 5"}]


def test_a_column_that_was_added_again_by_the_printed_remedy(tmp_path: Path) -> None:
    """Following the message: the copy has another field id, and the generation's values are ignored."""
    uri = small.make(tmp_path)
    small.flush(uri, small.rows(5, 6, 7.0))
    lance.dataset(uri).drop_columns(["txt"])
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).add_columns(pa.field("txt", pa.string()))
    lance.dataset(uri).update({"txt": "'new'"})
    compact_and_clean(uri)
    assert blocked(uri) == ["schema_projection"]
    lance.dataset(uri).add_columns(pa.field("copy", pa.string()))
    lance.dataset(uri).update({"copy": "txt"})
    lance.dataset(uri).drop_columns(["txt"])
    lance.dataset(uri).alter_columns({"path": "copy", "name": "txt"})
    assert run_job(uri, "adopt", same_columns=True, apply=True).to_json()["decision"] == "adopted"
    assert run_job(uri, "merge").to_json()["decision"] == "merged"
    assert lance.dataset(uri).to_table(filter="id = 5").to_pylist() == [{"id": 5, "val": 7.0, "txt": None}]


def test_a_drop_that_comes_between_is_seen(uri: str) -> None:
    """The decision is published as exactly the next version: a column that is dropped meanwhile is not confirmed."""
    table = open_table(uri)

    def drop() -> None:
        lance.dataset(uri).drop_columns(["txt"])

    object.__setattr__(table, "store", Overtaken(table.store, 2, drop, writes=True))
    report: Any = run_job(table, "adopt", same_columns=True, apply=True)
    assert [region.columns for region in report.regions] == [("'val'",)]


@pytest.mark.parametrize("cleaned", [False, True])
def test_an_earlier_decision_is_none_about_a_column_that_was_added_since(uri: str, cleaned: bool) -> None:
    """The new column has the field id of the old one, whose values the generation has."""
    assert run_job(uri, "adopt", same_columns=True, apply=True).to_json()["decision"] == "adopted"
    (old,) = (one.id() for one in lance.dataset(uri).lance_schema.fields() if one.name() == "txt")
    lance.dataset(uri).drop_columns(["txt"])
    lance.dataset(uri).delete("id = 1")
    lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    lance.dataset(uri).add_columns(pa.field("txt", pa.string()))
    assert [one.id() for one in lance.dataset(uri).lance_schema.fields() if one.name() == "txt"] == [old]
    if cleaned:
        lance.dataset(uri).cleanup_old_versions(timedelta(0))
    assert blocked(uri) == ["schema_projection"]
    assert lance.dataset(uri).to_table(filter="id = 5").to_pylist() == [{"id": 5, "val": 0.0, "txt": None}]


def test_new_generations_need_no_decision(uri: str) -> None:
    run_job(uri, "adopt", same_columns=True, apply=True)
    small.flush(uri, small.rows(200, 201, 8.0))
    assert run_job(uri, "adopt", same_columns=True).to_json()["decision"] == "nothing_to_adopt"
    assert run_job(uri, "merge").to_json()["decision"] == "merged"
    assert small.values(uri)[200] == [8.0]


@pytest.mark.parametrize("other", [{"answer": "merged"}, {"regions": (small.REGION,)}])
def test_one_decision_at_once(uri: str, other: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsageError, match="same_columns"):
        run_job(uri, "adopt", same_columns=True, **other)


def test_the_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(UndecidedColumnsError("why", ("'a'",), "then")))
    assert (error.columns, str(error)) == (("'a'",), "why")
    assert error.remedy.endswith("then")
