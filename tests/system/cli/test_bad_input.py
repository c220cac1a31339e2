"""Bad input: its own exit code, a message that says what, why and what to do, and an untouched table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.storage.options import redact
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.run_cli import contents, run_here, run_process
from tests.support.s3_server import options_for
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOREVER = 10**9
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # the documented example, no real one


def made(path: Path, **options: object) -> Workload:
    """Two regions with three generations each, nothing merged."""
    table = Workload(1, regions=2, base_rows=60, **options).create(str(path / "t.lance"))
    for _ in range(3):
        table.step(6)
        for region in table.regions:
            table.put([table.regions.index(region)])
        table.flush()
    return table


def no_such_table(path: Path) -> str:
    return str(path / "nothing.lance")


def empty_folder(path: Path) -> str:
    (path / "empty").mkdir()
    return str(path / "empty")


def a_file(path: Path) -> str:
    (path / "file.lance").write_text("not a table")
    return str(path / "file.lance")


def junk(path: Path) -> str:
    (path / "junk/_versions").mkdir(parents=True)
    (path / "junk/data.txt").write_text("x")
    (path / "junk/_versions/readme").write_text("x")
    return str(path / "junk")


def overwritten(path: Path) -> str:
    uri = made(path).uri
    lance.write_dataset(pa.table({"id": [1, 2]}), uri, mode="overwrite")
    return uri


def no_primary_key(path: Path) -> str:
    lance.write_dataset(pa.table({"id": [1, 2]}), str(path / "keyless.lance"))
    damage.put_empty_details(str(path / "keyless.lance"))
    return str(path / "keyless.lance")


def legacy(path: Path) -> str:
    lance.write_dataset(pa.table({"id": [1, 2]}), str(path / "old.lance"))
    damage.put_legacy_details(str(path / "old.lance"))
    return str(path / "old.lance")


def unknown_reader_flag(path: Path) -> str:
    uri = made(path).uri
    damage.set_feature_flag(uri)
    return uri


def unknown_writer_flag(path: Path) -> str:
    uri = made(path).uri
    damage.set_feature_flag(uri, reader=False)
    return uri


def mixed_names(path: Path) -> str:
    uri = made(path).uri
    damage.mix_manifest_names(uri)
    return uri


def truncated_manifest(path: Path) -> str:
    uri = made(path).uri
    name = wire.newest_manifest(Files(uri))[0]
    data = Files(uri).get(name)
    Files(uri).put(name, data[: len(data) // 2])
    return uri


WHOLE: list[tuple[Callable[[Path], str], int, list[str]]] = [
    (no_such_table, 3, ["nothing.lance", "Check the URI"]),
    (empty_folder, 3, ["empty"]),
    (a_file, 4, ["file.lance"]),
    (junk, 4, ["junk", "_versions"]),
    (overwritten, 5, ["t.lance", "has 2 regions: ", "Run memwal-ops inspect URI"]),
    (no_primary_key, 6, ["primary key", "lance-schema:unenforced-primary-key"]),
    (unknown_reader_flag, 8, [str(1 << 40), "Upgrade"]),
    (mixed_names, 9, ["both schemes"]),
    (truncated_manifest, 9, ["manifest"]),
]


@pytest.mark.sampled(5)
@pytest.mark.req("S0-002", "S3-012", "S3-047")
@pytest.mark.parametrize("command", ["inspect", "merge"])
@pytest.mark.parametrize(("build", "code", "parts"), WHOLE, ids=[build.__name__ for build, _, _ in WHOLE])
def test_a_table_that_cannot_be_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, build: object, code: int, parts: list[str]
) -> None:
    uri = build(tmp_path)  # type: ignore[operator]
    if build is overwritten and command == "inspect":
        command = "verify"  # inspect shows it
    before = contents(str(tmp_path))
    outcome = run_here(capfd, command, uri)
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    for part in parts:
        assert part in outcome.err
    assert "Traceback" not in outcome.err
    with_json = run_here(capfd, command, uri, "--json")
    assert with_json.code == code
    error = with_json.document["error"]
    assert set(error) == {"reason", "message", "remedy", "exit_code", "runbook"}
    assert error["exit_code"] == code
    assert f"See {error['runbook']}\n" in outcome.err
    assert error["remedy"]
    assert contents(str(tmp_path)) == before


def test_a_legacy_table_refuses_what_does_not_apply(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = legacy(tmp_path)
    before = contents(uri)
    for command in ("catchup", "compact", "snapshot", "expire", "adopt", "init"):
        outcome = run_here(capfd, command, uri)
        assert outcome.code == 7, (command, outcome.err)
        assert "mem_wal_list" in outcome.err
        assert "legacy" in outcome.err
    assert run_here(capfd, "inspect", uri).code == 0
    assert contents(uri) == before


@pytest.mark.req("S3-013")
def test_a_table_that_can_be_read_but_must_not_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = unknown_writer_flag(tmp_path)
    before = contents(uri)
    assert run_here(capfd, "inspect", uri).code == 0
    for arguments in (["merge", uri], ["merge", uri, "--dry-run"]):
        outcome = run_here(capfd, *arguments)
        assert outcome.code == 8
        assert str(1 << 40) in outcome.err
    assert contents(uri) == before


def test_v1_names_are_refused_with_the_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    rows = pa.table({"id": [1, 2]}, schema=pa.schema([key]))
    uri = str(tmp_path / "v1.lance")
    damage.make_v1_named_table(uri, rows).initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
        writer.put(rows)
    before = contents(uri)
    outcome = run_here(capfd, "merge", uri)
    assert outcome.code == 8
    assert "migrate_manifest_paths_v2" in outcome.err
    assert contents(uri) == before
    lance.dataset(uri).migrate_manifest_paths_v2()
    assert run_here(capfd, "merge", uri).code == 0


def cut_data(uri: str, region: str, generation: int) -> None:
    folder = damage.generation_path(uri, region, generation)
    data = next((folder / "data").iterdir())
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def change_type(uri: str, region: str, generation: int) -> None:
    # pylance refuses to change a type under MemWAL (landmine 14), so another column takes its place.
    folder = damage.generation_path(uri, region, generation)
    lance.dataset(str(folder)).alter_columns({"path": "val", "data_type": pa.float64()})


REGION_FAULTS: list[tuple[Callable[[str, str, int], object], str, int | None]] = [
    (lambda uri, region, _: damage.truncate_region_manifest(uri, region), "region_manifest_corrupt", None),
    (lambda uri, region, _: damage.truncate_region_manifest(uri, region, keep=0), "region_manifest_corrupt", None),
    (lambda uri, region, _: damage.flip_region_manifest(uri, region), "region_manifest_corrupt", None),
    (lambda uri, region, _: damage.remove_region_manifest_version(uri, region, 3), "region_manifest_gap", None),
    (damage.remove_generation, "generation_missing", 2),
    (damage.truncate_generation_manifest, "generation_corrupt", 2),
    (damage.remove_generation_data, "generation_corrupt", 2),
    (cut_data, "generation_corrupt", 2),
    (change_type, "schema_projection", 2),
]
FAULT_IDS = [
    "region manifest cut", "region manifest empty", "region manifest flipped", "gap", "generation gone",
    "generation manifest cut", "data gone", "data cut", "type changed",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.req("S0-009", "S0-038", "S0-050")
@pytest.mark.parametrize(("hurt", "reason", "generation"), REGION_FAULTS, ids=FAULT_IDS)
@pytest.mark.parametrize("slices", [[], ["--max-generations", "1"]], ids=["at-once", "one-by-one"])
def test_a_damaged_region_stops_alone(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    hurt: Callable[[str, str, int], object],
    reason: str,
    generation: int | None,
    slices: list[str],
) -> None:
    table = made(tmp_path)
    bad, good = table.regions
    hurt(table.uri, bad, 2)
    hurt_region = contents(f"{table.uri}/_mem_wal")
    outcome = run_here(capfd, "merge", table.uri, "--json", *slices)
    assert outcome.code == 10, outcome
    (entry,) = outcome.document["blocked"]
    assert (entry["region_id"], entry["generation"], entry["reason"]) == (bad, generation, reason)
    assert len(entry["detail"]) > 40
    assert contents(f"{table.uri}/_mem_wal") == hurt_region, "regions belong to their writers"
    merged = dict(wire.progress(Files(table.uri)))
    assert merged.get(bad, 0) == (0 if generation is None else generation - 1)
    assert merged[good] == max(wire.region_manifest(Files(table.uri), good).generations)
    assert read_base(table.uri) == table.expected(merged)
    version = lance.dataset(table.uri).version
    again = run_here(capfd, "merge", table.uri, *slices)
    assert (again.code, lance.dataset(table.uri).version) == (10, version)
    assert reason in again.out
    assert reason in run_here(capfd, "inspect", table.uri).out or generation is not None


@pytest.mark.req("S0-009")
def test_one_key_in_two_regions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = made(tmp_path)
    for number, region in enumerate(table.regions):
        with lance.dataset(table.uri).mem_wal_writer(region) as writer:
            row = {"id": 5, "val": float(number), "txt": "who wins?"}
            writer.put(pa.Table.from_pylist([row], schema=lance.dataset(table.uri).schema))
    before = contents(table.uri)
    outcome = run_here(capfd, "merge", table.uri, "--json")
    assert outcome.code == 10
    assert {entry["reason"] for entry in outcome.document["blocked"]} == {"duplicate_keys"}
    assert {entry["region_id"] for entry in outcome.document["blocked"]} == set(table.regions)
    assert "--region" in outcome.document["blocked"][0]["detail"]
    assert contents(table.uri) == before
    for region in table.regions:
        assert run_here(capfd, "merge", table.uri, "--region", region).code == 0
    assert read_base(table.uri)[(5,)]["val"] == 1.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--region", "no-uuid"], "region id"),
        (["--region", "00000000-0000-4000-8000-00000000abcd"], "has no region"),
        (["--region", "00000000-0000-4000-8000-00000000"], "begins with"),
        (["--max-bytes", "many"], "64MiB"),
        (["--max-bytes", "0"], "--max-bytes"),
        (["--max-bytes", "10"], "'10' has no unit; write for example 10B, 10MiB or 10GiB"),
        (["--max-generations", "0"], "--max-generations"),
        (["--engine", "flink"], "--engine"),
        (["--engine", "local", "--master", "local[2]"], "--master"),
        (["--storage-option", SECRET], "KEY=VALUE"),
        (["--storage-option", "foo=bar"], "There is no storage option 'foo'."),
        (["--storage-option", "aws_endpont=x"], "Did you mean aws_endpoint?"),
        (["--frob"], "No such option"),
    ],
)
def test_a_wrong_option(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    table = made(tmp_path)
    before = contents(table.uri)
    outcome = run_here(capfd, "merge", table.uri, *arguments)
    assert outcome.code == 2
    assert part in outcome.err
    assert SECRET not in outcome.err
    assert contents(table.uri) == before


@pytest.mark.parametrize("options", [{"account_name": "a"}, {"google_service_account": "k"}, {"timeout": "3s"},
                                     {"region": "r", "aws_profile": "p", "aws_sts_endpoint": "e"}])  # fmt: skip
def test_options_of_other_stores_may_be_shared(tmp_path: Path, options: dict[str, str]) -> None:
    table = made(tmp_path)
    assert open_table(table.uri, options).revision


def test_a_scheme_that_there_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    """The mask takes the first part of abfss://CONTAINER@ACCOUNT for no secret, but a password for one."""
    assert "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH" in run_here(capfd, "inspect", "abcd://x").err
    assert redact("abfss://logs@acme.dfs.core.windows.net/x") == "abfss://logs@acme.dfs.core.windows.net/x"
    for uri in ("abfss://me:word@acme/x", "https://me:word@host/x", "https://word@host/x", "s3://word@bucket/x"):
        assert "word" not in redact(uri)


@pytest.mark.long
def test_read_only_files(tmp_path: Path) -> None:
    table = made(tmp_path)
    damage.make_read_only(table.uri)
    try:
        before = contents(table.uri)
        looked = run_process("inspect", table.uri, wrap=damage.held_by_permissions)
        assert looked.code == 0, looked.err
        outcome = run_process("merge", table.uri, wrap=damage.held_by_permissions)
        assert outcome.code == 22, outcome.err
        assert "write permission" in outcome.err
        assert contents(table.uri) == before
    finally:
        damage.make_writable(table.uri)


def options(endpoint: str, **more: str) -> list[str]:
    """``--storage-option`` for the server at ``endpoint``."""
    return [
        word
        for key, value in {**options_for(endpoint), **more}.items()
        for word in ("--storage-option", f"{key}={value}")
    ]


@pytest.fixture
def remote(s3_bucket: str, s3_options: dict[str, str]) -> Workload:
    """A table on S3, nothing merged."""
    table = Workload(4, regions=2, base_rows=60).create(f"s3://{s3_bucket}/t.lance", s3_options)
    for _ in range(2):
        table.step(5)
        table.flush()
    return table


@pytest.mark.long
@pytest.mark.s3
def test_merge_on_s3(remote: Workload, s3_endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "merge", remote.uri, "--json", "--max-generations", "2", *options(s3_endpoint))
    assert outcome.code == 0, outcome.err
    assert outcome.document["decision"] == "merged"
    assert read_base(remote.uri, options_for(s3_endpoint)) == remote.expected()
    document = run_here(capfd, "inspect", remote.uri, "--json", *options(s3_endpoint)).document
    assert document["backlog"]["generations"] == 0


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_wrong_credentials(remote: Workload, s3_endpoint: str, capfd: pytest.CaptureFixture[str], command: str) -> None:
    with FaultyProxy(s3_endpoint) as proxy:
        methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        proxy.faults = [Fault(m, ".", "before", 403, "InvalidAccessKeyId", FOREVER) for m in methods]
        secret = {"aws_access_key_id": "AKIAIOSFODNN7EXAMPLE", "aws_secret_access_key": SECRET}
        arguments = ["--log-level", "debug", command, remote.uri, *options(proxy.endpoint, **secret)]
        outcome = run_here(capfd, *arguments)
        assert outcome.code == 21, outcome.err
        as_json = run_here(capfd, *arguments, "--json")
        assert as_json.document["error"]["reason"] == "storage_credentials"
    for text in (outcome.out, outcome.err, as_json.out, as_json.err):
        assert SECRET not in text


@pytest.mark.s3
def test_a_read_only_bucket(remote: Workload, s3_endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    with FaultyProxy(s3_endpoint) as proxy:
        proxy.faults = [Fault(m, ".", "before", 403, "AccessDenied", FOREVER) for m in ("PUT", "POST", "DELETE")]
        assert run_here(capfd, "inspect", remote.uri, *options(proxy.endpoint)).code == 0
        outcome = run_here(capfd, "merge", remote.uri, *options(proxy.endpoint))
        assert outcome.code == 22, outcome.err
    assert dict(wire.progress(Files(remote.uri, options_for(s3_endpoint)))) == {}


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize(("status", "code", "exit_code"), [(403, "InvalidAccessKeyId", 21), (403, "AccessDenied", 21)])
def test_a_refusal_in_the_middle_blames_no_generation(
    remote: Workload, s3_endpoint: str, capfd: pytest.CaptureFixture[str], status: int, code: str, exit_code: int
) -> None:
    """Credentials that end while generations are read: the region is well, the run is not."""
    with FaultyProxy(s3_endpoint) as proxy:
        proxy.faults = [Fault("GET", "_gen_.*/data/", "before", status, code, FOREVER)]
        outcome = run_here(capfd, "merge", remote.uri, "--json", *options(proxy.endpoint))
        assert outcome.code == exit_code, outcome
    assert dict(wire.progress(Files(remote.uri, options_for(s3_endpoint)))) == {}


@pytest.mark.s3
def test_no_such_bucket(s3_endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capfd, "inspect", "s3://there-is-none/t.lance", *options(s3_endpoint))
    assert outcome.code == 3, outcome.err


@pytest.mark.s3
@pytest.mark.req("S3-044", "S3-045")
def test_a_store_that_ignores_conditions(remote: Workload, s3_endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    with FaultyProxy(s3_endpoint) as proxy:
        proxy.drop_condition = True
        outcome = run_here(capfd, "merge", remote.uri, *options(proxy.endpoint))
        assert outcome.code == 23, outcome.err
    assert dict(wire.progress(Files(remote.uri, options_for(s3_endpoint)))) == {}
