"""A format is told by one listing; what is bad is refused by kind, and nothing is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.registry import formats
from memwal_ops.errors import (
    InvalidUsageError,
    LegacyLayoutError,
    MemwalOpsError,
    NotALanceTableError,
    TableNotFoundError,
)
from memwal_ops.formats.lance.table import open_lance_table
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.conformance.formats import FormatUnderTest, TableUnderTest, opened
from tests.support.run_cli import contents


@pytest.mark.sampled(2)
def test_a_table_is_of_one_format(kind: FormatUnderTest, made: TableUnderTest) -> None:
    root = open_store(resolve(made.uri)).list_level("")
    assert [one.name for one in formats().values() if one.detect(root)] == [kind.name]
    table = opened(made)
    assert table.format.name == kind.name
    assert table.has_revision(table.revision)
    assert table.format.missing_of(table, table.revision) is None
    assert not table.has_revision(table.revision + 1)


def test_nothing_and_something_else(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/readme.txt").write_text("no table")
    with pytest.raises(TableNotFoundError):
        open_table(str(tmp_path / "empty"))
    with pytest.raises(NotALanceTableError, match="of no known format"):
        open_table(str(tmp_path / "other"))


def test_a_damaged_table_is_refused_and_left_alone(made: TableUnderTest) -> None:
    made.damage()
    before = contents(made.uri)
    with pytest.raises(MemwalOpsError) as refused:
        opened(made)
    assert type(refused.value) is not MemwalOpsError, "an error of a kind"
    assert refused.value.exit_code > 2
    assert refused.value.remedy
    assert contents(made.uri) == before


@pytest.mark.sampled(2)
def test_a_missing_part_of_the_log_is_reported_and_never_skipped(kind: FormatUnderTest, made: TableUnderTest) -> None:
    made.remove_entry()
    report = run_job(opened(made), "merge", kind.options_of(opened(made), "merge"))
    assert (report.decision, report.exit_code) == ("blocked", 10)
    again = run_job(opened(made), "merge", kind.options_of(opened(made), "merge"))
    assert (again.decision, again.exit_code) == ("blocked", 10)


def test_what_does_not_apply_is_refused_with_what_does(kind: FormatUnderTest, made: TableUnderTest) -> None:
    before = contents(made.uri)
    with pytest.raises(InvalidUsageError, match=f"compost does not apply to .*, a {kind.name} table") as refused:
        run_job(made.uri, "compost")
    assert all(name in refused.value.remedy for name in opened(made).jobs)
    with pytest.raises(InvalidUsageError, match="There is no option 'colour'"):
        run_job(made.uri, "merge", colour="red")
    assert contents(made.uri) == before


def test_code_for_lance_alone_refuses_other_formats(kind: FormatUnderTest, made: TableUnderTest) -> None:
    if kind.label == "lance-legacy":
        with pytest.raises(LegacyLayoutError):
            open_lance_table(made.uri)
        return
    if kind.name == "lance":
        assert open_lance_table(made.uri).revision == opened(made).revision
        return
    with pytest.raises(NotALanceTableError, match=f"of the format {kind.name}"):
        open_lance_table(made.uri)


@pytest.mark.sampled(3)
def test_a_missing_object_is_never_called_healthy(kind: FormatUnderTest, made: TableUnderTest) -> None:
    """Not by a run that asks indexes alone either, as the supervisor's daily one does."""
    run_job(made.uri, "merge", kind.options_of(opened(made), "merge"))
    needed = 0
    for path in [path for path in Path(made.uri).rglob("*") if path.is_file()]:
        content = path.read_bytes()
        path.unlink()
        try:
            table = opened(made)
            if table.format.missing_of(table, table.revision) is not None:
                needed += 1
                assert run_job(made.uri, "verify", answers_only=True).decision == "findings", path
        except MemwalOpsError:
            pass  # refused to open
        finally:
            path.write_bytes(content)
        if needed == 3:
            break
    assert needed or kind.name not in {"lance", "zeppelin"}
