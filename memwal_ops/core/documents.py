"""Write the JSON object of a report from the fields of its dataclass."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from memwal_ops.errors import MemwalOpsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_LAST = ("version", "seconds", "commit_conflicts", "lost_races", "run_id")


def document(one: DataclassInstance, *without: str, **others: object) -> dict[str, Any]:
    """An object with a key for each field, in their order, and what all runs have at its end.

    Parts are asked by their ``to_json``. Of errors it has the reason and the text; times are of ISO 8601, to the
    second; durations are rounded to microseconds. Beside ``commit_conflicts`` is its name in 0.1.

    ``others``: the values of keys that are not those of fields.
    """
    names = [field.name for field in fields(one) if field.name not in without]
    values = {name: getattr(one, name) for name in names} | others
    rendered = {name: _value(value) for name, value in values.items()}
    if "seconds" in rendered:
        rendered["seconds"] = round(rendered["seconds"], 6)
    if "commit_conflicts" in rendered:
        rendered["lost_races"] = rendered["commit_conflicts"]
    return {
        name: rendered[name]
        for name in sorted(rendered, key=lambda name: _LAST.index(name) + 1 if name in _LAST else 0)
    }


def _value(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (UUID, datetime)):
        return value.isoformat(timespec="seconds") if isinstance(value, datetime) else str(value)
    if isinstance(value, MemwalOpsError):
        return {"reason": value.reason, "detail": f"{value} {value.remedy}", "remedy": value.remedy}
    if isinstance(value, Mapping):
        entries = sorted(value.items()) if any(isinstance(key, UUID) for key in value) else value.items()
        return {str(key): _value(item) for key, item in entries}
    return [_value(item) for item in value] if isinstance(value, (tuple, list)) else value
