"""runbooks/disk-full.md on a file system that is really full, and on a bucket whose quota is used up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.jobs import merge
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import options_for, s3_client
from tests.support.tables.workload import Workload, assert_same, read_base

pytestmark = pytest.mark.long

OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.parametrize("drill", ["full_disk", "full_disk_gc"])
def test_disk_full(tmp_path: Path, drill: str) -> None:
    """Needs no rights: a user may mount in a namespace of their own, where the system lets them have one."""
    if subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives users no mount namespace of their own")
    command = [*OWN_MOUNTS, sys.executable, "-m", f"tests.system.drills.{drill}", str(tmp_path / "disk")]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.s3
@pytest.mark.parametrize("answer", [(507, "InsufficientStorage"), (403, "QuotaExceeded")], ids=["507", "403"])
def test_a_bucket_whose_quota_is_used_up(s3_endpoint: str, s3_bucket: str, answer: tuple[int, str]) -> None:
    uri, direct = f"s3://{s3_bucket}/t.lance", options_for(s3_endpoint)
    table = Workload(1, regions=1, base_rows=40).create(uri, direct)
    table.put([1, 2, 50])
    table.flush()

    def keys() -> set[str]:
        return {one["Key"] for one in s3_client(s3_endpoint).list_objects_v2(Bucket=s3_bucket)["Contents"]}

    before = keys()
    for place in ("_mem_wal_ops", "/data/", "_deletions", "_transactions", "_versions"):
        with FaultyProxy(s3_endpoint) as proxy:
            proxy.faults = [Fault("PUT", place, "before", *answer, times=1000)]
            with pytest.raises(MemwalOpsError) as caught:
                merge.apply(open_table(uri, options_for(proxy.endpoint)), merge.MergeOptions())
        if place == "_versions":  # an earlier attempt may still succeed: the files that the version refers to are kept
            assert caught.value.exit_code == 31
            assert keys() > before
        else:
            assert caught.value.exit_code == {507: 20, 403: 22}[answer[0]], place
            assert keys() == before, place
        assert_same(read_base(uri, direct), table.model.base)
    assert merge.apply(open_table(uri, direct), merge.MergeOptions()).decision == "merged"
    assert_same(read_base(uri, direct), table.expected())
