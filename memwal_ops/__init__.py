"""Maintenance jobs for Lance tables with MemWAL: merge, snapshot, catch up, collect.

``open_table`` is the way in; jobs live in :mod:`memwal_ops.jobs`.
"""

from memwal_ops.core.table import Table, open_table
from memwal_ops.version import __version__

__all__ = ["Table", "__version__", "open_table"]
