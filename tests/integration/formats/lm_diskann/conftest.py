"""Without the extra memwal-ops[lm-diskann], no test here is collected."""

from tests.support.lm_diskann.fixtures import NOT_COLLECTED, built, folder, made, template, vectors

__all__ = ["built", "collect_ignore_glob", "folder", "made", "template", "vectors"]

collect_ignore_glob = NOT_COLLECTED
