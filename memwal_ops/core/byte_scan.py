"""Look for values of erased rows in every byte that stays: the judge of an erasure, before anything is certified.

It knows no format, nothing of what a format takes for clean, and shares no code with what finds and deletes rows. A
value is looked for as the bytes by which objects would have it. It is told apart from chance by its length, and from
what may stay by the rows that stay: a value that one of these has, too, says nothing of an erased row. Each object is
read once, a piece at a time, with all values looked for at once.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memwal_ops.core.erasure import ByteScan, RowHolder
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.storage import api

_LEAST, _DISTINCT = 8, 5
"""Bytes, and different ones among them, by which a value can be told apart from others."""
_LONGEST = 512
_MAX_SIZE, _MAX_FORMS = 4 << 20, 50_000
_AT_ONCE = 4 << 20
_THREADS = 4
# Where no more are looked for, each is looked for by itself.
_FEW, _PLACES = 8, 16
_WINDOW, _TABLE_BITS, _FACTOR = 4, 16, np.uint32(0x9E3779B1)
_SHOWN = 3


@dataclass
class ErasedValues:
    """Values of rows that must be gone, as the bytes by which objects would have them.

    Memory: at most 4 MiB, and 50,000, of such forms; values beyond are not looked for.

    ``ignored``: labels whose values are no one's, and are not looked for. ``beyond``: how many there were too many, or
    more.
    """

    ignored: Collection[str] = ()
    beyond: int = 0
    _forms: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    _short: set[int] = field(default_factory=set)
    _size: int = 0

    def add(self, label: str, value: Any, *others: bytes | str) -> None:
        """Add a value: a text, bytes, a number, or those in a list or map. ``others``: how else it is written."""
        for item in _leaves(value) if label not in self.ignored else ():
            forms = {form for spelled in (item, *others) for form in _forms(spelled)}
            told = {form for form in forms if len(form) >= _LEAST and len({*form}) >= _DISTINCT}
            if not told:
                self._short.add(_key(item))
            elif new := [form for form in told if form not in self._forms]:
                if self.is_full():
                    self.beyond += 1
                    return
                for form in new:
                    self._size += len(form)
                    self._forms[form] = (label, _key(item))

    @property
    def too_short(self) -> int:
        """How many values cannot be told apart from others."""
        return len(self._short)

    def is_full(self) -> bool:
        """Whether no more are kept."""
        return self._size >= _MAX_SIZE or len(self._forms) >= _MAX_FORMS

    def forget(self, data: bytes, values: Any = ()) -> None:
        """Do not look for what is among these bytes or values: other rows, or the format itself, have it as well."""
        forms: set[bytes] = set()
        if self._forms:
            Search(self._forms).add(forms, [data])
        known = {self._forms[form][1] for form in forms} | {*map(_key, _leaves(values))}
        self._forms = {form: of for form, of in self._forms.items() if of[1] not in known}

    def __len__(self) -> int:
        return len(self._forms)

    def among(self, forms: Collection[bytes]) -> ErasedValues:
        """Only some of them, by their bytes."""
        return ErasedValues(_forms={form: self._forms[form] for form in forms})

    def labels(self, forms: Collection[bytes]) -> list[str]:
        """The names of those that are still looked for."""
        return sorted({self._forms[form][0] for form in forms if form in self._forms})

    def search(self) -> Search:
        """Finds any of them."""
        return Search(self._forms)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    elif isinstance(value, str | bytes | int | float):
        yield value


def _key(value: Any) -> int:
    return hash((type(value), value))


def _forms(value: Any) -> Iterator[bytes]:
    """How formats write a value: plain, in JSON, behind its length, in binary; of a long one, a part."""
    if isinstance(value, str):
        plain = value.encode("utf-8", "surrogatepass")
        if len(plain) < _LEAST:
            yield struct.pack("<I", len(plain)) + plain
        for quoted in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            text = quoted.encode("utf-8", "surrogatepass")
            yield text if len(plain) < _LEAST else _middle(text[1:-1])
        yield _middle(plain)
    elif isinstance(value, bytes):
        yield _middle(value)
    elif not isinstance(value, bool):
        yield str(value).encode()
        if isinstance(value, float):
            yield from (struct.pack(">d", value), struct.pack("<d", value))
            yield str(struct.unpack("<Q", struct.pack("<d", value))[0]).encode()
        elif -(2**63) <= value < 2**63:
            yield from (struct.pack(">q", value), struct.pack("<q", value))


def _middle(form: bytes) -> bytes:
    begins = max(0, (len(form) - _LONGEST) // 2)
    return form[begins : begins + _LONGEST]


class Search:
    """Finds any of many values in bytes, in one pass.

    Each value is recognized by four of its bytes, those that the fewest other values have.
    """

    def __init__(self, values: Collection[bytes]) -> None:
        """``values``: each of 4 bytes or more."""
        self._values = [*values]
        self._overlap = max(map(len, values), default=1) - 1
        places = {value: range(0, len(value) - _WINDOW + 1, 1 + len(value) // _PLACES) for value in values}
        counts = Counter(value[at : at + _WINDOW] for value, positions in places.items() for at in positions)
        self._by_key: dict[int, list[tuple[bytes, int]]] = {}
        for value, positions in places.items():
            rarest, at = min((counts[value[at : at + _WINDOW]], at) for at in positions)
            del rarest
            self._by_key.setdefault(int.from_bytes(value[at : at + _WINDOW], "little"), []).append((value, at))
        self._keys = np.array(sorted(self._by_key), np.uint32)
        self._shift = np.uint32(32 - max(_TABLE_BITS, len(self._keys).bit_length() + 6))
        self._table = np.zeros(1 << (32 - int(self._shift)), bool)
        self._table[self._hashed(self._keys)] = True

    def add(self, found: set[bytes], pieces: Iterable[bytes], *, joined: bool = False) -> None:
        """Add the values in pieces of bytes; if ``joined``, also those that begin in one and end in the next."""
        rest = b""
        for piece in pieces:
            data = rest + piece if joined else piece
            if len(self._values) <= _FEW:
                found.update(value for value in self._values if value not in found and value in data)
            else:
                for start in range(0, len(data), _AT_ONCE):
                    self._add(data[start : start + _AT_ONCE + self._overlap], found)
            rest = data[-self._overlap :] if self._overlap else b""

    def _add(self, data: bytes, found: set[bytes]) -> None:
        for shift in range(min(_WINDOW, len(data))):
            keys = np.frombuffer(data, "<u4", (len(data) - shift) // _WINDOW, shift)
            likely = np.flatnonzero(self._table[self._hashed(keys)])
            nearest = np.searchsorted(self._keys, keys[likely]).clip(max=len(self._keys) - 1)
            likely = likely[self._keys[nearest] == keys[likely]]
            for key in np.unique(keys[likely]):
                left = [candidate for candidate in self._by_key[int(key)] if candidate[0] not in found]
                for position in likely[keys[likely] == key] * _WINDOW + shift if left else ():
                    hits = [
                        candidate
                        for candidate in left
                        if position >= candidate[1] and data.startswith(candidate[0], int(position) - candidate[1])
                    ]
                    found.update(value for value, _ in hits)
                    left = [candidate for candidate in left if candidate not in hits] if hits else left
                    if not left:
                        break

    def _hashed(self, keys: np.ndarray) -> np.ndarray:
        return (keys * _FACTOR) >> self._shift


class NotDecoded(Exception):  # noqa: N818 - no error: the object is read as it is
    """The bytes of an object encode more than was read. The message is the reason, of a fixed set."""


def _nothing(meta: api.ObjectMeta, tail: bytes) -> None:
    del meta, tail


@dataclass(frozen=True)
class ScanScope:
    """What of a table is scanned, as its format gives it.

    Attributes:
        forget: is called with what was found, and has it forget what rows have that stay, or names and settings.
        explain: the kind of an object, and what removes a value from it.
        decoded: what the bytes of an object encode, in pieces, by the object and its last bytes; None: nothing. The
            iterator raises ``NotDecoded`` at its end if that is not all.
    """

    store: api.Store
    forget: Callable[[ErasedValues], None]
    explain: Callable[[str], tuple[str, str]]
    decoded: Callable[[api.ObjectMeta, bytes], Iterable[bytes] | None] = _nothing


def scan_bytes(scanned: ScanScope, values: ErasedValues) -> ByteScan:
    """Look for values of erased rows in every object that is listed, and in its name."""
    scan = ByteScan(len(values), values.too_short, values.beyond, ignored_columns=tuple(values.ignored))
    if not len(values):
        return scan
    search = values.search()

    def look(meta: api.ObjectMeta) -> tuple[set[bytes], str | None, bool]:
        tail: list[bytes] = []
        forms: set[bytes] = set()
        search.add(forms, [meta.path.encode()])
        search.add(forms, _pieces(scanned.store, meta, tail), joined=True)
        pieces = scanned.decoded(meta, b"".join(tail)[-_AT_ONCE:])
        try:
            search.add(forms, pieces or ())
        except NotDecoded as why:
            return forms, str(why), True
        return forms, None, pieces is not None

    hits: dict[str, set[bytes]] = {}
    for meta, (forms, why, decoded) in api.concurrently(look, scanned.store.list(), threads=_THREADS):
        scan.objects += 1
        scan.bytes += meta.size
        scan.decoded += decoded
        scan.not_decoded.update([] if why is None else [why])
        if forms:
            hits[meta.path] = forms
    left = values.among(set().union(*hits.values()))
    number = len(left)
    if number:
        scanned.forget(left)
    scan.staying = number - len(left)
    for path, forms in sorted(hits.items()):
        if labels := left.labels(forms):
            shown = ", ".join(labels[:_SHOWN]) + (" ..." if len(labels) > _SHOWN else "")
            kind, act = scanned.explain(path)
            why = f"its bytes or its name have {shown} of such a row, which no row that stays has: {act}"
            scan.holders.append(RowHolder(kind, path, why, blocks=True))
    return scan


def _pieces(store: api.Store, meta: api.ObjectMeta, tail: list[bytes]) -> Iterator[bytes]:
    """The bytes of an object; its last two pieces are left in ``tail``. Nothing of one that is gone."""
    try:
        for start in range(0, max(1, meta.size), _AT_ONCE):
            piece = store.get(meta.path) if meta.size <= _AT_ONCE else store.get_range(meta.path, start, _AT_ONCE)
            tail[:] = [*tail[-1:], piece]
            yield piece
    except ObjectNotFoundError:
        return
