"""Define the options of jobs once, for every front end, and choose the engine of a job by the bytes that it works on.

An options class is a frozen dataclass with fields made by the functions below: each has the unit, the
bounds and the help of an option next to its default. The command line, configuration files, Airflow and the
reference in docs/ are all generated from it, and an error names the option as the front end in use spells it::

    @dataclass(frozen=True, kw_only=True)
    class MergeOptions(Options):
        max_bytes: int | None = size(None, help="Budget of one pass.", minimum=1)
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self
from uuid import UUID

from memwal_ops.errors import InvalidUsageError
from memwal_ops.text import duration_text, parse_duration, parse_size, size_literal


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine, and why. ``fell_back`` if Spark would have been selected and cannot run."""

    name: str
    reason: str
    fell_back: bool = False


class EngineOptions(Protocol):
    """The options of a job by which the engine is chosen."""

    @property
    def engine(self) -> str:
        """``local``, ``spark`` or ``auto``."""

    @property
    def spark_above(self) -> int:
        """Bytes above which ``auto`` selects Spark."""


def choose_engine(options: EngineOptions, work: str, size: int) -> EngineChoice:
    """Choose the engine; starts nothing, and checks for Spark only if it would be selected.

    ``work``: what the job works on, for the reason: ``a backlog``. ``size``: of that, in bytes.
    """
    if options.engine != "auto":
        return EngineChoice(options.engine, "requested")
    if size <= options.spark_above:
        return EngineChoice("local", f"{work} of {size:,} bytes is not above {options.spark_above:,}")
    above = f"{work} of {size:,} bytes is above {options.spark_above:,}"
    from memwal_ops.core.spark.session import why_not  # noqa: PLC0415 - not for small work

    missing = why_not()
    if missing is not None:
        return EngineChoice("local", f"{above}, but Spark cannot run here: {missing}", fell_back=True)
    return EngineChoice("spark", above)


_KEY = "memwal_ops"
_MAX_DURATION = timedelta(days=100 * 365)
_NAME = re.compile(r"\{(\w+)\}")


class ValueType(enum.Enum):
    """The type of an option's value."""

    FLAG = "flag"
    COUNT = "count"
    NUMBER = "number"
    SIZE = "size"
    DURATION = "duration"
    CHOICE = "choice"
    TEXT = "text"
    PART = "part"
    """The name of a part of the table (for Lance: a region id, or its first 8 characters or more)."""
    GROUP = "group"
    """All options of another job, as fields of ``maintain`` have them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the field of the options class, with ``_``.
        repeated: it takes any number of values; its value is a tuple.
        values: of a repeated option: the exact number of values, if it is given.
        optional: None is a valid value, with the meaning that ``help`` explains.
        minimum: smallest value (counts, numbers, bytes; durations as ``timedelta``); None: no bound.
        choices: of a choice: the valid values.
        metavar: the placeholder of its value in a usage line.
        shown_default: the text for the default in help; None: the default itself.
        group: of ``GROUP``: the options class.
        command_line: whether the command has it; False: only configuration files and Python have it.
        flag: its spelling on the command line, if that is not ``--name-with-dashes``.
        positional: the command takes it as an argument, without its name.
        flat: of ``GROUP``: the options of the group that the command line of the outer job has, too.
        bare: of a choice: its value where only its name is given, and for True; False is the default.
    """

    name: str
    kind: ValueType
    default: Any
    help: str
    repeated: bool = False
    values: int | None = None
    optional: bool = False
    minimum: Any = None
    maximum: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    shown_default: str | None = None
    group: type[Options] | None = None
    command_line: bool = True
    flag: str | None = None
    flat: tuple[str, ...] = ()
    positional: bool = False
    bare: str | None = None

    @property
    def flags(self) -> str:
        """Its spelling on the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    def default_text(self) -> str | None:
        """The default as help shows it; None if it is not shown."""
        if self.shown_default is not None:
            return self.shown_default
        return None if self.default is None or self.repeated else self.text(self.default)

    def text(self, value: Any) -> str:
        """A value in the spelling that :meth:`read` accepts."""
        if self.kind is ValueType.SIZE:
            return size_literal(value)
        return duration_text(value) if isinstance(value, timedelta) else str(value)

    def read(self, value: Any) -> Any:
        """Convert the input of a front end into a value of the option's type.

        Raises ``OptionError``: the input has no such value. Bounds are checked by :class:`Options` itself.
        """
        if value is None and self.optional:
            return None
        if self.repeated:
            items = [value] if isinstance(value, str | bytes) or not hasattr(value, "__iter__") else [*value]
            return tuple(self.read_one(item) for item in items)
        return self.read_one(value)

    def read_one(self, value: Any) -> Any:
        """Convert one value; as :meth:`read` for an option that is not repeated."""
        try:
            return _READ[self.kind](self, self.unabbreviated(value))
        except ValueError as error:
            raise OptionError(f"{{{self.name}}}: {error}", self.name) from None

    def unabbreviated(self, value: Any) -> Any:
        """The value for which True and False stand, if they stand for one."""
        if self.bare is None or not isinstance(value, bool):
            return value
        return self.bare if value else self.default

    def check(self, value: Any) -> None:
        """Refuse a value of the wrong type or out of bounds.

        Raises ``OptionError``: with the name of the option and the bound.
        """
        if value is None and self.optional:
            return
        if self.repeated and not isinstance(value, tuple):
            raise OptionError(f"{{{self.name}}} must be a tuple, not {value!r:.80}.", self.name)
        if self.values is not None and len(value) not in {0, self.values}:
            raise OptionError(f"{{{self.name}}} takes {self.values} values, not {len(value)}.", self.name)
        for item in value if self.repeated else (value,):
            self.check_one(item)

    def check_one(self, value: Any) -> None:
        """Check one value; as :meth:`check` for an option that is not repeated."""
        if self.kind is ValueType.FLAG:
            boolean(self.name, value)
        elif not isinstance(value, _TYPES[self.kind]) or isinstance(value, bool):
            raise OptionError(f"{{{self.name}}} must be {_TYPE_NAMES[self.kind]}, not {value!r:.80}.", self.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(f"{{{self.name}}} must be a finite number, not {value!r}.", self.name)
        if self.choices and value not in self.choices:
            listed = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise OptionError(f"{{{self.name}}} must be {listed}, not {value!r:.80}.", self.name)
        if self.minimum is not None and value < self.minimum:
            raise OptionError(
                f"{{{self.name}}} must be at least {self.text(self.minimum)}, not {self.text(value)}.", self.name
            )
        if self.maximum is not None and value > self.maximum:
            raise OptionError(
                f"{{{self.name}}} must be at most {self.text(self.maximum)}, not {self.text(value)}.", self.name
            )


class OptionError(InvalidUsageError):
    """An invalid value of an option.

    Args:
        message: with ``{name}`` for each option that it names.
        names: the options at fault; a front end marks the first one.
        remedy: what to do, also with ``{name}``.
    """

    def __init__(self, message: str, *names: str, remedy: str | None = None) -> None:
        self._message, self._remedy = message, remedy
        self.names = names
        super().__init__(_spelled(message, str), remedy=None if remedy is None else _spelled(remedy, str))

    def spelled(self, spell: Callable[[str], str]) -> InvalidUsageError:
        """The same error with the option names of a front end, which ``spell`` returns."""
        remedy = None if self._remedy is None else _spelled(self._remedy, spell)
        return InvalidUsageError(_spelled(self._message, spell), remedy=remedy)


class NotABooleanError(OptionError):
    """A flag has a value that is neither True nor False."""


def boolean(name: str, value: Any, *, optional: bool = False) -> None:
    """Refuse what is no boolean of the API; with ``optional``, None is one, too.

    Timeline: ``apply="no"`` comes from a template or a file; a text that is not empty counts as true; the job deletes.
    Raises ``NotABooleanError``: it is 0, 1, a string or another object.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        valid = "True, False or None" if optional else "True or False"
        raise NotABooleanError(
            f"{{{name}}} must be {valid}, not {value!r:.80}.",
            name,
            remedy=f"Give {{{name}}} as a boolean: texts and numbers are not taken for one.",
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options classes. Every field has a default, and every value is checked at construction.

    A subclass checks conditions on several options in :meth:`validate`. Raises ``OptionError``: a value is of the wrong
    type or out of bounds.
    """

    def __post_init__(self) -> None:
        """Check each value, then all together."""
        for option in describe(type(self)):
            value = getattr(self, option.name)
            if option.kind is ValueType.GROUP:
                assert option.group is not None  # noqa: S101 - group() gives it
                if not isinstance(value, option.group):
                    raise OptionError(f"{{{option.name}}} must be {option.group.__name__}.", option.name)
                continue
            if option.bare is not None and isinstance(value, bool):
                value = option.unabbreviated(value)
                object.__setattr__(self, option.name, value)  # before it is shared
            option.check(value)
        self.validate()

    def validate(self) -> None:
        """Check conditions on several options. Raises ``OptionError``."""

    def validate_repeated(self) -> None:
        """Refuse what a service would do in each of its runs, and is meant for one. Raises ``OptionError``."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Make options from strings and from the values of configuration files and front ends.

        Raises ``OptionError``: an unknown name, or an invalid value.
        """
        known = {option.name: option for option in describe(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            option = known.get(name)
            if option is None:
                listed = ", ".join(known) or "none"
                raise OptionError(f"There is no option {name!r}; there are: {listed}.", name)
            if option.kind is ValueType.GROUP:
                assert option.group is not None  # noqa: S101 - group() gives it
                values[name] = option.group.read(value) if hasattr(value, "items") else value
            else:
                values[name] = option.read(value)
        return cls(**values)


def describe(options: type[Options]) -> tuple[Option, ...]:
    """The options of a class, in the order of its fields."""
    if options not in _KNOWN:
        _KNOWN[options] = tuple(_described(options))
    return _KNOWN[options]


def _described(options: type[Options]) -> Iterator[Option]:
    # Keyword-only ones last, as in the constructor: a base class may add some to the options of a job.
    for field in sorted(dataclasses.fields(options), key=lambda field: field.kw_only is True):
        if _KEY not in field.metadata:
            raise TypeError(
                f"{options.__qualname__}.{field.name} was not made by a function of memwal_ops.core.options"
            )
        yield dataclasses.replace(field.metadata[_KEY], name=field.name)


# A configuration of thousands of tables reads each class as often.
_KNOWN: dict[type[Options], tuple[Option, ...]] = {}


def flag(*, help: str, **more: Any) -> Any:  # noqa: A002 - the word of click and argparse
    """An option that is false unless it is given."""
    return _field(ValueType.FLAG, default=False, help=help, **more)


def count(default: int | None, *, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """A whole number."""
    return _field(ValueType.COUNT, default=default, help=help, **more)


def number(default: float | None, *, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """A number."""
    return _field(ValueType.NUMBER, default=default, help=help, **more)


def size(default: int | None, *, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """A size in bytes, written like ``64MiB``."""
    return _field(ValueType.SIZE, default=default, help=help, **more)


def duration(default: timedelta | None, *, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """A duration, written like ``15m``."""
    more = {"minimum": timedelta(0), "maximum": _MAX_DURATION, **more}
    return _field(ValueType.DURATION, default=default, help=help, **more)


def choice(default: str | None, *choices: str, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """One word of a fixed set."""
    return _field(ValueType.CHOICE, default=default, help=help, choices=choices, **more)


def text(default: str | None, *, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """A string."""
    return _field(ValueType.TEXT, default=default, help=help, **more)


def texts(*, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """Any number of strings."""
    return _field(ValueType.TEXT, default=(), help=help, repeated=True, **more)


def parts(*, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    """Any number of parts of the table."""
    return _field(ValueType.PART, default=(), help=help, repeated=True, **more)


def group(options: type[Options], *flat: str, help: str) -> Any:  # noqa: A002 - see flag
    """All options of another job; the command line has only those listed in ``flat``."""
    option = Option("", ValueType.GROUP, None, help, group=options, command_line=False, flat=flat)
    return dataclasses.field(default_factory=options, metadata={_KEY: option})


def _field(kind: ValueType, *, default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - see flag
    option = Option("", kind, default, help, optional=default is None, **more)
    return dataclasses.field(default=default, metadata={_KEY: option})


@dataclass(frozen=True, kw_only=True)
class SafeMinimums(Options):
    """Options of which low values may lose data: those are refused, unless ``allow_unsafe`` is given, too.

    ``minimums``: by option the lowest safe value, and the timeline that loses data below it.
    """

    minimums: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType({})

    allow_unsafe: bool = flag(help="Accept values below their safe minimum.")

    def validate(self) -> None:
        """Refuse values that may lose data, with the timeline of the loss."""
        super().validate()
        dangers = self._dangers()
        if dangers and not self.allow_unsafe:
            raise OptionError(
                " ".join(text for _, text in dangers),
                *(name for name, _ in dangers),
                remedy="Give a larger value, or {allow_unsafe} if no other process uses the table.",
            )

    def dangers(self) -> tuple[str, ...]:
        """For each value below its safe minimum, the timeline that loses data."""
        return tuple(text.replace(f"{{{name}}}", name.replace("_", " ")) for name, text in self._dangers())

    def _dangers(self) -> list[tuple[str, str]]:
        """For each value below its safe minimum its name, and the timeline with ``{name}`` for it."""
        return [
            (name, f"{{{name}}} below {duration_text(safe) if isinstance(safe, timedelta) else safe}: {timeline}")
            for name, (safe, timeline) in self.minimums.items()
            if getattr(self, name) < safe
        ]


def _spelled(message: str, spell: Callable[[str], str]) -> str:
    return _NAME.sub(lambda match: spell(match[1]), message)


def _read_count(_: Option, value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    try:
        return int(value) if isinstance(value, int | float) else int(_ascii_digits(value))
    except ValueError:
        raise ValueError(f"{value!r:.80} is not a whole number") from None


def _read_number(_: Option, value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")  # noqa: TRY004 - one class for every bad value
    try:
        return float(value) if isinstance(value, int | float) else float(_ascii_digits(value))
    except ValueError:
        raise ValueError(f"{value!r:.80} is not a number") from None


def _ascii_digits(value: Any) -> str:
    """A number as it is written; digits of other scripts are refused."""
    written = str(value).strip()
    if not written.isascii():
        raise ValueError(f"{written!r:.80} is not a number in the digits 0 to 9")
    return written


def _read_size(_: Option, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")  # noqa: TRY004 - one class for every bad value
    return value if isinstance(value, int) else parse_size(str(value))


def _read_duration(_: Option, value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration")  # noqa: TRY004 - one class for every bad value
    return parse_duration(str(value))


def _read_flag(option: Option, value: Any) -> Any:
    boolean(option.name, value)
    return value


def _read_string(_: Option, value: Any) -> str:
    if isinstance(value, bool | float) or not hasattr(value, "__str__") or hasattr(value, "items"):
        raise ValueError(f"{value!r:.80} is not a string")
    return str(value)


_READ: Mapping[ValueType, Callable[[Option, Any], Any]] = {
    ValueType.FLAG: _read_flag,
    ValueType.COUNT: _read_count,
    ValueType.NUMBER: _read_number,
    ValueType.SIZE: _read_size,
    ValueType.DURATION: _read_duration,
    ValueType.CHOICE: _read_string,
    ValueType.TEXT: _read_string,
    ValueType.PART: _read_string,
}
_TYPES: Mapping[ValueType, Any] = {
    ValueType.COUNT: int,
    ValueType.NUMBER: int | float,
    ValueType.SIZE: int,
    ValueType.DURATION: timedelta,
    ValueType.CHOICE: str,
    ValueType.TEXT: str,
    ValueType.PART: str | UUID,
}
_TYPE_NAMES: Mapping[ValueType, str] = {
    ValueType.COUNT: "a whole number",
    ValueType.NUMBER: "a number",
    ValueType.SIZE: "a size in bytes, for example 64MiB",
    ValueType.DURATION: "a duration, for example 15m",
    ValueType.CHOICE: "a word",
    ValueType.TEXT: "a string",
    ValueType.PART: "the name of a part of the table",
}


# The options of jobs that several formats have, without the code of these jobs.
_SPARE = timedelta(days=2)
SAFE_AGE = timedelta(hours=1)
"""How long a writer may take between reading a version and its commit."""
EXPIRED_TOO_EARLY = (
    "a writer begins at version N, another one commits N+1, N+1 is deleted, and the first one commits without a "
    "conflict with it: rows are lost, or are there twice."
)


@dataclass(frozen=True)
class TtlOptions(Options):
    """Which living rows are too old."""

    column: str | None = text(None, help="A column of times: rows with one that is older than keep are deleted.")
    keep: timedelta | None = duration(None, help="How old a row gets.", minimum=timedelta(hours=1))

    def validate(self) -> None:
        """Refuse one without the other."""
        super().validate()
        if (self.column is None) != (self.keep is None):
            raise OptionError("{column} and {keep} belong together: give both.", "column", "keep")

    def expression(self, now: datetime) -> str | None:
        """The rows, in SQL; None: no age is given."""
        if self.column is None or self.keep is None:
            return None
        column = self.column.replace("`", "``")
        return f"`{column}` < CAST('{now.astimezone(UTC) - self.keep:%Y-%m-%dT%H:%M:%S}' AS TIMESTAMP)"


@dataclass(frozen=True)
class EraseOptions(SafeMinimums):
    """The options of ``erase``."""

    minimums = {"older_than": (SAFE_AGE, EXPIRED_TOO_EARLY)}  # noqa: RUF012 - as the base class has it

    where: str | None = text(
        None, metavar="EXPR", help="Rows that match this SQL expression, living ones and those that were deleted."
    )
    deleted_before: str | None = text(
        None, metavar="TIME", help="All rows that were deleted before this time (ISO 8601)."
    )
    within: timedelta | None = duration(
        None, help="Rows are gone that long after they were deleted, if it runs daily; instead of --deleted-before."
    )
    older_than: timedelta = duration(
        timedelta(days=7), help="Remove old versions and what is merged of the log once it is that old."
    )
    certificate: str | None = text(None, metavar="FILE", help="Write what proves it here, once all is erased.")
    sign_with: str | None = text(None, metavar="KEY", help="Sign it by this private key (PEM).")
    ignore_columns: str | None = text(
        None, metavar="NAME,NAME", help="Columns of common words: their values are not looked for in what stays."
    )
    check: str | None = text(None, metavar="FILE", help="Verify a certificate against the table, and do nothing else.")
    ttl: TtlOptions = group(TtlOptions, help="Delete rows by their age, and erase them within that time.")

    def validate(self) -> None:
        """Refuse options that contradict each other."""
        super().validate()
        chosen = [name for name in ("where", "deleted_before", "within", "check") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise OptionError(f"{{{chosen[0]}}} and {{{chosen[1]}}} exclude each other: give one.", *chosen)
        if self.sign_with is not None and self.certificate is None:
            raise OptionError("{sign_with} signs a certificate: give {certificate}, too.", "sign_with")
        if self.where is not None and not self.where.strip():
            raise OptionError("{where} is empty, and would match nothing.", "where")
        if self.within is not None and self.within <= self.older_than:
            raise OptionError("{within} must be longer than {older_than}, for which versions are kept.", "within")
        if self.ttl.column is not None and self.within is None:
            raise OptionError("{ttl} deletes rows, which stay in files: give {within}, too.", "ttl", "within")
        if self.deleted_before is not None and (self.cut(now := datetime.now(UTC)) or now) > now:
            raise OptionError(
                "{deleted_before} is in the future: of rows that are deleted until then, nothing can be said.",
                "deleted_before",
            )

    def cut(self, now: datetime) -> datetime | None:
        """The time before which rows were deleted that must be gone, aware; None: ``where`` is given.

        Of ``within``: as late as it may be, with two days to spare, since each run rewrites what holds them.
        """
        if self.within is not None:
            return now - max(timedelta(0), self.within - self.older_than - _SPARE)
        if self.deleted_before is None:
            return None
        try:
            moment = datetime.fromisoformat(self.deleted_before)
        except ValueError:
            raise OptionError(
                f"{{deleted_before}} is not a time: {self.deleted_before!r:.80}.",
                "deleted_before",
                remedy="Write it like 2026-11-26T09:00:00Z.",
            ) from None
        return moment.astimezone() if moment.tzinfo is None else moment

    def require_target(self) -> None:
        """Refuse a run that says of no row that it must be gone."""
        if self.where is None and self.deleted_before is None and self.within is None:
            raise OptionError(
                "Which rows are to be erased? Give {where}, {deleted_before} or {within}.", "where", "deleted_before"
            )


@dataclass(frozen=True, kw_only=True)
class VerificationOptions(Options):
    """Options of every verification."""

    deep: bool = flag(help="Also read rows (of a Lance table their keys), and compare indexes and filters with them.")
    max_findings: int = count(100, minimum=1, metavar="N", help="List at most N findings of a check; all are counted.")


@dataclass(frozen=True, kw_only=True)
class AnswersOptions(VerificationOptions):
    """Options of a verification that can ask indexes."""

    answers: bool = flag(help="Also ask each index, and compare with a search without it; --deep does so, too.")
    answers_only: bool = flag(
        help="Ask each index, and of the rest check only that objects exist, unless --deep is given."
    )
    index: tuple[str, ...] = texts(metavar="NAME", help="Ask only this index; may be repeated.")
    samples: int = count(64, minimum=8, maximum=4096, metavar="N", help="Draw at least N rows for an index.")
    seed: int | None = count(
        None, minimum=0, metavar="N", shown_default="the revision", help="Draw the same rows again as a run before."
    )
    max_bytes: int = size(256 << 20, minimum=1 << 20, help="Read at most about this much to ask all indexes.")
    show_values: bool = flag(help="Show values of the rows that are examples, which are data.")
    dry_run: bool = flag(help="Print how much asking each index reads at most, by how many queries; ask nothing.")

    @property
    def asks(self) -> bool:
        """Whether indexes are asked."""
        return self.answers or self.answers_only or self.deep or bool(self.index)

    @property
    def checks_all(self) -> bool:
        """Whether the rest of the table is checked, too."""
        return self.deep or not self.answers_only

    def validate(self) -> None:
        """Refuse to tell the cost of nothing."""
        if self.dry_run and not self.asks:
            raise OptionError("{dry_run} tells what asking indexes costs; {answers} asks them.", "dry_run", "answers")

    def seed_at(self, revision: int) -> int:
        """The seed of a run at a revision: other rows for each, if none is given."""
        return revision if self.seed is None else self.seed


@dataclass(frozen=True, kw_only=True)
class RepairOptions(VerificationOptions):
    """Options of every repair."""

    max_findings: int = count(1000, minimum=1, metavar="N", help="Repair at most N findings of a check in one run.")
    accept_loss: bool = flag(
        help="Also make the fixes that go on without what cannot be read any more; the plan prints what each loses."
    )
    undo: str = text("", metavar="ID", help="Restore what the repair with that id replaced; do nothing else.")


@dataclass(frozen=True)
class CollectOptions(Options):
    """The options of ``gc`` that all formats have."""

    max_deletes: int | None = count(None, minimum=1, metavar="N", help="Delete at most N objects.")
    plan_file: str | None = text(None, metavar="FILE", help="Write every candidate here, as JSON lines.")
    limit: int = count(100, minimum=0, metavar="N", help="At most this many candidates of each list in --json.")


@dataclass(frozen=True)
class MaintenanceOptions(Options):
    """The options of a maintenance run. A format adds the options of its steps."""

    apply: bool = flag(help="Let the deleting steps delete. Without it, they only plan.")
    dry_run: bool = flag(help="Change nothing at all.", command_line=False)
    budget: timedelta | None = duration(
        None, help="Start no step once the run has taken this long, for example 45m.", minimum=timedelta(microseconds=1)
    )

    def validate(self) -> None:
        """Refuse ``apply`` together with ``dry_run``."""
        if self.apply and self.dry_run:
            raise OptionError("{apply} and {dry_run} contradict each other; give one of them.", "apply", "dry_run")
