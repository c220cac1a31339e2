"""The layouts that most tests of jobs run on."""

from __future__ import annotations

from tests.support.tables.lsm_table import LsmTable
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload

LAYOUTS: list[type[LsmTable]] = [Workload, RegionLayout]
