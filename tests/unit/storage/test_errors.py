"""Errors of stores and of the file system: which kind, and which page they lead to."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from memwal_ops.cli.printing import error_document
from memwal_ops.errors import ReadOnlyStoreError, StorageCredentialsError, StorageError, UnsupportedFeatureError
from memwal_ops.storage.api import DiskFullError
from memwal_ops.storage.errors import translate
from memwal_ops.supervisor.observe.findings import DEFAULT_LIMITS, findings_of
from memwal_ops.supervisor.state.outcomes import error_fields, log_fields
from tests.support.fleet import fleet, status

PAGE = "runbooks/disk-full.md"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/t.lance/_versions/1"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("LanceError(IO): Generic LocalFileSystem error: No space left on device (os error 28), io.rs:1:2"),
        OSError("Generic S3 error: Server returned non-2xx status code: 507 Insufficient Storage: "),
    ],
    ids=["disk", "quota", "pylance", "store"],
)
def test_a_full_disk_leads_to_its_page(error: Exception) -> None:
    found = translate(error, path="data/1.lance", action="write")
    assert isinstance(found, DiskFullError)
    assert (found.exit_code, found.reason) == (StorageError.exit_code, "disk_full")
    document: Any = error_document(found)["error"]
    assert document["runbook"] == PAGE
    assert PAGE in document["remedy"]
    assert log_fields(error_fields(found)).items() >= {"reason": "disk_full", "runbook": PAGE}.items()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("action", ["read", "write"])
def test_a_local_folder_that_refuses_has_no_keys(number: int, action: str) -> None:
    for error in (
        PermissionError(number, os.strerror(number), "/data/t.lance"),
        RuntimeError(f"LanceError(IO): Unable to walk dir: {os.strerror(number)} (os error {number}), io.rs:1:2"),
    ):
        found = translate(error, path="data", action=action)
        assert isinstance(found, StorageCredentialsError if action == "read" else ReadOnlyStoreError)
        assert "the user of this process" in found.remedy
        assert "AWS" not in found.remedy


def test_any_other_failure_leads_to_the_page_of_its_exit_code() -> None:
    found = translate(OSError(errno.EIO, os.strerror(errno.EIO)), path="data/1.lance", action="write")
    document: Any = error_document(found)["error"]
    assert (document["reason"], document["runbook"]) == ("storage", "runbooks/errors/20-storage.md")


def test_the_finding_of_a_job_that_failed_on_a_full_disk() -> None:
    table = next(table for table in status(fleet(20))["tables"] if table["name"] == "sessions")
    full = DiskFullError("Cannot write 'data/1.lance'.")

    class Errors:
        def last_error(self, uri: str, job: str) -> dict[str, Any]:
            del uri, job
            return {"reason": full.reason, "message": str(full), "remedy": full.remedy, "exit_code": full.exit_code}

        def part_of(self, uri: str, blocked: Any) -> tuple[str, str]:
            raise AssertionError((uri, blocked))

    document = {"error": None, "blocked": [], **table}
    found = [one for one in findings_of(document, Errors(), DEFAULT_LIMITS, "") if "failed" in one["what"]]
    assert [one["runbook"] for one in found] == [PAGE]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Unable to open file /t/data/1.lance: Permission denied (os error 13)", StorageCredentialsError),
        ("Unable to create file /t/data/1.lance: Permission denied (os error 13)", ReadOnlyStoreError),
        (
            "Error performing GET https://s3/b/1 in 1ms - Server returned non-2xx status code: 403 ",
            StorageCredentialsError,
        ),
        ("Error performing PUT https://s3/b/1 in 1ms - Server returned non-2xx status code: 403 ", ReadOnlyStoreError),
    ],
)
def test_what_cannot_be_read_needs_no_right_to_write(text: str, kind: type[StorageError]) -> None:
    """A build and a compaction read before they write."""
    assert type(translate(OSError(f"LanceError(IO): {text}"), path="t.lance", action="build index")) is kind


MISALIGNED = "Invalid argument error: Misaligned buffers[0] in array of type LargeUtf8, offset from expected"


@pytest.mark.parametrize(
    "error", [OSError("Not supported: JSON index updates"), OSError(MISALIGNED), NotImplementedError("not yet")]
)
def test_what_pylance_does_not_support_is_no_reason_to_try_again(error: Exception) -> None:
    found = translate(error, path="by_name", action="build index")
    assert (found.exit_code, found.reason) == (UnsupportedFeatureError.exit_code, "unsupported_feature")
    assert "does not help" in found.remedy
