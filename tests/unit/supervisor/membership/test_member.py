"""Which supervisors may be members of one fleet: each has a name and the identity of a state folder of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from memwal_ops.core.fleet_budget import Amounts, Charge
from memwal_ops.core.leases import Holder
from memwal_ops.errors import MemwalOpsError
from memwal_ops.supervisor.config.model import FleetConfig
from memwal_ops.supervisor.membership.member import Member
from memwal_ops.supervisor.membership.records import published
from memwal_ops.supervisor.observe.findings import service_findings

LIMIT = 60.0


def use_of(cpu: float) -> dict[str, Any]:
    """What a member writes of its budget that has used so many processor seconds."""
    return published({"cpu": 1.0}, 300.0, [Charge(300.0, Amounts(cpu))], Amounts(), 0.0, shadow=False)


class One:
    """A member, and what it says of itself."""

    def __init__(self, folder: Path, name: str, instance: str, cpu: float | None = None) -> None:
        self.refusals: list[MemwalOpsError] = []
        self.settled = threading.Event()
        config = FleetConfig(uri=str(folder / "ops"), name=name, heartbeat=timedelta(seconds=1))
        self.member = Member(
            config,
            Holder(instance, f"{name}@host"),
            alive=lambda: True,
            on_change=self.settled.set,
            on_refusal=self._refuse,
            budget=lambda: None if cpu is None else use_of(cpu),
        )

    def _refuse(self, error: MemwalOpsError) -> None:
        self.refusals.append(error)
        self.settled.set()

    def wait(self) -> str:
        assert self.settled.wait(LIMIT), "it neither joined nor was refused"
        return "joined" if not self.refusals else f"{self.refusals[0].exit_code} {self.refusals[0]}"


@contextmanager
def started(*members: One) -> Iterator[list[str]]:
    for one in members:
        one.member.start()
    try:
        yield [one.wait() for one in members]
    finally:
        for one in members:
            one.member.wait(LIMIT)


def test_a_copy_of_the_state_folder_is_refused_while_its_original_lives(tmp_path: Path) -> None:
    """Leases take both for one supervisor: each would run the jobs of the other."""
    with started(One(tmp_path, "a", "id-1")) as first:
        assert first == ["joined"]
        for name in ("a", "b"):
            with started(One(tmp_path, name, "id-1")) as (refused,):
                assert refused.startswith("55 The state folder of this supervisor is a copy"), refused
                assert "a@host" in refused
        with started(One(tmp_path, "a", "id-2")) as (refused,):
            assert refused.startswith("55 The name 'a' is that of another supervisor"), refused
        with started(One(tmp_path, "b", "id-2")) as others:
            assert others == ["joined"]


def test_of_two_copies_that_start_at_once_one_stays(tmp_path: Path) -> None:
    members = [One(tmp_path, name, "id-1") for name in ("a", "b")]
    with started(*members):
        ends = time.monotonic() + LIMIT
        while not any(one.refusals for one in members):
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert [len(one.refusals) for one in members] in ([0, 1], [1, 0])
        stays = next(one for one in members if not one.refusals)
        assert stays.member.status()["state"] == "joined"


def test_a_member_that_was_killed_comes_back_with_its_folder(tmp_path: Path) -> None:
    killed = One(tmp_path, "a", "id-1")
    killed.member.start()
    assert killed.wait() == "joined"
    records = tmp_path / "ops" / "members" / "a"
    kept = {path.name: path.read_bytes() for path in records.iterdir()}
    killed.member.wait(LIMIT)
    for name, content in kept.items():
        records.mkdir(parents=True, exist_ok=True)
        (records / name).write_bytes(content)
    with started(One(tmp_path, "a", "id-1")) as back:
        assert back == ["joined"]


def test_what_no_member_can_have_used_is_a_warning_of_the_one_that_wrote_it(tmp_path: Path) -> None:
    """Its record is written by another program, or is damaged: what it used is not charged, and that is said."""
    us = One(tmp_path, "us", "id-1", cpu=1.0)
    with started(us), started(One(tmp_path, "honest", "id-2", cpu=3600.0)), started(One(tmp_path, "x", "id-3", 1e9)):
        ends = time.monotonic() + LIMIT
        while len(members := us.member.status()["members"]) < 3:
            assert time.monotonic() < ends
            time.sleep(0.05)
        refused = {member["name"]: member["refused_use"] for member in members}
        assert refused == {"us": None, "honest": None, "x": refused["x"]}
        assert str(refused["x"]).startswith("cpu of 1e+09, where the wall clock allows")
        service = {"fleet": us.member.status(), "config": {"error": None}}
        said = [finding for finding in service_findings(service, [], "") if "left out of the budget" in finding["what"]]
        assert [(finding["level"], "the member x says" in finding["what"]) for finding in said] == [("warning", True)]
