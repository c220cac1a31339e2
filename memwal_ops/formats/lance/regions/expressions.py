"""Region expressions: DataFusion SQL over ``col0``, ``col1``, ..., and their six rules (S0-086 to S0-092).

The rules are checked twice where possible: by the functions that the expression calls, and by its results for samples.
A violation that is not detected would route two rows of one key to two regions.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(")
# DataFusion declares it deterministic, but its result changes when DataFusion is updated.
_OF_RELEASE = frozenset({"version"})
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), *_UNSIGNED)
_FLOATS = (pa.float32(), pa.float64())
_NUMBERS = (0, 1, 2, 5, 7, 12, 100, 127, -1, -7, -128, 1000, -32768, 2**31 - 1, -(2**31), 2**40, 2**53)
_REMOVAL = "column-removal resistant"
_PROMOTION = "type-promotion resistant"
_TEXTS = ("", "a", "iceberg", "Zürich", "日本語", "x" * 40, "1", "2026-01-31")


def evaluated(expression: str, columns: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """The region values that an expression gives for source columns, in the type of its field.

    Raises:
        InvalidUsageError: it fails, or gives a value that is not of that type.
        UnsupportedFeatureError: DataFusion is not installed.
    """
    try:
        found = _run(expression, columns)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise InvalidUsageError(f"The region expression {expression!r} fails: {_message(error)}.") from error
    if len(found) != len(columns[0]):
        raise InvalidUsageError(
            f"The region expression {expression!r} gives {len(found)} values for {len(columns[0])} rows."
        )
    return _as_type(expression, found, kind)


def check_expression(expression: str, sources: Sequence[pa.DataType], kind: pa.DataType) -> None:
    """Refuse an expression that breaks one of the six rules.

    Args:
        sources: types of ``col0``, ``col1``, ...
        kind: its field's ``result_type``.

    Raises:
        InvalidUsageError: names the rule.
        UnsupportedFeatureError: DataFusion is not installed.
    """
    if not sources:
        raise InvalidUsageError(f"The region expression {expression!r} has no source column.")
    _check_calls(expression, sources)
    samples = [_samples(one) for one in sources]
    rows = max(map(len, samples))
    # The samples of several columns are shifted against each other, to combine different values.
    columns = [pa.concat_arrays([one] * (rows // len(one) + 2))[at : at + rows] for at, one in enumerate(samples)]
    whole = evaluated(expression, columns, kind)
    if not whole.equals(evaluated(expression, columns, kind)):
        raise _broken(expression, "deterministic", "the same rows give other values the second time")
    alone = [evaluated(expression, [one[at : at + 1] for one in columns], kind) for at in range(rows)]
    if not whole.equals(pa.concat_arrays(alone)):
        raise _broken(expression, "stateless", "the value of a row depends on other rows")
    _check_promotion(expression, columns, kind, whole)
    for at in range(len(columns)):
        nothing = [pa.nulls(rows, one.type) if other == at else one for other, one in enumerate(columns)]
        removed = [pa.nulls(rows) if other == at else one for other, one in enumerate(columns)]
        try:
            expected = evaluated(expression, nothing, kind)
        except InvalidUsageError as error:
            raise _broken(expression, "NULL-safe", f"where col{at} is NULL, {error}") from error
        try:
            found = evaluated(expression, removed, kind)
        except InvalidUsageError as error:
            raise _broken(expression, _REMOVAL, f"without col{at} {error}") from error
        if not found.equals(expected):
            raise _broken(expression, _REMOVAL, f"without col{at} it gives other values than where that is NULL")


def _check_calls(expression: str, sources: Sequence[pa.DataType]) -> None:
    try:
        parsed = _frame([pa.nulls(1, kind) for kind in sources]).parse_sql_expr(expression)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise InvalidUsageError(f"The region expression {expression!r} is invalid: {_message(error)}.") from error
    called = set(_CALL.findall(parsed.canonical_name()))
    unsteady = sorted(called & (_unsteady() | _OF_RELEASE))
    if unsteady:
        raise _broken(expression, "deterministic and stateless", f"it calls {', '.join(unsteady)}")


def _check_promotion(expression: str, columns: Sequence[pa.Array], kind: pa.DataType, whole: pa.Array) -> None:
    for at, column in enumerate(columns):
        for other in _equivalent(column.type):
            rows = pc.indices_nonzero(_that_fit(column, other))
            some = [one.take(rows) for one in columns]
            some[at] = some[at].cast(other)
            try:
                found = evaluated(expression, some, kind)
            except InvalidUsageError as error:
                # A narrower type may be too small for the result; columns are never changed to narrower types.
                if other.bit_width < column.type.bit_width:
                    continue
                raise _broken(expression, _PROMOTION, f"where col{at} is {other}, {error}") from error
            if not found.equals(whole.take(rows)):
                raise _broken(expression, _PROMOTION, f"where col{at} is {other}, it gives other values")


def _equivalent(kind: pa.DataType) -> list[pa.DataType]:
    """Types to which a numeric type may be changed. uint64 and signed types have no common wider type."""
    if kind in _FLOATS:
        return [one for one in _FLOATS if one != kind]
    if kind in _UNSIGNED:
        return [one for one in _UNSIGNED if one != kind]
    return [one for one in _INTEGERS if one not in {kind, pa.uint64()}] if kind in _INTEGERS else []


def _that_fit(column: pa.Array, kind: pa.DataType) -> pa.Array:
    def fits(value: Any) -> bool:
        if value is None:
            return True
        try:
            return bool(pa.scalar(value, kind).as_py() == value)
        except (pa.ArrowInvalid, OverflowError):
            return False

    return pa.array([fits(value) for value in column.to_pylist()])


def _samples(kind: pa.DataType) -> pa.Array:
    """Values of a type, NULL among them."""
    wanted: list[Any]
    if pa.types.is_integer(kind):
        wanted = [one for one in _NUMBERS if _that_fit(pa.array([one], pa.int64()), kind)[0].as_py()]
    elif pa.types.is_floating(kind):
        wanted = [0.0, 1.0, -1.0, 0.5, -2.25, 1024.0, 65504.0]
    elif pa.types.is_boolean(kind):
        wanted = [True, False]
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        days = pa.array([0, 1, 20_000, -1, -20_000, 11_016], pa.int32()).cast(pa.date32())
        return pa.concat_arrays([days.cast(kind), pa.nulls(1, kind)])
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        wanted = [*_TEXTS]
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wanted = [one.encode() for one in _TEXTS]
    else:
        raise InvalidUsageError(f"A region expression cannot have a column of the type {kind}.")
    return pa.array([*wanted, None], kind)


def _as_type(expression: str, found: pa.Array, kind: pa.DataType) -> pa.Array:
    if found.null_count == len(found):
        return pa.nulls(len(found), kind)
    if found.type != kind and _family(found.type) != _family(kind):
        raise _broken(expression, "consistent with its result type", f"it gives {found.type}, not {kind}")
    try:
        return found.cast(kind)
    except pa.ArrowInvalid as error:
        raise _broken(
            expression, "consistent with its result type", f"a value is not of type {kind}: {error}"
        ) from error


def _family(kind: pa.DataType) -> str:
    types = pa.types
    families: dict[str, Callable[[pa.DataType], bool]] = {
        "number": lambda one: types.is_integer(one) or types.is_decimal(one),
        "float": types.is_floating,
        "date": types.is_date,
        "moment": types.is_timestamp,
        "text": lambda one: types.is_string(one) or types.is_large_string(one) or types.is_string_view(one),
        "bytes": lambda one: types.is_binary(one) or types.is_large_binary(one) or types.is_binary_view(one),
    }
    return next((name for name, belongs in families.items() if belongs(kind)), str(kind))


def _run(expression: str, columns: Sequence[pa.Array]) -> pa.Array:
    frame = _frame(columns)
    return frame.select(frame.parse_sql_expr(expression)).to_arrow_table().column(0).combine_chunks()


def _frame(columns: Sequence[pa.Array]) -> Any:
    """The columns as ``col0``, ``col1``, ..., in a session of their own with one thread, which keeps their order."""
    names = [f"col{at}" for at in range(len(columns))]
    return _session().from_arrow(pa.table(dict(zip(names, columns, strict=True))))


def _session(**settings: str) -> Any:
    try:
        from datafusion import SessionConfig, SessionContext  # noqa: PLC0415 - heavy, and an extra
    except ImportError as error:
        raise UnsupportedFeatureError(
            "Rows of this table are routed to regions by an expression, which needs DataFusion: it is not installed.",
            remedy="Install it: pip install 'memwal-ops[expressions]'.",
        ) from error
    return SessionContext(SessionConfig({"datafusion.execution.target_partitions": "1", **settings}))


@cache
def _unsteady() -> frozenset[str]:
    """Names of the functions that DataFusion does not declare deterministic."""
    session = _session(**{"datafusion.catalog.information_schema": "true"})
    found = session.sql("SELECT routine_name FROM information_schema.routines WHERE NOT is_deterministic")
    return frozenset(found.to_arrow_table().column(0).to_pylist())


def _broken(expression: str, rule: str, detail: str) -> InvalidUsageError:
    return InvalidUsageError(f"The region expression {expression!r} is not {rule}: {detail}.")


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
