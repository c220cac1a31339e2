"""What our jobs may refuse, of tables that another release wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.campaigns.clients.asking import Outcomes

_UNSTABLE = "storage-(2.3|next)"
ALLOWED = (
    # A feature that is not supported: by its name, its flag and the release that brings it; before any write.
    (".*", ".*", r"refused: UnsupportedFeatureError: .*\(feature flag \d+(, since Lance 1\d)?\)"),
    ("compact-setting-refused", "compact", r"refused: InvalidUsageError: .*data_storage_version = 9\.9"),
    # A B-tree that the pinned release would make one which the writer does not maintain is left to it.
    (".*stable.*", "catchup", "incomplete: .*index_upgrade_refused"),
    # 7.0.0 loses the codes of such an index by an update of its own: both name it, and how it is built anew.
    ("(stable-)?ivf_rq", "catchup", "incomplete: .*codebook_changed"),
    ("(stable-)?ivf_rq", "verify", "findings: .*index_recall_low"),
    # An unstable format: the pinned release cannot read what earlier ones wrote.
    (_UNSTABLE, "compact", "refused: IndexesBehindError: .*cannot be opened"),
    (_UNSTABLE, "catchup", "incomplete: .*PlanarLayout"),
    (_UNSTABLE, "verify", "findings: .*PlanarLayout"),
)


def unexpected(jobs: Outcomes) -> list[str]:
    """What jobs came to that is neither right nor such a refusal."""
    return [
        f"{kind} {job}: {outcome}"
        for kind, outcomes in jobs.items()
        for job, outcome in outcomes.items()
        if outcome != "ok" and not is_allowed(kind, job, outcome)
    ]


def is_allowed(kind: str, job: str, outcome: str) -> bool:
    """Whether a job may refuse a table."""
    return any(
        re.fullmatch(kinds, kind) and re.fullmatch(names, job) and re.match(text, outcome, re.DOTALL)
        for kinds, names, text in ALLOWED
    )


def is_unreadable(kind: str) -> bool:
    """Whether the pinned release may be unable to read it."""
    return re.fullmatch(_UNSTABLE, kind) is not None
