"""Three supervisors of one fleet: each has its share, a killed one's is taken over, a second of a name is refused."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Running, service
from tests.support.tables.workload import Workload
from tests.support.waiting import PATIENCE, until

pytest_plugins = ["tests.support.s3_server"]

TABLES = [f"t{number}" for number in range(12)]
ALL = sorted(TABLES)
OFF = ", ".join(f"{job}: {{enabled: false}}" for job in ("catchup", "compact", "snapshot", "expire", "gc", "verify"))


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.long)])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The keys of ``fleet:`` but the name."""
    if request.param == "local":
        return f"uri: {tmp_path}/ops, heartbeat: 5s"
    uri, options = request.getfixturevalue("bucket")
    given = ", ".join(f"{key}: '{value}'" for key, value in options.items())
    return f"uri: {uri}/ops/, heartbeat: 5s, storage_options: {{{given}}}"


def configure(tmp_path: Path, fleet: str, name: str, number: int = 1, *, state: str = "") -> Path:
    """A member; the tables need not exist: which one polls them is the question.

    A heartbeat and a lease last longer than a busy machine holds a process up: one taken for dead loses its tables.
    """
    path = tmp_path / f"{name}{number}.yaml"
    tables = ", ".join(f"{{uri: {tmp_path}/{table}.lance}}" for table in TABLES)
    path.write_text(
        f"state_dir: {tmp_path}/state-{state or path.stem}\nhttp: {{port: 0}}\nleases: {{ttl: 60s}}\n"
        f"fleet: {{name: {name}, {fleet}}}\n"
        f"defaults: {{poll: 1s, jobs: {{merge: {{when: generations >= 1, schedule: null}}, {OFF}}}}}\n"
        f"tables: [{tables}]\n"
    )
    return path


def shares(*members: Running) -> list[str]:
    """The tables of these members; one that two of them have is in it twice."""
    return sorted(table["name"] for member in members for table in member.get("/api/v1/status")["tables"])


def seen(member: Running) -> dict[str, Any]:
    return {one["name"]: one for one in member.get("/api/v1/status")["service"]["fleet"]["members"]}


def tables_of(members: dict[str, Any]) -> dict[str, int]:
    return {name: one["tables"] for name, one in members.items()}


@pytest.mark.timeout(4 * PATIENCE)
def test_three_members_of_which_one_is_killed_and_one_leaves(tmp_path: Path, fleet: str) -> None:
    waiting = Workload(1, regions=1, base_rows=20).create(f"{tmp_path}/t0.lance")
    with ExitStack() as stack:
        a, b, c = (stack.enter_context(service(configure(tmp_path, fleet, name))) for name in "abc")
        assert until(lambda: shares(a, b, c) == ALL and all(map(shares, (a, b, c))))
        # Any of them shows all of them, and what each has.
        members = {"a": a, "b": b, "c": c}
        assert until(lambda: tables_of(seen(a)) == {name: len(shares(one)) for name, one in members.items()})
        assert 'memwal_ops_fleet_member_up{member="c"} 1.0' in a.get("/metrics")
        assert "Members of the fleet" in a.get("/")

        # A table of another one: who has it.
        assert until(lambda: "The member b of the fleet maintains it" in a.get(f"/tables/{shares(b)[0]}"))

        # Killed: its share is taken over, and a table of it is merged by another.
        victim = next(one for one in (a, b, c) if "t0" in shares(one))
        left = [one for one in (a, b, c) if one is not victim]
        victim.kill()
        waiting.put([1, 2, 50])
        waiting.flush()
        assert until(lambda: shares(*left) == ALL)
        name = victim.config.stem[0]
        found = left[0].get("/api/v1/status")["service"]["fleet"]
        assert [one["name"] for one in found["members"] if not one["living"]] == [name]
        assert f'memwal_ops_fleet_member_up{{member="{name}"}} 0.0' in left[0].get("/metrics")
        assert until(lambda: any(one.runs(table="t0", job="merge") for one in left))

        # Leaving: the last one has all tables before the other has ended its runs.
        left[1].process.send_signal(signal.SIGTERM)
        assert until(lambda: shares(left[0]) == ALL)
        assert left[1].process.wait(PATIENCE) == 0

        # The killed one comes back with its state folder, and with its share.
        again = stack.enter_context(service(configure(tmp_path, fleet, name, 2, state=victim.config.stem)))
        assert until(lambda: 0 < len(shares(again)) < len(TABLES) and shares(left[0], again) == ALL)
        # A second member of that name is refused, and the first one keeps its tables.
        other = stack.enter_context(service(configure(tmp_path, fleet, name, 3)))
        assert other.process.wait(PATIENCE) == 55
        assert f"The name '{name}' is that of another supervisor" in other.log_path.read_text()
        assert until(lambda: shares(left[0], again) == ALL)


# The same without processes, in any order: unit/supervisor/membership/test_uses.py.
@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE)
def test_members_have_one_budget_and_find_it_again(tmp_path: Path) -> None:
    """What one used is charged on when it is killed, when its state folder is lost, and once when both come back."""
    fleet = f"uri: {tmp_path}/ops, heartbeat: 10s}}\nbudget: {{requests: 2M, per: 1h"
    waiting = Workload(1, regions=1, base_rows=20).create(f"{tmp_path}/t0.lance")

    def used(member: Running) -> dict[str, Any]:
        found: dict[str, Any] = member.get("/api/v1/status")["service"]["budget"]
        return found

    with ExitStack() as stack:
        a, b = (stack.enter_context(service(configure(tmp_path, fleet, name))) for name in "ab")
        assert until(lambda: shares(a, b) == ALL and all(map(shares, (a, b))))
        waiting.put([1, 2, 50])
        waiting.flush()
        ran = until(lambda: next((member for member in (a, b) if member.runs(table="t0", job="merge")), None))
        other = b if ran is a else a
        assert until(lambda: used(ran)["own"]["used"]["requests"] > 0)
        spent = used(ran)["own"]["used"]["requests"]
        assert until(lambda: used(other)["used"]["requests"] == spent == used(ran)["used"]["requests"])
        assert used(other)["own"]["used"] == {"requests": 0}
        assert f'memwal_ops_budget_used{{kind="requests"}} {spent}' in other.get("/metrics")
        assert 'memwal_ops_budget_used_own{kind="requests"} 0.0' in other.get("/metrics")

        name = ran.config.stem[0]
        ran.kill()
        lost = stack.enter_context(service(configure(tmp_path, fleet, name, 2)))
        assert until(lambda: used(lost)["members"] == 2 and not used(lost)["members_unread"])
        # It may have spent more, and told so, after it was asked and before it was killed.
        assert until(lambda: used(lost)["used"]["requests"] == used(other)["used"]["requests"] >= spent)
        spent = used(other)["used"]["requests"]
        assert used(lost)["own"]["used"] == {"requests": 0}

        # Its first state folder is found again: with two of one name, under another one.
        back = stack.enter_context(service(configure(tmp_path, fleet, "c", state=ran.config.stem)))
        assert until(lambda: used(back)["members"] == 3)
        assert used(back)["own"]["used"]["requests"] >= spent, "and what it had not told yet"
        spent = used(back)["own"]["used"]["requests"]
        assert until(lambda: all(used(one)["used"]["requests"] == spent for one in (back, lost, other)))

        # Left: what it used is kept beside the records of the others, until its period ends.
        back.process.send_signal(signal.SIGTERM)
        assert back.process.wait(PATIENCE) == 0
        assert until(lambda: used(other)["members"] == 2)
        assert used(other)["used"]["requests"] == used(lost)["used"]["requests"] == spent
        assert [path.name.split(".")[1] for path in tmp_path.glob("ops/members/c/*")] == ["used"]
