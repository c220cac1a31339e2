"""Run an erasure: what is the same in every format, and what each one fills in.

Before a certificate is written, all bytes that stay are searched for the values of the rows (:class:`ErasedValues`): by
code that knows no format, and nothing of what the format takes for clean.
"""

from __future__ import annotations

import json
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from memwal_ops.core.certificate import CheckReport, check_certificate, check_key, write_certificate
from memwal_ops.core.erasure import EraseDecision, EraseReport, Holder
from memwal_ops.errors import InvariantViolatedError, ObjectNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.erasure import EraseOptions
    from memwal_ops.storage.api import ObjectMeta, Store

_LEAST, _DISTINCT = 8, 5
"""Bytes, and different ones among them, by which a value can be told apart from others."""
_LONGEST = 512
_MAX_FORMS = 32 << 20
_AT_ONCE = 16 << 20
_MIX, _HASH_BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(16)

NOT_SEEN = (
    "earlier versions of objects, if the bucket keeps them: memwal-ops doctor URI reports it",
    "replicas and backups of the store",
    "caches of readers, and programs that have a version open",
)
"""What no command sees from here, in any format."""


class ErasedValues:
    """Values of rows that must be gone, as the bytes by which objects would have them.

    Memory: at most 32 MiB of such bytes; values beyond are not looked for.
    """

    def __init__(self) -> None:
        self._forms: dict[bytes, tuple[str, int]] = {}
        self._size = 0
        self._windows: dict[int, list[tuple[bytes, int]]] | None = None

    def add(self, label: str, value: Any, *others: bytes | str) -> None:
        """Add a value: a text, bytes, a number, or those in a list or map.

        Args:
            label: how a report names it.
            value: the value.
            others: how else it is written.
        """
        for item in _leaves(value):
            for form in (form for spelled in (item, *others) for form in _forms(spelled)):
                if len(form) >= _LEAST and len({*form}) >= _DISTINCT and self._size < _MAX_FORMS:
                    self._size += len(form)
                    self._forms[form] = (label, _key(item))
                    self._windows = None

    def forget(self, data: bytes, values: Any = ()) -> None:
        """Do not look for what is among these bytes or values: other rows, or the format itself, have it as well."""
        known = {self._forms[form][1] for form in self._found(data)} | {*map(_key, _leaves(values))}
        forms = {form: of for form, of in self._forms.items() if of[1] not in known}
        if len(forms) < len(self._forms):
            self._forms, self._windows = forms, None

    def __len__(self) -> int:
        """How many forms of values are looked for."""
        return len(self._forms)

    def in_store(self, store: Store) -> Iterator[tuple[str, str]]:
        """Paths of objects that have a value, with the label of one of its values. Every byte of them is read."""
        overlap = max(map(len, self._forms), default=0)
        for meta in store.list() if overlap else ():
            label, begins = None, 0
            try:
                while label is None and begins < meta.size:
                    data = store.get_range(meta.path, begins, _AT_ONCE + overlap)
                    label = next((self._forms[form][0] for form in self._found(data)), None)
                    begins += _AT_ONCE
            except ObjectNotFoundError:
                continue
            if label is not None:
                yield meta.path, label

    def _found(self, data: bytes) -> Iterator[bytes]:
        """The forms that are in some bytes: first those windows of eight bytes that a form has in its middle."""
        if self._windows is None:
            self._windows = {}
            for form in self._forms:
                offset = (len(form) - _LEAST) // 2
                (window,) = struct.unpack_from("<Q", form, offset)
                self._windows.setdefault(window, []).append((form, offset))
            self._sorted = np.array(sorted(self._windows), np.uint64)
            self._hashes = np.zeros(1 << int(_HASH_BITS), np.bool_)
            self._hashes[_hashed(self._sorted)] = True
        seen = set[bytes]()
        for shift in range(_LEAST) if len(self._forms) else ():
            words = np.frombuffer(data, "<u8", max(0, len(data) - shift) // _LEAST, shift if len(data) > shift else 0)
            places = np.flatnonzero(self._hashes[_hashed(words)])
            for place in places[np.isin(words[places], self._sorted)].tolist():
                for form, offset in self._windows[int(words[place])]:
                    begins = shift + _LEAST * place - offset
                    if begins >= 0 and form not in seen and data.startswith(form, begins):
                        seen.add(form)
                        yield form


def _hashed(words: Any) -> Any:
    return (words * _MIX) >> (np.uint64(64) - _HASH_BITS)


def _leaves(value: Any) -> Iterator[Any]:
    """A value, or those in a list or map."""
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


@dataclass(slots=True)
class Survey:
    """What a reading of the whole table found.

    Attributes:
        table: the newest revision.
        living: how many rows are to be deleted, and are not yet.
        holders: all that may hold rows which must be gone.
        objects: every object of the table, and why it cannot hold such a row; None: it may.
    """

    table: Any
    living: int = 0
    holders: list[Holder] = field(default_factory=list)
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)


@dataclass(kw_only=True)
class Erasure(ABC):
    """The erasure of rows of one table, as its format does it.

    A step is safe to kill: what is left to do is found by reading the table anew, and not from a record of the run.

    Attributes:
        options: those of the run.
        context: of the run.
        done: what it did, by name.
        faults: what it could not do, and that the table does not show.
        warnings: what the operator must know of the rows that were chosen.
        unsearched: what was not looked for in the bytes that stay.
        not_seen: where no command can look.
        written_in_place: objects, or folders with a slash, that later commits write again under the same name.
    """

    options: EraseOptions
    context: RunContext
    done: Counter[str] = field(default_factory=Counter)
    faults: list[Holder] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unsearched: tuple[str, ...] = ()
    not_seen: ClassVar[tuple[str, ...]] = NOT_SEEN
    written_in_place: ClassVar[tuple[str, ...]] = ()

    @property
    def before(self) -> datetime | None:
        """The time before which the rows were deleted; None: an expression says which they are."""
        return None

    @abstractmethod
    def survey(self) -> Survey:
        """Read all that the store lists, without changes."""

    @abstractmethod
    def erase(self) -> Survey:
        """Do every step that something needs, and survey what is left."""

    def leaks(self) -> list[Holder]:
        """What still has bytes of such a row, although the survey found nothing; for a certificate."""
        return []

    def count(self, name: str, number: int) -> None:
        """Add to what was done."""
        if number:
            self.done[name] += number
            self.context.figures[name] += number


def run_erasure(
    table: Any, options: EraseOptions, begin: Callable[[], Erasure], *, applied: bool
) -> EraseReport | CheckReport:
    """Plan or apply an erasure, or check a certificate, as the options say.

    Args:
        table: any revision.
        options: those of the run.
        begin: checks the table and makes the erasure; not called for a check.
        applied: whether the run may change anything.

    Raises:
        OptionError: no rows are given; or the key cannot sign.
        MemwalOpsError: that of a step; what was done stays, and the next run continues.
    """
    if options.check is not None:
        return check_certificate(table.newest(), options.check)
    started = time.monotonic()
    options.require_target()
    if options.sign_with is not None:
        check_key(options.sign_with)
    erasure = begin()
    found = erasure.erase() if applied else erasure.survey()
    report = EraseReport(
        applied=applied,
        holders=(*found.holders, *erasure.faults),
        version=found.table.revision,
        living=found.living,
        done=dict(erasure.done),
        not_seen=erasure.not_seen,
        warnings=(*options.dangers(), *erasure.warnings),
    )
    if report.decision is EraseDecision.ERASED and options.certificate is not None:
        report.holders = tuple(erasure.leaks())
        report.not_seen += erasure.unsearched
    if report.decision is EraseDecision.ERASED:
        proven = [(meta, why) for meta, why in found.objects if why is not None]
        if len(proven) < len(found.objects):
            unproven = next(meta.path for meta, why in found.objects if why is None)
            raise InvariantViolatedError(f"Nothing holds such a row, and yet nothing shows that of {unproven}.")
        if options.certificate is not None:
            report.certificate = write_certificate(found.table, options, erasure, proven)
    report.seconds = time.monotonic() - started
    return report
