"""One tour of all jobs on stores that others wrote: Azurite and Ceph RGW, by the command line."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.gc_options import AT_ONCE_FLAGS
from tests.support.run_cli import run_here
from tests.support.servers.azurite_process import account_sas, container_sas
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from typing import Any

    from tests.support.servers import RealStore
    from tests.support.tables.lsm_table import LsmTable

pytestmark = pytest.mark.real_store


class Place:
    """A table on a real store, and memwal-ops with the options that it is to use."""

    def __init__(self, capfd: pytest.CaptureFixture[str], real: RealStore, layout: type[LsmTable]) -> None:
        self.capfd = capfd
        uri = f"{real.uri}/{uuid.uuid4().hex[:12]}/odd ü +&/t.lance"
        self.table = layout(3, regions=2, base_rows=60).create(uri, dict(real.options)).step(12)
        self.table.close()
        self.options = dict(real.options)

    def run(self, command: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        options = [part for key, value in self.options.items() for part in ("--storage-option", f"{key}={value}")]
        found = run_here(self.capfd, command, self.table.uri, "--json", *arguments, *options)
        assert "\n" not in (found.document.get("error") or {}).get("message", "")  # of a compaction it may be null
        return found.code, found.document

    def sound(self) -> None:
        assert_same(read_spec(self.table.uri, self.table.storage_options), self.table.expected())

    def folders(self) -> set[str]:
        listing = Files(self.table.uri, self.table.storage_options).listing("_mem_wal")
        return {path.split("/")[2] for path in listing if "_gen_" in path}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("store", ["azurite", "rgw"])
def test_a_tour_of_all_jobs(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str], store: str, layout: type[LsmTable]
) -> None:
    place = Place(capfd, request.getfixturevalue(store), layout)
    uri, options = place.table.uri, place.table.storage_options
    assert place.folders()
    assert place.run("probe") == (
        0,
        {"uri": uri, "conditional_writes": "enforced", "compare_and_swap": "enforced", "clock_skew_seconds": 0.0},
    )
    for command, arguments, decision in (
        ("merge", (), "merged"),
        ("catchup", (), "caught_up"),
        ("compact", (), "compacted"),
        ("snapshot", (), "built"),
        ("expire", ("--older-than", "0s", "--allow-unsafe", "--apply"), "expired"),
        ("gc", ("--apply", *AT_ONCE_FLAGS), "deleted"),
    ):
        code, document = place.run(command, *arguments)
        assert (code, document["decision"]) == (0, decision), document
        place.sound()
    assert place.folders() == set()
    assert_same(read_base(uri, options), place.table.expected())
    place.table.step(8)
    place.table.close()
    place.sound()
    code, document = place.run("maintain", "--apply", "--older-than", "0s", "--allow-unsafe", *AT_ONCE_FLAGS)
    assert (code, document["decision"]) == (0, "maintained"), document
    assert place.folders() == set()
    assert_same(read_base(uri, options), place.table.expected())


@pytest.mark.parametrize("sas", [account_sas, container_sas])
def test_the_collector_with_a_sas(capfd: pytest.CaptureFixture[str], azurite: RealStore, sas: Any) -> None:
    """An account SAS signs no batch on Azurite."""
    place = Place(capfd, azurite, Workload)
    place.options = sas(azurite, "racwdl")
    for command in ("merge", "catchup"):
        assert place.run(command)[0] == 0
    assert place.run("expire", "--older-than", "0s", "--allow-unsafe", "--apply")[0] == 0
    versions = Files(place.table.uri, place.table.storage_options).listing("_versions")
    assert len(versions) == 1
    code, document = place.run("gc", "--apply", *AT_ONCE_FLAGS)
    assert (code, document["decision"]) == (0, "deleted"), document
    assert place.folders() == set()
    place.sound()


@pytest.mark.parametrize("sas", [account_sas, container_sas])
def test_a_sas_that_only_reads(capfd: pytest.CaptureFixture[str], azurite: RealStore, sas: Any) -> None:
    place = Place(capfd, azurite, Workload)
    place.options = sas(azurite, "rl")
    assert place.run("inspect")[0] == 0
    assert place.run("merge", "--dry-run")[0] == 0
    for command in ("probe", "merge"):
        code, document = place.run(command)
        assert (code, document["error"]["reason"]) == (22, "read_only_store")
        assert "SAS" in document["error"]["remedy"]
    place.sound()
