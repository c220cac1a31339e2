"""Every place that deletes objects of a table is known, with what proves that it may."""

from __future__ import annotations

import ast
from pathlib import Path

import memwal_ops

ROOT = Path(memwal_ops.__file__).parent
# Per module and function the proof. Whatever others may know of goes through delete_proven.
PROOFS = {
    ("core/anchors.py", "delete_proven"): "the caller's, made on what the anchors stand for",
    ("core/anchors.py", "discard"): "files of the run's own, of random names, that nothing visible names",
    ("cli/doctor.py", "_deleted"): "the object of a random name that it wrote to try whether it may",
    ("formats/lm_diskann/copies.py", "__exit__"): "parts of the run's own random name; no manifest names them",
    ("formats/zeppelin/jobs/merge.py", "_pass"): "the staging record of the run's own lease token",
    ("core/anchors.py", "delete_many"): "passes on what it was asked for",
    ("core/leases.py", "delete_records"): "the caller's",
    ("core/leases.py", "free_space"): "as _prune: the newest two of each job stay",
    ("core/leases.py", "_prune"): "numbers far behind the newest; a lease saves work, and proves nothing",
    (
        "core/leases.py",
        "delete_if_table_removed",
    ): "only leases are left of the table; they save work, and prove nothing",
    ("core/holds.py", "announced_expiry"): "the announcement that the same run made",
    ("core/holds.py", "_sweep"): "entries that ended a day ago by the slower of our clock and the store's",
    ("formats/lance/retention/merged_since.py", "record_progress"): "our own records, made needless by later ones",
    ("formats/lance/retention/merged_since.py", "drop_overtaken"): "our own records that a restore contradicts",
    ("formats/lance/retention/merged_since.py", "drop_contradicted"): "the same",
    ("formats/lance/retention/schema_recorder.py", "record_schema"): "our own records, which a later one has as well",
    ("formats/lance/jobs/erase/target.py", "record"): "our own records; a segment without one is built anew",
    (
        "supervisor/membership/records.py",
        "delete",
    ): "of no table: a member's own, or of a dead one: they save work",
    (
        "supervisor/membership/records.py",
        "delete_ended",
    ): "the same: what a member used that ended, once nothing of it is charged",
    ("supervisor/membership/records.py", "_prune"): "the same: numbers far behind the newest of the member",
    (
        "formats/lance/jobs/expire.py",
        "apply",
    ): "our own records of manifests, once the files that only these need are gone",
    ("formats/lance/stub.py", "apply"): "of a folder without versions and data, older than any creation in progress",
}
# They are the stores; the probe and the clock delete what they wrote a moment ago under a random name.
STORES = "storage/"


def callers() -> set[tuple[str, str]]:
    found = set()
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name.startswith(STORES):
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                found |= {
                    (name, function.name)
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr in {"delete_many", "delete_records", "cleanup_old_versions"}
                }
    return found


def test_every_deletion_has_a_stated_proof() -> None:
    assert callers() == PROOFS.keys()
