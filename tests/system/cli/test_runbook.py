"""runbooks/merge-blocked.md: a section for every reason, and commands that run and show what it says they show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops import errors
from tests.support.run_cli import contents, run_here
from tests.support.runbook import commands, shell
from tests.support.tables import damage
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload

RUNBOOK = Path(__file__).parents[3] / "runbooks/merge-blocked.md"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL))
PREAMBLE = RUNBOOK.read_text().split("\n## ", 1)[0]
# What a region can be blocked by: every reason between the code for blocked and those of the store, but the
# one that never leaves the place where bytes are decoded.
REASONS = {
    found.reason
    for found in vars(errors).values()
    if isinstance(found, type)
    and issubclass(found, errors.MemwalOpsError)
    and (10 < found.exit_code < 17 or found.exit_code in {29, 65, 66})
}


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(1, regions=2, base_rows=40).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.put([0, 2])
        made.put([1, 3])
        made.flush()
    return made


def region(table: Workload) -> dict[str, str]:
    return {"URI": table.uri, "REGION": table.regions[0]}


def environment(table: Workload, generation: int = 2) -> dict[str, str]:
    path = damage.generation_path(table.uri, table.regions[0], generation)
    return {**region(table), "GENERATION": f"{path.parent.name}/{path.name}"}


def blocked(table: Workload, capfd: pytest.CaptureFixture[str]) -> str:
    """Merge, which ends blocked; the first entry's detail."""
    outcome = run_here(capfd, "merge", table.uri, "--json")
    assert outcome.code == 10
    detail = outcome.document["blocked"][0]["detail"]
    assert isinstance(detail, str)
    return detail


def assert_goes_on(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "merge", table.uri, "--json").document["decision"] == "merged"
    assert read_base(table.uri) == table.expected()


def test_a_section_for_every_reason() -> None:
    assert len(REASONS) == 9
    assert set(SECTIONS) == REASONS
    for section in SECTIONS.values():
        for part in ("**What it means.**", "**Look.**", "**Do.**", "**Never"):
            assert section.count(part) == 1


@pytest.mark.long
def test_the_first_commands(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    damage.remove_generation(table.uri, table.regions[0], 2)
    _, look, as_json, *_ = commands(PREAMBLE)
    code, said = shell(look, URI=table.uri)
    assert code == 0
    assert f"PROBLEM in region {table.regions[0]} at generation 2: generation_missing" in said
    code, said = shell(as_json, URI=table.uri)
    assert code == 10
    for key in ("region_id", "generation", "reason", "detail"):
        assert f'"{key}"' in said
    before = contents(table.uri)
    assert shell(as_json, URI=table.uri)[0] == 10
    assert contents(table.uri) == before, "running it again changes nothing while the cause stands"


def test_generation_missing(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    variables = environment(table)
    folder = damage.generation_path(table.uri, table.regions[0], 2)
    shutil.move(folder, f"{table.uri}.backup")
    blocked(table, capfd)
    look, listing = commands(SECTIONS["generation_missing"])
    code, said = shell(look, **variables)
    assert code == 0
    assert f'"path": "{folder.name}"' in said
    assert '"generation": 2,' in said
    code, said = shell(listing, **variables)
    assert code == 0
    assert "manifest" in said.splitlines()
    assert folder.name not in said
    shutil.move(f"{table.uri}.backup", folder)
    assert_goes_on(table, capfd)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["gone", "cut", "emptied"])
def test_generation_corrupt(table: Workload, capfd: pytest.CaptureFixture[str], how: str) -> None:
    variables = environment(table)
    read, empty = commands(SECTIONS["generation_corrupt"])
    assert shell(read, **variables)[0] == 0
    assert shell(empty, **variables) == (0, "")
    folder = damage.generation_path(table.uri, table.regions[0], 2)
    file = next((folder / "data").iterdir())
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2 if how == "cut" else 0])
    detail = blocked(table, capfd)
    assert file.name in detail or how != "gone"
    assert folder.name in detail
    code, said = shell(read, **variables)
    assert code != 0
    assert file.name in said or how != "gone"
    assert (file.name in shell(empty, **variables)[1]) is (how == "emptied")
    file.write_bytes(data)
    assert_goes_on(table, capfd)


def test_region_manifest_corrupt(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    file = damage.region_manifest_path(table.uri, table.regions[0])
    data = file.read_bytes()
    damage.truncate_region_manifest(table.uri, table.regions[0])
    detail = blocked(table, capfd)
    named = re.search(r"manifest version (\d+)", detail)
    assert named is not None
    export, listing, one = commands(SECTIONS["region_manifest_corrupt"])
    assert shell(export)[0] == 0
    variables = {**region(table), "VERSION": named.group(1)}
    assert file.name in shell(listing, **variables)[1]
    code, said = shell(one, **variables)
    assert code == 0
    assert said.rstrip().endswith(file.name)
    file.write_bytes(data)
    assert_goes_on(table, capfd)


def test_region_manifest_gap(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    newest = damage.region_manifest_path(table.uri, table.regions[0])
    file = damage.region_manifest_path(table.uri, table.regions[0], 3)
    assert newest != file
    data = file.read_bytes()
    damage.remove_region_manifest_version(table.uri, table.regions[0], 3)
    assert "version 3 is missing" in blocked(table, capfd)
    versions, hint = commands(SECTIONS["region_manifest_gap"])
    code, said = shell(versions, **region(table))
    assert code == 0
    standing = [int(number) for number in said.strip("[]\n").split(",")]
    assert standing == [number for number in range(1, standing[-1] + 1) if number != 3]
    code, said = shell(hint, **region(table))
    assert code == 0
    assert str(standing[-1]) in said
    file.write_bytes(data)
    assert_goes_on(table, capfd)


@pytest.mark.long
def test_schema_projection(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    variables = environment(table)
    folder = damage.generation_path(table.uri, table.regions[0], 2)
    shutil.copytree(folder, f"{table.uri}.backup")
    lance.dataset(str(folder)).alter_columns({"path": "val", "data_type": pa.float64()})
    detail = blocked(table, capfd)
    assert "'val'" in detail
    base, generation, versions, *adopt = commands(SECTIONS["schema_projection"])
    base, generation, versions = (shell(line, **variables) for line in (base, generation, versions))
    assert (base[0], generation[0], versions[0]) == (0, 0, 0)
    assert "val: float\n" in base[1]
    assert "val: double\n" in generation[1]
    assert len(versions[1].splitlines()) == lance.dataset(table.uri).version
    plan, apply, merge = adopt
    code, said = shell(plan, **variables)
    assert (code, said.split()[0]) == (0, "nothing_to_adopt:"), "a changed type is nothing that one could assert"
    assert (apply, merge) == (f"{plan.split('   ')[0]} --apply", 'memwal-ops merge "$URI"')
    shutil.rmtree(folder)
    shutil.copytree(f"{table.uri}.backup", folder)
    assert_goes_on(table, capfd)


@pytest.mark.long
def test_duplicate_keys(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    # Against the order of their ids, in which a merge of all would take them.
    winner, loser = sorted(range(2), key=lambda at: table.regions[at])
    for number, name in enumerate(table.regions):
        with lance.dataset(table.uri).mem_wal_writer(name) as writer:
            row = {"id": 5, "val": float(number), "txt": "who wins?"}
            writer.put(pa.Table.from_pylist([row], schema=lance.dataset(table.uri).schema))
    assert "5" in blocked(table, capfd)
    variables = {"URI": table.uri, "WINNER": table.regions[winner], "LOSER": table.regions[loser]}
    for line in commands(SECTIONS["duplicate_keys"]):
        code, said = shell(line, **variables)
        assert code == 0, said
    assert read_base(table.uri)[(5,)]["val"] == float(winner)
    assert run_here(capfd, "merge", table.uri, "--json").document["decision"] == "nothing_to_merge"


@pytest.mark.long
def test_region_replaced(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "merge", table.uri).code == 0
    table.close()
    shutil.rmtree(Path(table.uri, "_mem_wal", table.regions[0]))
    for number in (40, 42, 44, 46):
        table.put([number])
        table.flush()
    table.close()
    detail = blocked(table, capfd)
    assert f"memwal-ops adopt URI --region {table.regions[0]} --as unmerged" in detail
    variables = environment(table, 1)
    said = []
    *first, recreated = commands(SECTIONS["region_replaced"])
    assert "--up-to 3" in recreated
    code, text = shell(recreated, **variables)
    assert code == 2, "its table's index was never removed"
    assert "--up-to must be in between" in text
    for line in first:
        code, text = shell(line, **variables)
        assert code == 0, text
        said.append(text)
    look, planned, waits, base, _, adopted, merged = said
    assert "region_replaced" in look
    assert planned.startswith("planned: 1 region as unmerged.")
    key = re.search(r"'id': \d+", waits)
    assert key is not None
    assert key[0] not in base
    assert adopted.startswith("adopted: 1 region as unmerged.")
    assert merged.startswith("merged: 4 generations")
    assert read_base(table.uri) == table.expected()
