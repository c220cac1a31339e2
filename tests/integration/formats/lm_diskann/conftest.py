"""Without the extra memwal-ops[lm-diskann], no test here is collected."""

from tests.support.lm_diskann.fixtures import NOT_COLLECTED, folder, template, vectors

__all__ = ["collect_ignore_glob", "folder", "template", "vectors"]

collect_ignore_glob = NOT_COLLECTED
