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


# What an oracle may import of the package: nothing of what it judges.
ORACLES = {
    "support/tables/model.py": set(),
    "support/lm_diskann/decoder.py": set(),
    "campaigns/sim/landed.py": set(),
    "campaigns/traces/protocol.py": set(),
    "campaigns/zeppelin/witness.py": {"memwal_ops.storage.wrapper"},
    # The readers are among what is judged: their rows are compared with those that were written.
    "campaigns/pairs/oracle.py": {"memwal_ops.errors", "memwal_ops.legacy", "memwal_ops.memwal"},
}


@pytest.mark.parametrize("path", ORACLES)
def test_an_oracle_shares_no_code_with_what_it_judges(path: str) -> None:
    tree = ast.parse((Path(__file__).parents[1] / path).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in imported if name.startswith("memwal_ops")} <= ORACLES[path]


def test_the_byte_search_of_a_certificate_shares_no_code_with_an_erasure(imports: grimp.ImportGraph) -> None:
    searches = ("memwal_ops.core.byte_scan", "memwal_ops.formats.lance.jobs.erase.scan")
    finds = {"memwal_ops.formats.lance.jobs.erase." + name for name in ("job", "log", "target")}
    finds |= {name for name in imports.modules if name.startswith("memwal_ops.formats.lance.commit")}
    assert finds <= imports.modules
    for search in searches:
        assert not finds & imports.find_modules_directly_imported_by(search)
