"""Without the extra memwal-ops[lm-diskann], no test here is collected."""

from tests.support.lm_diskann.fixtures import NOT_COLLECTED, folder, vectors

__all__ = ["collect_ignore_glob", "folder", "vectors"]

collect_ignore_glob = NOT_COLLECTED
