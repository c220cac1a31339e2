"""No module is tied to itself through others, by any import: of types, and late ones, too."""

from __future__ import annotations

import graphlib

import grimp
import pytest


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("memwal_ops", exclude_type_checking_imports=False, cache_dir=None)


def test_no_circles(imports: grimp.ImportGraph) -> None:
    graph = {module: imports.find_modules_directly_imported_by(module) for module in imports.modules}
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # CycleError names the circle
    assert len(order) > 300
    assert order.index("memwal_ops.errors") < order.index("memwal_ops.cli.main")


def test_late_imports_and_types_are_seen(imports: grimp.ImportGraph) -> None:
    seen = imports.find_modules_directly_imported_by("memwal_ops.formats.lance.format")
    assert {"memwal_ops.formats.lance.table", "memwal_ops.core.anchors"} <= seen
