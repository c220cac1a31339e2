"""The error pages of Zeppelin namespaces, followed to their ends."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops import open_table
from memwal_ops.formats.zeppelin.lease import held_lease
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from tests.system.drills.drill import Drill


@pytest.fixture
def namespace(drill: Drill, tmp_path: Path) -> NamespaceUnderTest:
    """One with a segment, three fragments behind it, and a backup of all that."""
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    made.write()
    assert drill.run(f"memwal-ops merge {made.uri}").code == 0
    made.write()
    backup = tmp_path / "backup"
    shutil.copytree(made.uri, backup)
    fragment = Path(open_table(made.uri).manifest.fragments[1].key).name
    drill.given(URI=made.uri, BACKUP=str(backup), FRAGMENT=fragment)
    return made


def all_is_compacted(made: NamespaceUnderTest) -> None:
    assert open_table(made.uri).manifest.fragments == ()
    assert made.read() == made.expected()


def test_57_busy(drill: Drill, namespace: NamespaceUnderTest) -> None:
    with held_lease(open_table(namespace.uri), timedelta(minutes=5)) as lease:
        refused, shown = drill.follow(2)
        assert f"token {lease.token}" in drill.told(refused)["message"]
        assert "held" in shown.out
    drill.rest()
    all_is_compacted(namespace)


def blocked(outcome: object, reason: str, fragment: str) -> None:
    (entry,) = outcome.document["blocked"]  # type: ignore[attr-defined]
    assert entry["reason"] == reason
    assert fragment.startswith(entry["fragment"])


def test_60_fragment_missing(drill: Drill, namespace: NamespaceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    key = open_table(namespace.uri).manifest.fragments[1].key
    Path(namespace.uri, key).unlink()
    first, shown, *_ = drill.rest()
    blocked(first, "fragment_missing", Path(key).name)
    assert f"missing: {key}" in shown.out
    all_is_compacted(namespace)


def test_61_fragment_corrupt(drill: Drill, namespace: NamespaceUnderTest) -> None:
    key = open_table(namespace.uri).manifest.fragments[1].key
    file = Path(namespace.uri, key)
    file.write_bytes(file.read_bytes().replace(b'"b"', b'"x"'))
    first, *_ = drill.rest()
    blocked(first, "fragment_corrupt", file.name)
    assert "checksum" in first.document["blocked"][0]["detail"]
    all_is_compacted(namespace)


def test_62_segment_corrupt(drill: Drill, namespace: NamespaceUnderTest) -> None:
    (segment,) = open_table(namespace.uri).manifest.segments
    Path(namespace.uri, segment.prefix, "cluster_0.bin").unlink()
    first, *_ = drill.rest()
    assert "cluster_0.bin" in drill.told(first)["message"]
    all_is_compacted(namespace)
