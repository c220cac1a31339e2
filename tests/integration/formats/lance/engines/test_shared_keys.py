"""Regions that share keys, or cannot be read: however many there are, one pass over their rows finds them all."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, MergePass
from memwal_ops.formats.lance.engines.merge.passes import LocalMergeEngine
from memwal_ops.formats.lance.jobs import merge
from tests.integration.contracts.small import flush, keys, make, rows, values

if TYPE_CHECKING:
    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine, PassResult

pytestmark = pytest.mark.timeout(1800)  # the first test on Spark starts it, on whatever machine this runs
REGIONS = [str(uuid.UUID(int=number, version=4)) for number in range(1, 13)]


class Counting:
    """An engine that counts the passes that were tried."""

    def __init__(self, engine: MergeEngine | None) -> None:
        self.engine = engine or LocalMergeEngine()
        self.name = self.engine.name
        self.passes = 0

    def run(self, *arguments: Any) -> PassResult:
        self.passes += 1
        return self.engine.run(*arguments)


def merged(uri: str, engine: MergeEngine | None) -> tuple[merge.MergeReport, int]:
    counting = Counting(engine)
    return merge.apply(open_table(uri), merge.MergeOptions(), engine=counting), counting.passes


@pytest.mark.sampled(1)
@pytest.mark.req("S0-009")
def test_regions_that_share_keys_are_all_found_in_one_pass(tmp_path: Path, engine: MergeEngine | None) -> None:
    """Region 0 alone shares nothing; 1 to 9 share key 5, 8 to 11 keys 6 and 7, each in two generations."""
    uri = make(tmp_path)
    for number, region in enumerate(REGIONS):
        flush(uri, rows(100 + number, 101 + number, number), region=region)
        if 1 <= number <= 9:
            flush(uri, rows(5, 6, number), region=region)
        if number >= 8:
            flush(uri, rows(6, 8, number), region=region)
    report, passes = merged(uri, engine)
    assert report.decision == "blocked"
    assert {one.error.reason for one in report.blocked} == {"duplicate_keys"}
    counts = {
        str(one.region_id): (int(found[1]), {int(key) for key in re.findall(r"'id': (\d+)", found[0])})
        for one in report.blocked
        if (
            found := re.match(
                rf"(\d+) keys? of region {one.region_id} (?:is|are) in another region as well, .*", str(one.error)
            )
        )
    }
    assert {region: count for region, (count, _) in counts.items()} == {
        region: (1 if number <= 7 else 3 if number <= 9 else 2) for number, region in enumerate(REGIONS) if number
    }
    for number, region in enumerate(REGIONS[1:], 1):
        examples = counts[region][1]
        assert examples
        assert examples <= ({5} if number <= 9 else set()) | ({6, 7} if number >= 8 else set())
    # The second one is that of the region that is left.
    assert passes == 2
    assert {key: found for key, found in values(uri).items() if found != [0.0] or key >= 100} == {100: [0.0]}


def test_generations_that_cannot_be_read_are_all_found_in_one_pass(tmp_path: Path) -> None:
    """The files are there, and long enough: only reading the keys shows what is wrong."""
    uri = make(tmp_path)
    generations = {
        region: [flush(uri, rows(number, number + 1, 1), region=region) for _ in range(2)]
        for number, region in enumerate(REGIONS)
    }
    for region in REGIONS[1:]:
        for generation in generations[region]:
            (path,) = Path(generation, "data").glob("*.lance")
            path.write_bytes(b"\xff" * path.stat().st_size)
    report, passes = merged(uri, None)
    assert [(str(one.region_id), one.generation, one.error.reason) for one in report.blocked] == [
        (region, 1, "generation_corrupt") for region in REGIONS[1:]
    ]
    assert passes == 2
    assert values(uri)[0] == [1.0]


class Comparing(Counting):
    """And how often the keys of all regions were compared."""

    compared = 0

    def refuse_shared_keys(self, *arguments: Any) -> None:
        self.compared += 1
        self.engine.refuse_shared_keys(*arguments)


def merged_in_passes(uri: str, engine: MergeEngine | None, **options: Any) -> tuple[merge.MergeReport, Comparing]:
    comparing = Comparing(engine)
    options = {"max_generations": 1, **options}
    return merge.apply(open_table(uri), merge.MergeOptions(**options), engine=comparing), comparing


@pytest.mark.sampled(1)
@pytest.mark.req("S0-009")
def test_a_key_in_two_regions_is_found_where_each_region_has_passes_of_its_own(
    tmp_path: Path, engine: MergeEngine | None
) -> None:
    """Passes of one generation: none of them sees two regions. A tombstone, which leaves no row, is a write as well."""
    uri = make(tmp_path)
    for number, region in enumerate(REGIONS[:6]):
        flush(uri, rows(100 + 10 * number, 104 + 10 * number, number), region=region)
    flush(uri, rows(0, 2, 1), region=REGIONS[1])
    flush(uri, rows(1, 3, 4), region=REGIONS[4])
    flush(uri, keys(7), region=REGIONS[2])
    flush(uri, rows(7, 8, 5), region=REGIONS[5])
    before = lance.dataset(uri).version
    report, engine_ = merged_in_passes(uri, engine)
    assert report.decision == "blocked"
    assert {str(one.region_id): (one.generation, one.error.reason) for one in report.blocked} == {
        REGIONS[number]: (None, "duplicate_keys") for number in (1, 2, 4, 5)
    }
    said = {str(one.region_id): str(one.error) for one in report.blocked}
    assert said[REGIONS[1]].startswith(
        f"1 key of region {REGIONS[1]} is in another region as well, for example [{{'id': 1}}]"
    )
    assert "{'id': 7}" in said[REGIONS[2]]
    # The others are merged, one pass for each; none of those that share was, nor is it by the next run.
    assert (len(report.passes), lance.dataset(uri).version) == (2, before + 2)
    assert {region_id for one in report.passes for region_id in map(str, one.merge_pass.regions)} == {
        REGIONS[0],
        REGIONS[3],
    }
    assert engine_.compared == 2, "what shares none is compared again, as not all of it was"
    again, _ = merged_in_passes(uri, engine)
    assert (again.decision, len(again.blocked), again.passes) == ("blocked", 4, ())
    # The remedy: one by one, in the order in which they should win.
    for number in (4, 1, 5, 2):
        one, comparing = merged_in_passes(uri, engine, regions=(uuid.UUID(REGIONS[number]),))
        assert (one.decision, comparing.compared) == ("merged", 0), "of one region there is nothing to compare"
    found = values(uri)
    assert (found[1], 7 in found) == ([1.0], False)


def test_what_one_pass_holds_is_not_read_twice(tmp_path: Path, engine: MergeEngine | None) -> None:
    uri = make(tmp_path)
    for number, region in enumerate(REGIONS[:3]):
        flush(uri, rows(100 + 10 * number, 104 + 10 * number, number), region=region)
    report, comparing = merged_in_passes(uri, engine, max_generations=None)
    assert (report.decision, len(report.passes), comparing.compared) == ("merged", 1, 0)


def test_distinct_keys_are_compared_once(tmp_path: Path, engine: MergeEngine | None) -> None:
    uri = make(tmp_path)
    for number, region in enumerate(REGIONS[:3]):
        for _ in range(2):
            flush(uri, rows(100 + 10 * number, 104 + 10 * number, number), region=region)
    report, comparing = merged_in_passes(uri, engine)
    assert (report.decision, len(report.passes), comparing.compared) == ("merged", 6, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.binary(), pa.uint64()], ids=str)
def test_keys_beyond_the_budget_are_compared_in_parts(tmp_path: Path, kind: pa.DataType) -> None:
    """A budget of a few kilobytes: many parts, the same answer as from one."""
    schema = pa.schema([pa.field("id", kind, nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})])

    def some(first: int, last: int) -> pa.Table:
        return pa.table({"id": pa.array([*map(str, range(first, last))]).cast(kind)}, schema=schema)

    uri = str(tmp_path / "t.lance")
    lance.write_dataset(some(0, 1), uri).initialize_mem_wal()
    for number, region in enumerate(REGIONS[:4]):
        flush(uri, some(1000 * (number + 1), 1000 * (number + 1) + 500), region=region)
        if number in {1, 3}:
            flush(uri, some(100_000, 100_200), region=region)
    table = open_table(uri)
    (plan,) = merge.plan(table, merge.MergeOptions()).passes
    blocked: list[dict[str, str]] = []
    for budget in (16 << 10, 1 << 30):
        with pytest.raises(BlockedRegionsError) as refused:
            LocalMergeEngine().refuse_shared_keys(table, MergePass(plan.merge_pass.generations, budget))
        blocked.append({str(region): str(error) for region, (_, error) in refused.value.causes.items()})
    assert [[*one] for one in blocked] == [[REGIONS[1], REGIONS[3]]] * 2
    for one in blocked:
        assert all(said.startswith(f"200 keys of region {region} are in another") for region, said in one.items())


def test_what_cannot_be_read_while_keys_are_compared_is_named_as_such(tmp_path: Path) -> None:
    uri = make(tmp_path)
    for region in REGIONS[:4]:
        last = flush(uri, rows(5, 6, 1), region=region)
    (path,) = Path(last, "data").glob("*.lance")
    path.write_bytes(b"\xff" * path.stat().st_size)
    report, _ = merged_in_passes(uri, None)
    assert {str(one.region_id): (one.generation, one.error.reason) for one in report.blocked} == {
        REGIONS[3]: (1, "generation_corrupt"), **dict.fromkeys(REGIONS[:3], (None, "duplicate_keys"))
    }  # fmt: skip
    assert report.passes == ()
