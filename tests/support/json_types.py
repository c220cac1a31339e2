"""What ``json.dumps`` writes is what a report holds: an enum that is a text prints alike, and is no text."""

from __future__ import annotations

import json


def assert_json(document: object) -> None:
    """Only dicts with text keys, lists, texts, finite numbers, booleans and None: exactly these types."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    _walk(document, "$")


def _walk(value: object, path: str) -> None:
    assert type(value) in {dict, list, str, int, float, bool, type(None)}, f"{path} is a {type(value).__name__}"
    if isinstance(value, dict):
        for key, inner in value.items():
            assert type(key) is str, f"a key of {path} is a {type(key).__name__}"
            _walk(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            _walk(inner, f"{path}[{at}]")
