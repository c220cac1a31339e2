"""What to do about a damaged object of a namespace, by what the object is for.

The class's own text of ``table_corrupt`` is about versions of Lance tables, which no namespace has.
"""

from __future__ import annotations

MANIFEST = (
    "Restore manifest.json from a backup, the bucket's versions or the newest record of its history; what was "
    "appended since is then in fragments that no manifest lists: list them again before gc runs, which deletes them "
    "after a week. Keep the damaged object."
)
RECORD = (
    "Restore it from a backup; or, if no reader, hold or snapshot uses that revision, move it out of the namespace: "
    "the live manifest does not need it. gc deletes nothing before that."
)
TWO_MANIFESTS = (
    "Compare the two: two servers wrote to copies of the namespace, or one object was restored without the other. "
    "Keep both, decide which one has all rows, put it at manifest.json, and move the record out of the namespace."
)
CORRECT = (
    "The object is intact, so a backup has the same. Fix its writer, and list a corrected copy of all its rows and "
    "deletes in its place: memwal_ops.formats.zeppelin.replace_fragment."
)
META = (
    "Restore meta.json from a backup. Without one, write dimensions and distance_metric as they were: no row is in it."
)
SNAPSHOT = (
    "Restore it from a backup, or remove it if that snapshot is not needed: gc deletes nothing before that, since it "
    "is not known which revision it pins."
)
SERVER = "The object is intact. Let its Zeppelin server delete or correct the row: this release cannot read it."
RECORDING = "Run it again when fewer compactions run at once: nothing was published."


def lease(token: int) -> str:
    """Of ``lease.json``; ``token`` is the manifest's."""
    return f"Restore lease.json with a fencing_token at or above {token}; never delete it."
