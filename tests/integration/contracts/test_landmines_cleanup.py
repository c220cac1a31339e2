"""What pylance's clean-up takes, and what it leaves: asserted AS IT IS, as in test_landmines.py."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import lance
import pytest
from lance import LanceOperation

from tests.integration.contracts.small import (
    make,
    rows,
    upsert,
)  # fmt: skip
from tests.support.tables import damage


def test_12_cleanup_raises_over_tags(tmp_path: Path) -> None:
    """`cleanup_old_versions` raises where a tagged version would go, unless it is told not to.

    For users who call it beside memwal-ops; expire deletes by itself (landmines 27 to 29).
    """
    uri = make(tmp_path)
    lance.dataset(uri).tags.create("keep", 1)
    upsert(lance.dataset(uri), rows(1, 2, 1))
    with pytest.raises(OSError, match=r"(?i)tag"):
        lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    assert lance.dataset(uri, version=1).count_rows() == 100


def test_27_cleanup_follows_links_to_folders(tmp_path: Path) -> None:
    """What is behind them is deleted where it looks like Lance's own and is old, below `_indices/` whatever it is.

    For us: expire deletes by itself, and compact refuses to commit where the setting would clean up beside a link.
    """
    uri = make(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("a.lance", "b.txt"):
        (elsewhere / name).write_bytes(b"another's")
        os.utime(elsewhere / name, (0, 0))
    for folder in ("data", "_indices"):
        Path(uri, folder).mkdir(exist_ok=True)
        Path(uri, folder, "sub").symlink_to(elsewhere)
    upsert(lance.dataset(uri), rows(1, 2, 1))
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.long
def test_28_cleanup_takes_data_before_manifests_and_counts_failures_in_silence(tmp_path: Path) -> None:
    """Where manifests cannot be deleted, unreadable versions are listed, and nothing is raised.

    For us: expire deletes a version's manifest before its data.
    """
    uri = make(tmp_path)
    lance.write_dataset(lance.dataset(uri).to_table(), uri, mode="overwrite")
    before = [one["version"] for one in lance.dataset(uri).versions()]
    script = f"import lance, datetime; print(lance.dataset({uri!r}).cleanup_old_versions(datetime.timedelta(0)))"
    Path(uri, "_versions").chmod(0o555)
    try:
        command = damage.held_by_permissions([sys.executable, "-c", script])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        Path(uri, "_versions").chmod(0o755)
    assert "failed_deletes: 0" not in done.stdout
    assert [one["version"] for one in lance.dataset(uri).versions()] == before
    with pytest.raises((OSError, ValueError), match=r"(?i)not found"):
        lance.dataset(uri, version=1).to_table()


def test_29_auto_cleanup_runs_in_commits_but_not_in_detached_ones(tmp_path: Path) -> None:
    """For us: a pylance commit of ours, and only compact has one, is refused where it would delete what must stay."""
    uri = make(tmp_path)
    upsert(lance.dataset(uri), rows(1, 2, 1))
    interval = lance.dataset(uri).version + 2  # not the commit of the setting itself
    setting = {"lance.auto_cleanup.interval": str(interval), "lance.auto_cleanup.older_than": "0s"}
    lance.dataset(uri).update_config(setting)
    before = [one["version"] for one in lance.dataset(uri).versions()]
    base = lance.dataset(uri).version
    hit = set()
    for _ in range(200):
        append = LanceOperation.Append([])
        made = lance.LanceDataset.commit(uri, append, read_version=base, detached=True)
        hit.add(made.version % interval == 0)
    assert hit == {True, False}
    assert [one["version"] for one in lance.dataset(uri).versions()] == before
    lance.LanceDataset.commit(uri, LanceOperation.Append([]), read_version=base)
    assert len(lance.dataset(uri).versions()) < len(before)
