"""The records by which members of a fleet announce themselves and what they use: ``members/NAME/``.

They are numbered, and written by put-if-absent, as leases are, so that of two supervisors with one name one notices.
What a member used that ended stays beside them, in ``NUMBER.used``, until it is charged no more.

A charge is written as the seconds that are left of it. A reader adds the age of the record, by the clock of the store:
no time that another machine wrote is compared. A state folder has one history of runs: of several records with its
identity the newest counts, whatever the names of the members, and its own supervisor counts its history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from memwal_ops import errors
from memwal_ops.core import fleet_budget
from memwal_ops.core.leases import NumberedRecords
from memwal_ops.storage.api import Store
from memwal_ops.storage.records import decode_record, encode_record
from memwal_ops.text import printable

Published = Mapping[str, Any]


MAX_CHARGES = 32
# What one machine can use in a second, with a margin; runs that ended within what is charged began before it.
_MOST = fleet_budget.Amounts(cpu=1024.0, bytes_written=1e11, requests=1e5, money=1e6)
_LONGEST_RUN = 86_400.0
_SAME = ("limits", "per", "shadow")


@dataclass(frozen=True, slots=True)
class Use:
    """What one member uses.

    Attributes:
        instance: of its state folder.
        written: when it wrote that, by the clock of the store.
        charges: they end by the clock of the reader.
        in_flight: what its runs are expected to use.
    """

    instance: str
    written: datetime
    charges: tuple[fleet_budget.Charge, ...]
    in_flight: fleet_budget.Amounts


def published(
    limits: Mapping[str, float],
    per: float,
    charges: Iterable[fleet_budget.Charge],
    in_flight: fleet_budget.Amounts,
    now: float,
    *,
    shadow: bool,
) -> dict[str, Any]:
    """What a member writes of its budget: ``MAX_CHARGES`` charges at most, none of which ends too early."""
    left = [(charge.ends - now, charge) for charge in charges if charge.ends > now]
    step = max((seconds for seconds, _ in left), default=0.0) / MAX_CHARGES
    sums: dict[int, tuple[fleet_budget.Amounts, fleet_budget.Amounts]] = {}
    for seconds, charge in left:
        part = min(MAX_CHARGES, math.ceil(seconds / step))
        used, kept = sums.get(part, (fleet_budget.NOTHING, fleet_budget.NOTHING))
        sums[part] = used.plus(charge.used), kept.plus(charge.kept)
    written = [[part * step, *used, *(kept if any(kept) else ())] for part, (used, kept) in sorted(sums.items())]
    return {
        "limits": dict(limits),
        "per": per,
        "shadow": shadow,
        "in_flight": _short(in_flight),
        "charges": [_short(charge) for charge in written],
    }


def as_ended(found: Published) -> dict[str, Any]:
    """What is kept of a member that ended: what its runs were expected to use counts as used."""
    charges = [*found["charges"], *([[found["per"], *found["in_flight"]]] if any(found["in_flight"]) else [])]
    return {**found, "charges": charges, "in_flight": [0.0] * len(fleet_budget.NOTHING)}


def aged(found: Published, age: float) -> dict[str, Any]:
    """The same, as it is some seconds later."""
    charges = [[_number(left) - age, *amounts] for left, *amounts in found["charges"]]
    return {**found, "charges": [charge for charge in charges if charge[0] > 0]}


def use_of(
    instance: str, found: Published | None, written: datetime, store_now: datetime, now: float, per: float = math.inf
) -> Use | None:
    """What a record says, by the clock of the reader; None: nothing, or nothing that is believed.

    Args:
        instance: of its state folder.
        found: what :func:`published` returned there.
        written: when it was written, by the clock of the store.
        per: of the reader's budget: whatever the limits of the other are, it is charged as long as a run of the reader.
    """
    if found is None or refused_use(found, per):
        return None
    try:
        charges = [[min(_number(left), fleet_budget.CHARGED * per), *amounts] for left, *amounts in found["charges"]]
        later = aged({"charges": charges}, max(0.0, (store_now - written).total_seconds()))
        ends = tuple(_charge(charge, now) for charge in later["charges"][: 2 * MAX_CHARGES])
        return Use(instance, written, ends, _amounts(found["in_flight"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def refused_use(found: Published | None, per: float) -> str:
    """Why the use in a record is left out: no member can have used that in the time; empty: it is not left out."""
    if found is None:
        return ""
    try:
        amounts = [_amounts(found["in_flight"]), *(_amounts(charge[1:5]) for charge in found["charges"])]
    except (KeyError, TypeError, ValueError, OverflowError):
        return "it cannot be read"
    seconds = fleet_budget.CHARGED * per + _LONGEST_RUN
    for name, rate in _MOST._asdict().items():
        amount = sum(getattr(one, name) for one in amounts)
        if not amount <= rate * seconds:
            return f"{name} of {amount:.3g}, where the wall clock allows {rate * seconds:.3g} at most"
    return ""


def others_of(uses: Iterable[Use | None], instance: str, living: int, until: float) -> fleet_budget.Others:
    """What others use; ``instance``: that of the reader. See :class:`memwal_ops.core.fleet_budget.Others`."""
    newest: dict[str, Use] = {}
    for use in uses:
        if use is not None and use.instance != instance:
            known = newest.get(use.instance)
            newest[use.instance] = use if known is None or known.written <= use.written else known
    in_flight = fleet_budget.NOTHING
    for use in newest.values():
        in_flight = in_flight.plus(use.in_flight)
    return fleet_budget.Others(
        tuple(charge for use in newest.values() for charge in use.charges), in_flight, living, until
    )


def is_same(one: Published | None, other: Published | None) -> bool:
    """Whether two members have the same budget, or both none."""
    if one is None or other is None:
        return one is other
    return all(one.get(name) == other.get(name) for name in _SAME)


def _charge(numbers: Sequence[object], now: float) -> fleet_budget.Charge:
    left, used, kept = _number(numbers[0]), numbers[1:5], numbers[5:9]
    return fleet_budget.Charge(now + left, _amounts(used), _amounts(kept) if kept else fleet_budget.NOTHING)


def _amounts(numbers: Iterable[object]) -> fleet_budget.Amounts:
    return fleet_budget.Amounts(*(_number(number) for number in numbers))


def _number(found: object) -> float:
    number = float(found)  # type: ignore[arg-type]  # raises what use_of expects
    if not 0 <= number < math.inf:
        raise ValueError(f"{number} is no amount")
    return number


def _short(numbers: Iterable[float]) -> list[float]:
    return [float(f"{number:.6g}") for number in numbers]


FOLDER = "members"
_KEPT = 8
_USED = "used"
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What a member says of itself; nothing of it decides which tables it has.

    Attributes:
        process: changes with each start; instance: is that of its state folder.
        tables: how many tables it maintains, of how many ``known``.
        entries: a digest of the tables of its configuration.
        budget: what it uses, see :mod:`memwal_ops.supervisor.membership.records`; None: it has no budget.
    """

    process: str
    instance: str
    holder: str
    version: str
    started: str
    tables: int
    known: int
    entries: str
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MemberListing:
    """The records of all members, from one listing; times are those of the store.

    Attributes:
        newest: the number of the newest record of each member that has one.
        written: when that was written.
        ended: what is kept of those that ended, by name and number, and when that was written.
        now: when the own record was written, if it was just before, else the newest of all.
    """

    newest: dict[str, int] = field(default_factory=dict)
    written: dict[str, datetime] = field(default_factory=dict)
    ended: dict[tuple[str, int], datetime] = field(default_factory=dict)
    now: datetime = _EARLIEST

    def age(self, name: str) -> float:
        """How many seconds ago the newest record of a member was written."""
        return max(0.0, (self.now - self.written[name]).total_seconds())


class MemberRecords:
    """The records of all members, and the writer of one of them."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._number: int | None = None

    def listed(self) -> MemberListing:
        """Return the newest record of each member; one listing."""
        newest: dict[str, int] = {}
        written: dict[str, datetime] = {}
        ended: dict[tuple[str, int], datetime] = {}
        for meta in self._store.list(FOLDER):
            _, _, below = meta.path.partition("/")
            name, _, file = below.partition("/")
            number, _, suffix = file.partition(".")
            if suffix not in {"json", _USED} or not (number.isascii() and number.isdigit()):
                continue
            if suffix == _USED:
                ended[name, int(number)] = meta.last_modified
            elif int(number) >= newest.get(name, 0):
                newest[name], written[name] = int(number), meta.last_modified
        return MemberListing(newest, written, ended, max([_EARLIEST, *written.values(), *ended.values()]))

    def read(self, name: str, number: int) -> MemberRecord | None:
        """Return a record of a member; None if it is gone, or is not readable by this release."""
        try:
            document: Any = self._of(name).read(number)
            names = ("process", "instance", "holder", "version", "started", "entries")
            text = {key: printable(str(document[key])) for key in names}
            uses = document.get("budget")
            budget = uses if isinstance(uses, dict) else None
            return MemberRecord(**text, tables=int(document["tables"]), known=int(document["known"]), budget=budget)
        except (errors.ObjectNotFoundError, errors.UnsupportedFeatureError):
            return None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None

    def begin(self, listed: MemberListing) -> None:
        """Continue with the name after its newest record: that member is dead, or was this one before a restart."""
        ended = [number for name, number in listed.ended if name == self._name]
        self._number = max([listed.newest.get(self._name, 0), *ended])

    def beat(self, document: MemberRecord) -> MemberListing:
        """Write the next record, and return the newest records of the others.

        Raises:
            AlreadyRunningError: another process writes records of this name.
            StorageError: the store failed.
        """
        assert self._number is not None  # noqa: S101 - after begin
        fields = {name: getattr(document, name) for name in MemberRecord.__slots__}
        written = self._of(self._name).put_if_absent(self._number + 1, fields)
        listed = self.listed()
        # That of another one may be in the future: it was written before a clock was set back.
        listed = replace(listed, now=listed.written.get(self._name, listed.now))
        number = listed.newest.pop(self._name, 0)
        if number > self._number and not (written and number == self._number + 1):
            # A response may be lost: then the record under the number is this process's own.
            record = self.read(self._name, number)
            if record is None or record.process != document.process:
                copied = record is not None and record.instance == document.instance
                raise name_taken(self._name, record, copied=copied)
        self._number = max(self._number, number)
        if number % _KEPT == 0:
            self._prune(number)
        return listed

    def leave(self, document: MemberRecord) -> None:
        """Delete the records of this member: the others take its tables at their next reading."""
        if self._number is not None:
            self.end(self._name, self._number, document)
            self.delete(self._name)

    def end(self, name: str, number: int, document: MemberRecord, age: float = 0.0) -> None:
        """Keep what a member used whose record under that number, written ``age`` seconds ago, is to be deleted."""
        if document.budget is not None:
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                kept = {"instance": document.instance, "budget": as_ended(aged(document.budget, age))}
                self._store.put_if_absent(self._of(name).path(number, _USED), encode_record(kept))

    def read_ended(self, name: str, number: int) -> tuple[str, Mapping[str, Any]] | None:
        """Return what is kept of a member that ended, with its instance; None if this release cannot read it."""
        path = self._of(name).path(number, _USED)
        try:
            document: Any = decode_record(self._store.get(path), path)
            return str(document["instance"]), dict(document["budget"])
        except (
            errors.ObjectNotFoundError,
            errors.UnsupportedFeatureError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ):
            return None

    def delete_ended(self, name: str, number: int) -> None:
        """Delete what is kept of a member, as it is charged no more."""
        self._store.delete_many([self._of(name).path(number, _USED)])

    def delete(self, name: str) -> None:
        """Delete the records of a member."""
        records = self._of(name)
        records.delete_records(records.written())

    def _prune(self, newest: int) -> None:
        records = self._of(self._name)
        records.delete_records(number for number in records.written() if number < newest)

    def _of(self, name: str) -> NumberedRecords:
        return NumberedRecords(self._store, f"{FOLDER}/{name}", "record of a member")


def name_taken(name: str, other: MemberRecord | None, *, copied: bool) -> errors.MemwalOpsError:
    """Return the error for a name, or (``copied``) for the identity of a state folder, that another supervisor has."""
    who = "another supervisor" if other is None else f"another supervisor ({other.holder}, since {other.started})"
    if copied:
        return errors.AlreadyRunningError(
            f"The state folder of this supervisor is a copy of that of {who}, the member {name!r} of the fleet.",
            remedy="Stop one of them. To keep both, delete the file named instance in the state folder of the one that "
            "is stopped, and give it a name of its own (fleet.name).",
        )
    return errors.AlreadyRunningError(
        f"The name {name!r} is that of {who}, which is a member of the fleet.",
        remedy="Give each member a name of its own (fleet.name, for example ${HOSTNAME}), or stop the other one.",
    )
