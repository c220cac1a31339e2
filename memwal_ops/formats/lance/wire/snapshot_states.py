"""Encode and decode the states of regions in the metadata of a region snapshot's rows.

Rows of the region layout contain the state; those of the shard layout do not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memwal_ops.formats.lance.wire.names import U64_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

_STATES = b"memwal-ops:states"
_STATE_NUMBERS = 3


def with_states(rows: pa.Table, states: Mapping[UUID, Sequence[int | None]]) -> pa.Table:
    """Store the states in the metadata of the rows: version, ``replay_after_wal_id``, ``wal_id_last_seen``."""
    return _with(rows, {str(region_id): [*state] for region_id, state in states.items()})


def states_of(rows: pa.Table) -> Mapping[str, tuple[int, int | None, int | None]]:
    """The states that :func:`with_states` stored, by region id, as far as they decode."""
    try:
        stored = json.loads((rows.schema.metadata or {}).get(_STATES, b"{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {region: (state[0], state[1], state[2]) for region, state in stored.items() if _is_state(state)}


def with_states_alone(rows: pa.Table, source: pa.Table) -> pa.Table:
    """The rows with the states of ``source``, and without the metadata of other programs."""
    return _with(rows, states_of(source))


def _with(rows: pa.Table, states: Mapping[str, Sequence[int | None]]) -> pa.Table:
    return rows.replace_schema_metadata({_STATES: json.dumps(states).encode()})


def _is_state(stored: object) -> bool:
    if not isinstance(stored, list) or len(stored) != _STATE_NUMBERS or stored[0] is None:
        return False
    return all(one is None or (type(one) is int and 0 <= one <= U64_MAX) for one in stored)
