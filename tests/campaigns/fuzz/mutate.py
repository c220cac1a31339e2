"""Hostile inputs out of real ones: what disks, networks, other releases and enemies do to bytes."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from tests.support.tables.wire import Field, decode, encode

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

Mutator = "Callable[[random.Random, Sequence[bytes]], bytes]"

NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63)
HUGE = (*NUMBERS[8:], 2**64 - 2, 2**64 - 1)
_LONGEST = 64 << 10
_DEEP = 300
_TEXTS = ("", "\0", "\n", ".", "..", "/", "../x", "a\\b", "ä😀", "\ud800", "x" * 300, "²", "٣", "9" * 5000, "%00", "{}")


def noise(rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
    """Random bytes, mostly few."""
    return rng.randbytes(rng.choice((0, 1, 2, 3, 4, 8, 16, 24, 64, rng.randrange(200), rng.randrange(4000))))


def damage(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A real input with one to four faults in it."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        _hurt(rng, data, seeds)
    return bytes(data[:_LONGEST])


def _hurt(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(11)
    if kind == 0 and data:
        data[at - 1] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[:at]
    elif kind == 4:
        del data[at : at + rng.randrange(1, 40)]
    elif kind == 5:
        data[at:at] = data[at : at + rng.randrange(1, 40)] * rng.choice((1, 1, 2, 50))
    elif kind == 6:
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif kind == 7:
        other = rng.choice(seeds)
        start = rng.randrange(len(other) + 1)
        data[at : at + rng.choice((0, 8, 1000))] = other[start : start + rng.choice((8, 64, 100_000))]
    elif kind == 8:  # a length, position or count that stands there as a plain number
        code, top = rng.choice((("<H", 2**16), ("<I", 2**32), ("<Q", 2**64), (">I", 2**32)))
        number = rng.choice((*HUGE, len(data), len(data) - 4, rng.randrange(4 * len(data) + 1)))
        value = struct.pack(code, number % top)
        data[at : at + len(value)] = value
    elif kind == 9:  # the same, near the end, where trailers are
        at = max(0, len(data) - rng.randrange(1, 24))
        value = struct.pack("<Q", rng.choice(HUGE))[: len(data) - at]
        data[at : at + len(value)] = value
    else:
        swap = data[at : at + 16]
        del data[at : at + 16]
        to = rng.randrange(len(data) + 1)
        data[to:to] = swap


def surgery(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A real protobuf message with fields changed, repeated, moved, retyped, or of a claimed size that is a lie."""
    try:
        return _operated(rng, rng.choice(seeds), rng.choice((1, 1, 2, 3)))
    except (ValueError, IndexError, KeyError):
        return damage(rng, seeds)


def _operated(rng: random.Random, data: bytes, operations: int) -> bytes:
    fields = decode(data)
    for _ in range(operations):
        inner = [at for at, field in enumerate(fields) if field.wire == 2]
        if inner and rng.random() < 0.6:
            at = rng.choice(inner)
            try:
                changed = _operated(rng, fields[at].value, 1)  # type: ignore[arg-type]
            except (ValueError, IndexError, KeyError):
                changed = rng.choice((b"", noise(rng), rng.choice(_TEXTS).encode("utf-8", "surrogatepass")))
            fields[at] = fields[at]._replace(value=changed)
            continue
        fields = _operate(rng, fields)
    out = encode(fields)
    return out + _tail(rng) if rng.random() < 0.05 else out


def _operate(rng: random.Random, fields: list[Field]) -> list[Field]:
    at = rng.randrange(len(fields) + 1)
    kind = rng.randrange(8)
    if at == len(fields) or kind == 0:
        number = rng.choice((rng.randrange(1, 30), 100, 108, 200, 2**29 - 1))
        new = rng.choice((Field(number, rng.choice(HUGE + NUMBERS), 0), Field(number, noise(rng)[:40], 2)))
        return [*fields[:at], new, *fields[at:]]
    field = fields[at]
    if kind == 1:
        return fields[:at] + fields[at + 1 :]
    if kind == 2:
        size = len(field.value) if isinstance(field.value, bytes) else 1
        times = min(rng.choice((2, 2, 3, 500)), 2 + _LONGEST // (1 + size))  # nested repeats multiply
        return fields[:at] + [field] * times + fields[at + 1 :]
    if kind == 3:
        return sorted(fields, key=lambda _: rng.random())
    if kind == 4:
        return [*fields[:at], field._replace(number=rng.randrange(1, 24)), *fields[at + 1 :]]
    if kind == 5:
        other = Field(field.number, rng.choice(HUGE), 0) if field.wire else Field(field.number, noise(rng)[:40], 2)
        return [*fields[:at], other, *fields[at + 1 :]]
    value: int | bytes = rng.choice(HUGE + NUMBERS) if field.wire == 0 else noise(rng)[:64]
    return [*fields[:at], Field(field.number, value, field.wire if field.wire in (0, 2) else 2), *fields[at + 1 :]]


def _tail(rng: random.Random) -> bytes:
    """What no encoder writes: a field that claims more than there is, endless numbers, deep nesting, groups."""
    number = rng.randrange(1, 24)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes([number << 3 & 127 | 2]) + b"\xff\xff\xff\xff\x0f"
    if kind == 1:
        return bytes([number << 3 & 127]) + b"\xff" * rng.choice((9, 10, 11, 40)) + b"\x01"
    if kind == 2:
        out = b""
        for _ in range(_DEEP):
            out = encode([(rng.choice((1, 6, number)), out)])
        return out
    return bytes([number << 3 & 127 | 3]) * rng.choice((1, _DEEP, 20_000))


def json_surgery(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A real JSON document with values replaced, removed, or nested without end."""
    try:
        document = json.loads(rng.choice(seeds))
    except ValueError:
        return damage(rng, seeds)
    for _ in range(rng.choice((1, 1, 2))):
        document = _other(rng, document)
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    return text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-32")), "surrogatepass")


def _other(rng: random.Random, node: Any) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.8:
        key = rng.choice(sorted(node))
        if rng.random() < 0.15:
            return {name: value for name, value in node.items() if name != key}
        return {**node, key: _other(rng, node[key])}
    if isinstance(node, list) and node and rng.random() < 0.5:
        at = rng.randrange(len(node))
        return [*node[:at], _other(rng, node[at]), *node[at + 1 :]]
    return _json_value(rng)


def _json_value(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((1, 10, 150))):
        deep = [deep]
    return rng.choice(
        (
            None, True, False, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, -(10**30), 10**4000,
            rng.choice(NUMBERS), rng.choice(HUGE), rng.choice(_TEXTS), [], [1], {}, {"version": 1}, deep,
            [rng.choice(NUMBERS)] * rng.choice((1, 1000)), [rng.choice(_TEXTS)],
        )
    )  # fmt: skip


def deep_json(rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
    """Brackets, and nothing else."""
    return rng.choice((b"[", b'{"version":', b'{"a":[')) * rng.choice((10, 1000, 5000, 20_000))


def words(*vocabulary: str) -> Callable[[random.Random, Sequence[bytes]], bytes]:
    """Texts out of these words and some unexpected ones; file names come as bytes, so not all are UTF-8."""
    known = [*(word.encode() for word in vocabulary), *(text.encode("utf-8", "surrogatepass") for text in _TEXTS)]

    def build(rng: random.Random, _: Sequence[bytes] = ()) -> bytes:
        parts = [rng.choice(known) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 6)))]
        if rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts) + 1), rng.randbytes(rng.randrange(1, 6)))
        return b"".join(parts)

    return build
