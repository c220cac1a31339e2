"""``gc``, ``expire``, ``hold`` and ``why`` at the command line: documents, words, exit codes, refusals."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from memwal_ops import run_job
from memwal_ops.cli import hold
from memwal_ops.errors import InvalidUsageError, StoreUnavailableError
from memwal_ops.formats.lance.jobs.gc import job
from memwal_ops.formats.lance.wire.names import bit_reversed
from memwal_ops.storage import clock
from tests.integration.formats.lance.retention.test_leftovers import killed_commit
from tests.support.gc_options import AT_ONCE_FLAGS, NONE_PINNED_FLAGS
from tests.support.run_cli import contents, run_here
from tests.support.stores import refusing
from tests.support.tables import damage
from tests.support.tables.gc_tables import (
    DAY,
    age,
    caught_up,
    entries,
    expired,
    free,
    generation_folders,
    make,
    merged,
    sound,
    table_of,
    write,
)
from tests.support.tables.reading import open_dataset

if TYPE_CHECKING:
    from tests.support.tables.lsm_table import LsmTable

GC_KEYS = {
    *("decision", "apply", "counts", "bytes_reclaimable", "deleted", "delete", "held", "unknown", "truncated"),
    *("failed", "drained", "limited", "replaced", "regions", "retained_versions", "warnings", "seconds", "run_id"),
}
KINDS = {"generation", "quarantine", "orphan", "wal_entry", "region_manifest", "snapshot", "leftover", "unknown"}
ITEM_KEYS = {"kind", "path", "region_id", "generation", "bytes", "objects"}


@pytest.fixture
def made(tmp_path: Path) -> LsmTable:
    return make(tmp_path)


# -- gc


@pytest.mark.req("S0-183")
def test_the_document(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    free(made)
    before = contents(made.uri)
    plan = run_here(capfd, "gc", made.uri, "--json", *AT_ONCE_FLAGS)
    assert contents(made.uri) == before
    document = plan.document
    assert (plan.code, set(document)) == (0, GC_KEYS | {"cost"})
    assert (document["decision"], document["apply"]) == ("planned", False)
    assert set(document["counts"]) == KINDS
    assert document["counts"]["generation"] == {"delete": 6, "held": 0, "unknown": 0}
    assert document["deleted"] == {"objects": 0, "bytes": 0}
    assert document["bytes_reclaimable"] == sum(item["bytes"] for item in document["delete"]) > 0
    assert all(set(item) == {*ITEM_KEYS, "proof"} for item in document["delete"])
    assert all(set(item) == {*ITEM_KEYS, "because"} for item in document["held"])
    generations = [item for item in document["delete"] if item["kind"] == "generation"]
    assert {(item["region_id"], item["generation"]) for item in generations} == {
        (region, number) for region in made.regions for number in (1, 2, 3)
    }
    assert {item["path"] for item in generations} == generation_folders(made)
    assert document["regions"] == {"total": 2, "sealed": 0, "unreadable": []}
    assert (document["retained_versions"], document["limited"], document["failed"]) == (1, False, [])
    done = run_here(capfd, "gc", made.uri, "--json", "--apply", *AT_ONCE_FLAGS)
    assert (done.code, set(done.document)) == (0, GC_KEYS)
    assert (done.document["decision"], done.document["apply"], done.document["drained"]) == ("deleted", True, 6)
    assert done.document["deleted"]["bytes"] == sum(item["bytes"] for item in done.document["delete"])
    assert done.document["deleted"]["objects"] == sum(item["objects"] for item in done.document["delete"])
    again = run_here(capfd, "gc", made.uri, "--json", "--apply", *AT_ONCE_FLAGS).document
    assert (again["decision"], again["deleted"]) == ("nothing_to_delete", {"objects": 0, "bytes": 0})
    sound(made)


def test_what_a_person_reads(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    write(made, "_mem_wal/readme.txt")
    text = " ".join(run_here(capfd, "gc", made.uri).out.split())
    assert text.startswith("nothing_to_delete:")
    for part in ("2 regions", "Held:", "not merged yet", "Unknown, and kept:", "_mem_wal/readme.txt"):
        assert part in text
    free(made)
    assert run_here(capfd, "gc", made.uri).out.startswith("nothing_to_delete:"), "a reader may keep a version open"
    text = " ".join(run_here(capfd, "gc", made.uri, *NONE_PINNED_FLAGS).out.split())
    assert text.startswith("planned:")
    assert "Add --apply to delete" in text
    text = " ".join(run_here(capfd, "gc", made.uri, "--apply", *NONE_PINNED_FLAGS).out.split())
    assert text.startswith("drained: 6 generations")
    text = " ".join(run_here(capfd, "gc", made.uri, "--apply", *AT_ONCE_FLAGS).out.split())
    assert text.startswith("deleted:")
    assert "WARNING: reader grace below" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_limits(made: LsmTable, limit: int, capfd: pytest.CaptureFixture[str]) -> None:
    free(made)
    document = run_here(capfd, "gc", made.uri, "--json", "--limit", str(limit), *AT_ONCE_FLAGS).document
    assert (len(document["delete"]), len(document["held"]), document["truncated"]) == (limit, limit, True)
    assert sum(document["counts"]["generation"].values()) == 6
    assert run_here(capfd, "gc", made.uri, "--json", "--limit", "1000", *AT_ONCE_FLAGS).document["truncated"] is False


def test_max_deletes(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    free(made)
    document = run_here(capfd, "gc", made.uri, "--json", "--apply", "--max-deletes", "5", *AT_ONCE_FLAGS).document
    assert (document["decision"], document["limited"], document["deleted"]["objects"]) == ("deleted", True, 5)
    assert run_here(capfd, "gc", made.uri, "--max-deletes", "0").code == 2
    assert "--max-deletes ended this run" in " ".join(
        run_here(capfd, "gc", made.uri, "--apply", "--max-deletes", "5", *AT_ONCE_FLAGS).out.split()
    )


@pytest.mark.parametrize("apply", [False, True])
def test_the_plan_file_has_everything(
    made: LsmTable, apply: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    free(made)
    write(made, "_mem_wal/readme.txt")
    file = tmp_path / "plan.jsonl"
    file.write_text("of yesterday")
    options = ("--limit", "1", "--plan-file", str(file), *(["--apply"] if apply else []), *AT_ONCE_FLAGS)
    document = run_here(capfd, "gc", made.uri, "--json", *options).document
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(
        set(line) == {*ITEM_KEYS, "verdict", "proof" if line["verdict"] == "delete" else "because"} for line in lines
    )
    counted = {
        kind: {verdict: sum((one["kind"], one["verdict"]) == (kind, verdict) for one in lines) for verdict in verdicts}
        for kind, verdicts in document["counts"].items()
    }
    assert counted == document["counts"]
    assert sum(one["bytes"] for one in lines if one["verdict"] == "delete") == document["bytes_reclaimable"]
    assert len({(one["path"], one["verdict"]) for one in lines}) == len(lines)
    assert set(os.listdir(tmp_path)) == {"plan.jsonl", "t.lance"}


def test_a_run_that_fails_writes_no_plan_file(
    made: LsmTable, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All regions were told already when the store went away."""
    told: list[str] = []

    def away(_: object) -> object:
        told.append("table")
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(job, "table_candidates", away)
    for kept in (None, "of yesterday"):
        file = tmp_path / "plan.jsonl"
        if kept is not None:
            file.write_text(kept)
        assert run_here(capfd, "gc", made.uri, "--plan-file", str(file)).code == 24
        assert (file.read_text() if file.exists() else None) == kept
        assert not list(tmp_path.glob(".plan*"))
    assert len(told) == 2
    assert run_here(capfd, "gc", made.uri, "--plan-file", str(tmp_path / "no/such/file")).code == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "timeline"),
    [
        (("--reader-grace", "59s"), "a reader reads the manifest, a merge commits"),
        (("--orphan-min-age", "59m"), "the writer publishes a generation that does not exist"),
        (("--manifest-retention", "1"), "the reader finds no version at all"),
        (("--fence-retention", "23h"), "its next write is acknowledged and lost"),
        (("--drain-after", "23h"), "the process reads without its rows, and without an error"),
    ],
)
@pytest.mark.parametrize("command", ["gc", "why"])
def test_values_that_lose_data_are_refused(
    made: LsmTable, command: str, options: tuple[str, str], timeline: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(made.uri)
    target = (made.regions[0],) if command == "why" else ("--apply",)
    refused = run_here(capfd, command, made.uri, *target, *options)
    assert (refused.code, refused.out) == (2, "")
    said = " ".join(refused.err.split())
    assert timeline in said
    assert f"{options[0]} below" in said
    assert "--allow-unsafe" in said
    assert contents(made.uri) == before
    target = target if command == "why" else ()
    allowed = run_here(capfd, command, made.uri, *target, *options, "--allow-unsafe", "--json")
    assert allowed.code == 0
    if command == "gc":
        assert timeline in allowed.document["warnings"][0]


def test_safe_minimums_are_allowed(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--reader-grace", "1m", "--orphan-min-age", "1h", "--manifest-retention", "2", "--fence-retention", "1d")
    options += ("--drain-after", "1d")
    assert run_here(capfd, "gc", made.uri, *options, "--json").document["warnings"] == []


@pytest.mark.parametrize("apply", [False, True])
def test_a_region_that_cannot_be_read(made: LsmTable, apply: bool, capfd: pytest.CaptureFixture[str]) -> None:
    free(made)
    damage.truncate_region_manifest(made.uri, made.regions[0], keep=3)
    ran = run_here(capfd, "gc", made.uri, "--json", *AT_ONCE_FLAGS, *(["--apply"] if apply else []))
    assert ran.code == 10
    (bad,) = ran.document["regions"]["unreadable"]
    assert bad["region_id"] == made.regions[0]
    assert bad["error"]
    assert {item["path"] for item in ran.document["unknown"]} == {f"_mem_wal/{made.regions[0]}"}
    assert ran.document["counts"]["generation"]["delete"] == 3


def test_deletions_that_fail(
    made: LsmTable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(made)
    folder = min(generation_folders(made))
    real = job.apply

    def apply(table: object, *arguments: object, **named: object) -> object:
        wrapped = refusing(lambda path: path.startswith(f"{folder}/data/"))(table.store)  # type: ignore[attr-defined]
        object.__setattr__(table, "store", wrapped)
        return real(table, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "apply", apply)
    ran = run_here(capfd, "gc", made.uri, "--json", "--apply", *AT_ONCE_FLAGS)
    assert (ran.code, ran.document["decision"]) == (27, "incomplete")
    assert all(one["path"].startswith(f"{folder}/data/") and one["error"] for one in ran.document["failed"])
    assert len(ran.document["failed"]) > 0
    text = run_here(capfd, "gc", made.uri, "--apply", *AT_ONCE_FLAGS)
    assert text.code == 27
    assert "NOT DELETED:" in text.out
    monkeypatch.undo()
    assert run_here(capfd, "gc", made.uri, "--json", "--apply", *AT_ONCE_FLAGS).document["decision"] == "deleted"
    assert generation_folders(made) == set()


# -- expire


def test_expire(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    merged(made)
    caught_up(made)
    open_dataset(made.uri).tags.create("audit", 2)
    newest = open_dataset(made.uri).version
    before = contents(made.uri)
    plan = run_here(capfd, "expire", made.uri, "--older-than", "0", "--allow-unsafe", "--json")
    assert contents(made.uri) == before
    assert plan.code == 0
    assert set(plan.document) == {
        *("decision", "apply", "counts", "expire", "kept", "failed", "unreadable", "put_back", "truncated", "objects"),
        *("bytes", "later", "frees_for_gc", "branches", "version", "warnings", "seconds", "run_id", "cost"),
    }
    assert plan.document["expire"] == [1, *range(3, newest)]
    assert plan.document["kept"] == [
        {"version": 2, "because": "tag audit at version 2", "old_enough": None},
        {"version": newest, "because": "the newest version", "old_enough": None},
    ]
    # Version 2 has no MemWAL index yet, so that it needs no generation.
    assert plan.document["frees_for_gc"]["generations"] == 6
    text = run_here(capfd, "expire", made.uri, "--older-than", "0", "--allow-unsafe").out
    assert text.startswith("planned:")
    assert "version 2 is kept: tag audit at version 2" in text
    young = run_here(capfd, "expire", made.uri, "--json").document
    assert young["decision"] == "nothing_to_expire"
    assert {one["old_enough"] is None for one in young["kept"] if "too young" in one["because"]} == {False}
    (week,) = {datetime.fromisoformat(one["old_enough"]).date() for one in young["kept"][:1]}
    assert timedelta(days=6) <= week - datetime.now(UTC).date() <= timedelta(days=8)
    assert "The first is old enough at" in run_here(capfd, "expire", made.uri).out
    done = run_here(capfd, "expire", made.uri, "--older-than", "0", "--allow-unsafe", "--apply", "--json").document
    assert (done["decision"], done["apply"], done["expire"]) == ("expired", True, plan.document["expire"])
    again = run_here(capfd, "expire", made.uri, "--older-than", "0", "--allow-unsafe", "--apply")
    assert (again.code, again.out.split(":")[0]) == (0, "nothing_to_expire")
    assert "The first is old enough at" not in again.out
    assert run_here(capfd, "expire", made.uri, "--keep", "0").code == 2
    assert run_here(capfd, "expire", made.uri, "--older-than", "soon").code == 2
    assert run_here(capfd, "gc", made.uri, "--json", *AT_ONCE_FLAGS).document["counts"]["generation"]["delete"] == 6


# -- hold


def test_hold(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    version = open_dataset(made.uri).version
    assert run_here(capfd, "hold", made.uri, "--list").out.strip() == "There is no hold."
    taken = run_here(capfd, "hold", made.uri, "--ttl", "3h", "--note", "a long report", "--json")
    assert taken.code == 0
    assert set(taken.document) == {"id", "version", "until", "by", "note", "released", "state"}
    assert {key: taken.document[key] for key in ("id", "version", "note", "released", "state")} == {
        "id": 1,
        "version": version,
        "note": "a long report",
        "released": False,
        "state": "standing",
    }
    said = run_here(capfd, "hold", made.uri, "--version", "2").out
    assert said.startswith("held: version 2 until ")
    assert "as hold 2" in said
    listed = run_here(capfd, "hold", made.uri, "--list", "--json").document["holds"]
    assert [(one["id"], one["version"]) for one in listed] == [(1, version), (2, 2)]
    merged(made)
    caught_up(made)
    expired(made)
    why = run_here(capfd, "gc", made.uri, "--json", *AT_ONCE_FLAGS).document["held"]
    generations = [item["because"] for item in why if item["kind"] == "generation"]
    assert len(generations) == 6
    assert all("hold 1 of " in one for one in generations)
    assert run_here(capfd, "hold", made.uri, "--release", "1").out == "released: hold 1.\n"
    assert run_here(capfd, "hold", made.uri, "--list", "--json").document["holds"][0]["state"] == "released"
    assert "a long report" in run_here(capfd, "hold", made.uri, "--list").out
    expired(made)
    assert run_here(capfd, "gc", made.uri, "--json", *AT_ONCE_FLAGS).document["counts"]["generation"]["delete"] == 6


def test_a_machine_whose_clock_is_ahead(
    made: LsmTable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hold stands as long as jobs respect it; plans, which write nothing, say whose clock they go by."""
    run_here(capfd, "hold", made.uri, "--ttl", "3h")
    for module in (hold, clock):
        monkeypatch.setattr(module, "datetime", Ahead)
    listed = run_here(capfd, "hold", made.uri, "--list", "--json").document
    assert [one["state"] for one in listed["holds"]] == ["standing"]
    taken = run_here(capfd, "hold", made.uri, "--version", "2", "--ttl", "1h", "--json").document
    assert taken["state"] == "standing"
    Path(made.uri, "_mem_wal_ops/clock").write_bytes(b"")  # nothing can be written there
    said = run_here(capfd, "hold", made.uri, "--list")
    assert said.out.count("ended") == 2
    assert said.out.endswith("by this machine's clock: the store cannot be written.\n")
    assert run_here(capfd, "hold", made.uri, "--list", "--json").document["clock"] == "local"
    for planned in (["gc", *AT_ONCE_FLAGS], ["expire", "--older-than", "0", "--allow-unsafe"]):
        said = run_here(capfd, planned[0], made.uri, *planned[1:])
        assert "by this machine's clock; --apply goes by the store's" in said.out, planned


class Ahead(datetime):
    """The clock of a machine that is four hours ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # the real class returns itself
        return datetime.now(tz) + timedelta(hours=4)


def test_holds_that_are_refused(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "hold", made.uri, "--version", "99").code == 26
    assert run_here(capfd, "hold", made.uri, "--version", "0").code == 2
    assert run_here(capfd, "hold", made.uri, "--release", "7").code == 2
    assert run_here(capfd, "hold", made.uri, "--ttl", "0").code == 2
    assert run_here(capfd, "hold", made.uri, "--list", "--release", "1").code == 2
    expired(made)
    assert run_here(capfd, "hold", made.uri, "--version", "1").code == 26
    assert run_here(capfd, "hold", made.uri, "--list", "--json").document == {"holds": []}


# -- why


def why(capfd: pytest.CaptureFixture[str], made: LsmTable, target: str, *options: str) -> list[dict[str, object]]:
    ran = run_here(capfd, "why", made.uri, target, "--json", *options)
    assert ran.code == 0, ran.err
    assert (set(ran.document), ran.document["target"]) == ({"decision", "target", "reasons"}, target)
    for reason in ran.document["reasons"]:
        wanted = "proof" if reason["verdict"] == "delete" else "because"
        assert set(reason) == {*ITEM_KEYS - {"kind"}, "kind", wanted, "verdict", "items", "gates"}
        assert reason["gates"]
        assert (reason["verdict"] == "delete") == all(gate["met"] for gate in reason["gates"])
    found = ran.document["reasons"]
    assert isinstance(found, list)
    return found


def test_why_a_generation(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    region = made.regions[0]
    before = contents(made.uri)
    (reason,) = why(capfd, made, f"{region}/2")
    assert (reason["kind"], reason["generation"], reason["verdict"]) == ("generation", 2, "held")
    assert "not merged yet" in str(reason["because"])
    folder = str(reason["path"])
    assert contents(made.uri) == before
    free(made)
    for target in (f"{region}/2", f"{region[:8]}/2", folder, f"{folder}/", f"{made.uri}/{folder}", f"{folder}/data"):
        (reason,) = why(capfd, made, target, *NONE_PINNED_FLAGS)
        assert reason["path"] == folder
        assert "listed by region manifest version" in str(reason["because"])
        assert sum(not gate["met"] for gate in reason["gates"]) == 1  # type: ignore[attr-defined]
        (reason,) = why(capfd, made, target, *AT_ONCE_FLAGS)
        assert reason["verdict"] == "delete"
    assert "  - merged less than --drain-after" in run_here(capfd, "why", made.uri, f"{region}/2").out
    text = run_here(capfd, "why", made.uri, f"{region}/2", *NONE_PINNED_FLAGS).out
    assert f"{folder} (" in text
    assert "is kept:" in text
    assert "  + merged: " in text
    assert "  - listed by region manifest version" in text


def test_why_a_region(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    region = made.regions[0]
    write(made, f"_mem_wal/{region}/note")
    whole = why(capfd, made, region)
    assert {reason["region_id"] for reason in whole} == {region}
    assert {reason["kind"] for reason in whole} == {"generation", "wal_entry", "region_manifest", "unknown"}
    log = [reason for reason in whole if reason["kind"] == "wal_entry"]
    assert sum(int(str(reason["items"])) for reason in log) == len(entries(made, region)) > len(log)
    one_by_one = why(capfd, made, f"_mem_wal/{region}/wal")
    assert {reason["path"] for reason in one_by_one} == set(entries(made, region).values())
    assert sum(int(str(reason["bytes"])) for reason in one_by_one) == sum(int(str(r["bytes"])) for r in log)
    assert "more like it" in run_here(capfd, "why", made.uri, region).out
    (manifest,) = why(capfd, made, f"_mem_wal/{region}/manifest/{bit_reversed(1)}.binpb")
    assert manifest["kind"] == "region_manifest"
    everything = why(capfd, made, "_mem_wal")
    assert [reason for reason in everything if reason["region_id"] == region] == whole
    (stray,) = why(capfd, made, f"{region}/note")
    assert stray["verdict"] == "unknown"
    assert "is unknown, and kept" in run_here(capfd, "why", made.uri, f"{region}/note").out


@pytest.mark.parametrize("option", ["--max-deletes", "--plan-file", "--limit"])
def test_why_has_no_options_that_would_do_nothing(
    made: LsmTable, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = run_here(capfd, "why", made.uri, made.regions[0], option, "1")
    assert (refused.code, refused.out) == (2, "")
    assert option in refused.err
    with pytest.raises(InvalidUsageError, match="There is no option"):
        run_job(made.uri, "why", target=made.regions[0], **{option.removeprefix("--").replace("-", "_"): "1"})


def test_why_a_version(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    def of(version: int) -> dict[str, object]:
        (reason,) = why(capfd, made, f"_versions/{2**64 - 1 - version:020d}.manifest")
        assert reason["kind"] == "base"
        return reason

    newest = open_dataset(made.uri).version
    assert of(newest)["because"] == "the newest version"
    assert "too young" in str(of(1)["because"])
    age(made, "_versions/*.manifest", 8 * DAY)
    assert of(1)["verdict"] == "delete"
    open_dataset(made.uri).tags.create("audit", 1)
    assert of(1)["because"] == "tag audit at version 1"
    assert "deleted with the last version that refers to it" in str(why(capfd, made, "data")[0]["because"])


def test_why_a_leftover_heeds_the_options(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    killed_commit(table_of(made), "put_if_absent", after=False)
    left = min(path.name for path in Path(made.uri, "_versions").glob("d*"))
    (reason,) = why(capfd, made, f"_versions/{left}")
    assert (reason["kind"], reason["verdict"]) == ("leftover", "held")
    (reason,) = why(capfd, made, f"_versions/{left}", *AT_ONCE_FLAGS)
    assert reason["verdict"] == "delete"


def test_why_of_nothing(made: LsmTable, capfd: pytest.CaptureFixture[str]) -> None:
    region = made.regions[0]
    unknown = (
        "no/such/file",
        "_versions/99.manifest",
        f"{region}/99",
        f"_mem_wal/{region}/0badcafe_gen_1",
        str(uuid4()),
        f"{uuid4()}/1",
    )
    for target in unknown:
        ran = run_here(capfd, "why", made.uri, target)
        assert (ran.code, ran.out) == (25, ""), target
        assert "does not exist in" in ran.err
    assert run_here(capfd, "why", made.uri, "/").code == 2
