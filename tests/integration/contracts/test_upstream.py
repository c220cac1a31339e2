"""The scripts of docs/upstream.md still show what they are there to show, on the pylance that is pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "upstream.md"
SCRIPTS = [
    "cleanup_follows_links.py",
    "cleanup_ignores_failed_deletes.py",
    "compacted_clone_looks_elsewhere.py",
    "deferred_remap_loses_rows.py",
    "delete_pass_deletes_newer_rows.py",
    "dot_product_updates_hide_rows.py",
    "dropped_rows_fill_results.py",
    "dropped_values_return.py",
    "empty_lists_of_blobs_panic.py",
    "first_format_changes_values.py",
    "index_of_a_dropped_column.py",
    "json_index_takes_a_key_for_a_path.py",
    "large_dictionaries_fail_on_s3.py",
    "legacy_index_locks_out.py",
    "lost_answer_lists_a_generation_twice.py",
    "lost_answer_locks_a_region.py",
    "marker_lost_by_execute_uncommitted.py",
    "merged_sq_segments_lose_rows.py",
    "nested_index_without_rows_fails.py",
    "optimize_changes_centroids.py",
    "overwrite_revives_generations.py",
    "rebased_merges.py",
    "rewritten_index_hides_its_transaction.py",
    "stale_index_commit_takes_progress_back.py",
    "update_operation_doubles_keys.py",
    "updates_double_rows_beside_a_cleanup.py",
    "versions_fails_beside_a_cleanup.py",
    "zones_of_nan_are_passed_over.py",
]


def test_the_page_names_every_script() -> None:
    assert sorted(re.findall(r"\(upstream/(\w+\.py)\)", PAGE.read_text())) == SCRIPTS
    assert sorted(path.name for path in PAGE.with_suffix("").glob("*.py")) == sorted([*SCRIPTS, "small_s3.py"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_pasted_into_an_issue(name: str) -> None:
    """A sentence, and at most 20 lines."""
    sentence, *lines = filter(None, (PAGE.with_suffix("") / name).read_text().splitlines())
    assert sentence.startswith('"""')
    assert sentence.endswith('"""')
    assert len(lines) <= 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_fault_is_still_there(name: str) -> None:
    """A failure is good news: see which guard of ours docs/upstream.md names beside it, and whether it may go."""
    command = [sys.executable, str(PAGE.with_suffix("") / name)]
    # A command that a test ran in this process has set some of Lance's.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LANCE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=environment)
    assert done.stdout.splitlines()[-1:] == ["FAULT"], done.stdout + done.stderr
