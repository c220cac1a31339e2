"""expire: old versions are deleted, the newest and protected ones stay, and gc deletes what only they needed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import run_job
from memwal_ops.core.candidates import Verdict
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.expire import ExpireOptions
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind
from memwal_ops.formats.lance.retention.schema_recorder import SCHEMA_FOLDER
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.run_cli import contents, run_here
from tests.support.stores import beside
from tests.support.tables.files import Files
from tests.support.tables.gc_tables import (
    DAY,
    HOUR,
    ZERO,
    age,
    caught_up,
    collect,
    grow,
    make,
    merged,
    paths,
    planned,
    sound,
    table_of,
)
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.reading import open_dataset, read_base
from tests.support.tables.templates import copy_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.tables.lsm_table import LsmTable

ALL = ExpireOptions(ZERO, allow_unsafe=True)


def versions(made: LsmTable) -> list[int]:
    return [int(one["version"]) for one in open_dataset(made.uri, made.storage_options).versions()]


def run(made: LsmTable, store: Any, options: ExpireOptions = ALL) -> expire.ExpireReport:
    """Through a store that does something else now and then."""
    table = table_of(made)
    return expire.apply(replace(table, store=store(table.store)), options)


def no_copies(made: LsmTable) -> bool:
    return not list(Files(made.uri, made.storage_options).listing("_mem_wal_ops/expired/"))


def because(report: expire.ExpireReport) -> dict[int, str]:
    return {one.version: one.because for one in report.kept}


@pytest.fixture(params=LAYOUTS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> LsmTable:
    return copy_of(caught_up_table, str(tmp_path / "t.lance"), request.param)


def caught_up_table(uri: str, layout: type[LsmTable]) -> LsmTable:
    table = make(Path(uri).parent, layout, generations=2)
    merged(table)
    caught_up(table)
    return table


def size_of(files: Mapping[str, tuple[int, bytes]]) -> int:
    return sum(len(data) for path, (_, data) in files.items() if not path.startswith(SCHEMA_FOLDER))


def test_a_plan_lists_what_apply_and_gc_then_do(made: LsmTable) -> None:
    before, standing = contents(made.uri), versions(made)
    size = size_of(before)
    plan = expire.plan(table_of(made), ALL)
    assert contents(made.uri) == before
    assert (plan.decision, plan.applied, plan.newest) == ("planned", False, standing[-1])
    assert plan.versions == tuple(standing[:-1])
    assert because(plan) == {standing[-1]: "the newest version"}
    assert (plan.frees[0], plan.frees[1] > 0) == (4, True)
    assert paths(planned(made), CandidateKind.GENERATION, Verdict.DELETE) == set()
    report = expire.apply(table_of(made), ALL)
    assert (report.decision, report.applied) == ("expired", True)
    assert (report.versions, report.frees, report.bytes) == (plan.versions, plan.frees, plan.bytes)
    assert versions(made) == standing[-1:]
    assert size - size_of(contents(made.uri)) >= report.bytes > 0
    sound(made)
    freed = [item for item in planned(made) if item.kind is CandidateKind.GENERATION and item.verdict is Verdict.DELETE]
    assert (len(freed), sum(item.bytes for item in freed)) == plan.frees
    again = expire.apply(table_of(made), ALL)
    assert (again.decision, again.versions, again.frees, again.bytes) == ("nothing_to_expire", (), (0, 0), 0)
    assert expire.plan(table_of(made), ALL).decision == "nothing_to_expire"


def test_what_an_index_holds_too_is_not_counted_as_freed(tmp_path: Path) -> None:
    made = make(tmp_path, generations=1)
    merged(made)
    assert expire.plan(table_of(made), ALL).frees == (0, 0)
    grow(made)
    caught_up(made)
    assert expire.plan(table_of(made), ALL).frees[0] == 2, "the other two are not merged"


def test_only_old_ones_are_deleted(made: LsmTable) -> None:
    table = table_of(made)
    standing = versions(made)
    assert expire.apply(table, ExpireOptions()).decision == "nothing_to_expire"
    for version in standing[:2]:
        age(made, version_path(version, table.naming), 8 * DAY)
    age(made, version_path(standing[2], table.naming), 6 * DAY)
    report = expire.apply(table, ExpireOptions())
    assert report.versions == tuple(standing[:2])
    assert report.warnings == ()
    assert all("too young" in because(report)[version] for version in standing[2:-1])
    assert versions(made) == standing[2:]


def test_the_newest_stay_at_any_age(made: LsmTable) -> None:
    age(made, "_versions/*", 4000 * DAY)
    standing = versions(made)
    report = expire.apply(table_of(made), ExpireOptions(keep=3))
    assert report.versions == tuple(standing[:-3])
    assert because(report) == {
        standing[-3]: "one of the newest 3",
        standing[-2]: "one of the newest 3",
        standing[-1]: "the newest version",
    }
    assert versions(made) == standing[-3:]
    assert expire.apply(table_of(made), ExpireOptions(keep=99)).decision == "nothing_to_expire"
    sound(made)


def test_at_most_so_many_stay_once_they_are_an_hour_old(made: LsmTable) -> None:
    naming = table_of(made).naming
    standing = versions(made)
    assert expire.apply(table_of(made), ExpireOptions(keep_at_most=2)).versions == ()
    age(made, "_versions/*", 2 * HOUR)
    assert expire.apply(table_of(made), ExpireOptions()).versions == (), "none is a week old"
    open_dataset(made.uri).tags.create("audit", standing[0])
    report = expire.apply(table_of(made), ExpireOptions(keep_at_most=2))
    assert report.versions == tuple(standing[1:-2])
    assert because(report) == {
        standing[0]: f"tag audit at version {standing[0]}",
        standing[-2]: "one of the newest 2",
        standing[-1]: "the newest version",
    }
    assert versions(made) == [standing[0], *standing[-2:]]
    age(made, version_path(standing[-2], naming), 4000 * DAY)
    again = expire.apply(table_of(made), ExpireOptions(ZERO, keep_at_most=2, allow_unsafe=True))
    assert again.versions == (), "the newest two stay at any age"
    sound(made)


def test_one_version_expires_alone(made: LsmTable) -> None:
    standing = versions(made)
    chosen = standing[-2]
    with pytest.raises(InvalidUsageError, match=r"too young; it is old enough at"):
        expire.apply(table_of(made), ExpireOptions(version=chosen))
    age(made, "_versions/*", 2 * HOUR)
    plan = expire.plan(table_of(made), ExpireOptions(version=chosen))
    assert (plan.decision, plan.versions) == ("planned", (chosen,))
    report = run_job(made.uri, "expire", apply=True, version=chosen)
    assert (report.decision, report.to_json()["expire"]) == ("expired", [chosen])
    assert versions(made) == [version for version in standing if version != chosen]
    again = run_job(made.uri, "expire", apply=True, version=chosen)
    assert (again.decision, again.to_json()["warnings"]) == (
        "nothing_to_expire",
        [f"Version {chosen} is not listed: it expired before."],
    )
    sound(made)


def test_one_version_that_is_needed_is_refused_with_the_reason(
    made: LsmTable, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, third, *_, newest = versions(made)
    age(made, "_versions/*", 4000 * DAY)
    dataset = open_dataset(made.uri)
    dataset.tags.create("audit", first)
    dataset.create_branch("dev", second)
    hold = take_hold(table_of(made), third, timedelta(hours=1))
    before = contents(made.uri)
    reasons = {
        first: f"tag audit at version {first}",
        second: f"branch dev left from version {second}",
        third: f"hold {hold.number} of",
        newest: "the newest version",
    }
    for version, reason in reasons.items():
        for apply in (False, True):
            with pytest.raises(InvalidUsageError, match=reason):
                run_job(made.uri, "expire", apply=apply, version=version)
    ran = run_here(capfd, "expire", made.uri, "--version", str(newest + 1), "--apply")
    assert (ran.code, f"no version {newest + 1}" in ran.err) == (26, True)
    assert contents(made.uri) == before


def test_a_tag_that_comes_while_its_version_expires(made: LsmTable) -> None:
    chosen = versions(made)[0]
    age(made, "_versions/*", 2 * HOUR)

    class Tagged(StoreWrapper):
        def delete_many(self, paths: list[str], **more: Any) -> Any:
            if version_path(chosen, table_of(made).naming) in paths:
                open_dataset(made.uri).tags.create("audit", chosen)
            return super().delete_many(paths, **more)

    with pytest.raises(InvalidUsageError, match="tag audit"):
        run(made, Tagged, ExpireOptions(version=chosen))
    assert open_dataset(made.uri, version="audit").version == chosen
    sound(made)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 3, "keep_at_most": 2}, "keep_at_most must be at least keep, 3, not 2"),
        ({"keep_at_most": 2, "version": 1}, "version names the only version to expire"),
        ({"version": 0}, "version must be at least 1"),
    ],
)
def test_bounds_that_contradict_each_other(options: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidUsageError, match=text):
        ExpireOptions(**options)


def test_tags_branches_and_holds_keep_theirs(made: LsmTable) -> None:
    first, second, third, *_ = versions(made)
    rows = {version: read_base(made.uri, version=version) for version in (first, second, third)}
    dataset = open_dataset(made.uri)
    dataset.tags.create("audit", first)
    dataset.tags.create("yearly", first)
    dataset.create_branch("side", second)
    hold = take_hold(table_of(made), third, timedelta(hours=1))
    ended = take_hold(table_of(made), versions(made)[3], timedelta(hours=1))
    release_hold(table_of(made), ended.number)
    for act in (expire.plan, expire.apply):
        kept = because(act(table_of(made), ALL))
        assert kept[first] == f"tag audit at version {first}, tag yearly at version {first}"
        assert kept[second] == f"branch side left from version {second}"
        assert kept[third].startswith(f"hold {hold.number} of ")
        assert len(kept) == 4
    for version, wanted in rows.items():
        assert read_base(made.uri, version=version) == wanted
    open_dataset(made.uri).checkout_version(("side", None)).to_table()
    for name in ("audit", "yearly"):
        open_dataset(made.uri).tags.delete(name)
    open_dataset(made.uri).branches.delete("side")
    release_hold(table_of(made), hold.number)
    assert expire.apply(table_of(made), ALL).versions == (first, second, third)


@pytest.mark.req("S0-189")
@pytest.mark.parametrize("keeper", ["tag", "branch"])
def test_a_keeper_that_comes_at_the_last_moment(made: LsmTable, keeper: str) -> None:
    """Right before the version's manifest is deleted, after everything was asked: it is listed again at the end."""
    old, *_ = versions(made)

    def keep() -> None:
        if keeper == "tag":
            open_dataset(made.uri).tags.create("late", old)
        else:
            open_dataset(made.uri).create_branch("late", old)

    rows = read_base(made.uri, version=old)
    report = run(made, beside("delete_many", "_versions/", keep))
    assert report.put_back == (old,)
    assert old not in report.versions
    assert because(report)[old].startswith(keeper)
    assert read_base(made.uri, version=old) == rows
    reference: tuple[str, None] | str = "late" if keeper == "tag" else ("late", None)
    assert open_dataset(made.uri).checkout_version(reference).to_table().num_rows == len(rows)
    sound(made)
    assert expire.plan(table_of(made), ALL).decision == "nothing_to_expire"
    if keeper == "tag":
        open_dataset(made.uri).tags.delete("late")
        assert run(made, StoreWrapper).versions == (old,)
        assert no_copies(made)


def test_versions_that_come_meanwhile_stay(made: LsmTable) -> None:
    table = table_of(made)
    grow(made)
    merged(made)
    newest = versions(made)[-1]
    assert newest > table.version
    report = expire.apply(table, ALL)
    assert max(report.versions) < table.version
    assert [version for version in versions(made) if version >= table.version] == versions(made)
    assert newest in versions(made)
    sound(made)
    collect(made)
    sound(made)


def test_below_an_hour_it_is_refused_before_anything_is_deleted(
    made: LsmTable, capfd: pytest.CaptureFixture[str]
) -> None:
    """It warned after it had deleted what a writer needed that had begun before."""
    before = versions(made)
    for run in ("expire", "maintain"):
        given = {"older_than": "59m"} if run == "expire" else {"expire": {"older_than": "59m"}}
        with pytest.raises(InvalidUsageError, match=r"older_than below 1h: a writer begins at version N") as refused:
            run_job(made.uri, run, given, apply=True)
        assert "allow_unsafe" in refused.value.remedy
    done = run_here(capfd, "maintain", made.uri, "--apply", "--older-than", "1s")
    assert (done.code, "--older-than below 1h" in done.err, "--allow-unsafe" in done.err) == (2, True, True)
    assert versions(made) == before
    assert run_here(capfd, "maintain", made.uri, "--apply", "--older-than", "0s", "--allow-unsafe").code == 0
    assert before[0] not in versions(made)


def test_it_warns_below_an_hour_and_refuses_to_keep_none(made: LsmTable) -> None:
    assert "a writer begins at version N" in expire.plan(table_of(made), ALL).warnings[0]
    age(made, "_versions/*", 2 * 3600)
    assert expire.plan(table_of(made), ExpireOptions(timedelta(hours=1))).warnings == ()
    with pytest.raises(InvalidUsageError, match="keep must be at least 1"):
        ExpireOptions(keep=0)


def test_the_document(made: LsmTable) -> None:
    report = expire.plan(table_of(made), ALL)
    document = report.to_json(limit=2)
    assert set(document) == {
        *("decision", "apply", "counts", "expire", "kept", "failed", "unreadable", "put_back", "truncated", "objects"),
        *("bytes", "later", "frees_for_gc", "branches", "version", "warnings", "seconds", "run_id"),
    }
    assert document["counts"] == {"expire": len(report.versions), "kept": 1, "failed": 0, "unreadable": 0}
    assert document["branches"] == {"count": 0, "files_kept": 0}
    assert (document["expire"], document["truncated"]) == (list(report.versions[:2]), True)
    assert report.to_json()["truncated"] is False
