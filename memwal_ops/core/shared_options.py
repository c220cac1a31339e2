"""The options of jobs that several formats have. Imports none of their code."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from memwal_ops.core.options import OptionError, Options, SafeMinimums, count, duration, flag, group, size, text, texts

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
