"""Each error of a namespace advises what can be done with a namespace, and not with a Lance table."""

from __future__ import annotations

import ast
from pathlib import Path

import memwal_ops.formats.zeppelin as package
from memwal_ops import errors
from memwal_ops.formats.zeppelin import remedies

SOURCES = sorted(Path(package.__file__).parent.rglob("*.py"))
# What only Lance has.
LANCE = ("dataset", "checkout", "version N", "older version", "base table", "Lance")


def raised() -> list[tuple[str, ast.Call]]:
    """Every call of an error class in the package, with its place."""
    return [
        (f"{path.name}:{node.lineno}", node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.endswith("Error")
        and hasattr(errors, node.func.id)
    ]


def test_no_error_has_the_remedy_of_a_lance_table() -> None:
    found = raised()
    assert len(found) > 30
    for place, call in found:
        kind = getattr(errors, ast.unparse(call.func))
        if issubclass(kind, errors.InvalidFormatError):
            continue  # converted by its callers
        own = any(one.arg == "remedy" for one in call.keywords)
        assert own or not any(word in kind.remedy for word in LANCE), f"{place} {kind.__name__}: {kind.remedy}"


def test_the_remedies_are_in_one_place() -> None:
    texts = [value for name, value in vars(remedies).items() if name.isupper()]
    assert len(texts) > 5
    for text in (*texts, remedies.lease(7)):
        assert text.endswith(".")
        assert not any(word in text for word in LANCE), text
    for place, call in raised():
        if ast.unparse(call.func) == "TableCorruptError":
            (given,) = (ast.unparse(one.value) for one in call.keywords if one.arg == "remedy")
            assert given.startswith("remedies."), place
