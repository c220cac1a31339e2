"""Write compact JSON text with numbers as serde_json writes them, for checksums.

Numbers have the shortest digits that round-trip; integers get ``.0``; the exponent form starts where
serde_json (with zmij) starts it, which differs between single and double precision, and has a plus sign.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

# Decimal exponents of numbers that are written without an exponent.
_SINGLE = range(-6, 13)
_DOUBLE = range(-5, 16)
# Within these bounds Arrow's text has no exponent either.
_PLAIN = (1e-4, 1e9)


def vector_texts(values: NDArray[np.float32]) -> list[str]:
    """Each row of single-precision numbers as a JSON list."""
    rows, width = values.shape
    if not width:
        return ["[]"] * rows
    flat = np.ascontiguousarray(values).reshape(-1)
    texts = pc.cast(pa.array(flat), pa.string())
    whole = pc.invert(pc.match_substring(texts, "."))
    texts = pc.if_else(whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
    size = np.abs(flat)
    exponential = np.flatnonzero(((size < _PLAIN[0]) & (size != 0)) | (size >= _PLAIN[1]) | ~np.isfinite(flat))
    if len(exponential):
        # str(float32) also writes the shortest digits.
        fixed = np.array(texts.to_pylist(), dtype=object)
        fixed[exponential] = [single_text(value) for value in flat[exponential]]
        texts = pa.array(fixed, pa.string())
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, width, dtype=np.int32)), texts)
    return [f"[{row}]" for row in pc.binary_join(lists, ",").to_pylist()]


def single_text(value: np.float32) -> str:
    """One number of single precision."""
    return _serde(str(value), _SINGLE) if np.isfinite(value) else "null"


def double_text(value: float) -> str:
    """One number of double precision."""
    return _serde(repr(value), _DOUBLE) if math.isfinite(value) else "null"


def json_text(value: Any, in_order: Callable[[Iterable[str]], list[str]] = sorted) -> str:
    """A JSON value: keys sorted by their bytes, or in another order; no spaces, non-ASCII characters unescaped."""
    if isinstance(value, float):
        return double_text(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{json_text(value[key], in_order)}" for key in in_order(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(json_text(one, in_order) for one in value) + "]"
    return _quoted(value)


def compact_json(value: Any) -> bytes:
    """A JSON value of another program as an object: lone surrogates are escaped, numbers that are not finite null."""
    form = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    try:
        return form(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return form(value, ensure_ascii=True).encode()
    except ValueError:
        return compact_json(finite(value))


def finite(value: Any) -> Any:
    """A JSON value with null in place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list) else value


def joined(parts: Sequence[str]) -> str:
    """A JSON list of texts."""
    return f"[{','.join(parts)}]"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _serde(text: str, fixed: range) -> str:
    """A number's text in serde's notation; its digits do not change."""
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    mantissa, _, power = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return f"{sign}0.0"
    # digits[0] . digits[1:] times ten to this.
    exponent = int(power or 0) + len(whole) - 1 - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0") or "0"
    if exponent not in fixed:
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{exponent:+d}" if exponent > 0 else f"{sign}{digits[0]}{tail}e{exponent}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    digits = digits.ljust(exponent + 1, "0")
    return f"{sign}{digits[: exponent + 1]}.{digits[exponent + 1 :] or '0'}"
