"""No module is tied to itself through others, by any import: of types, and late ones, too."""

from __future__ import annotations

import ast
import collections
import graphlib
from pathlib import Path

import grimp
import pytest

import memwal_ops


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


def test_a_class_has_a_name_of_its_own() -> None:
    """A reader who meets a public class knows which it is. This number only falls."""
    modules = collections.defaultdict(list)
    for path in sorted(Path(memwal_ops.__file__).parent.rglob("*.py")):
        if not path.stem.endswith("_pb2"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(path.stem)
    shared = {name: found for name, found in modules.items() if len(found) > 1}
    assert len(modules) > 500
    assert len(shared) <= 10, shared
