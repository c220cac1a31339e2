"""The schema of configuration files: every key with its type and default (docs/configuration.md).

Durations are ``timedelta``, sizes are bytes.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from memwal_ops import text
from memwal_ops.core import cost
from memwal_ops.core.job import Objective
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage import catalogs
from memwal_ops.storage.locations import DATABASE_TABLES, below
from memwal_ops.storage.queues import address_of

# A longer one, added to the current time, would exceed the range of datetime.
_MAX_DURATION = timedelta(days=100 * 365)


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a duration, for example 90s, 15m, 2h or 3d")  # noqa: TRY004 - pydantic's own
    span = text.parse_duration(str(value))
    if span > _MAX_DURATION:
        raise ValueError(f"expected a duration of at most {_MAX_DURATION.days // 365} years")
    return span


def read_size(value: Any) -> int:
    """Return the bytes of a size in a file."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a size, for example 64MiB, 1GiB or 500MB")  # noqa: TRY004 - pydantic's own
    return value if isinstance(value, int) else text.parse_size(str(value))


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic's own
    return value


def _to_string(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _schedule(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        # pydantic converts a ValueError to a validation error, and does not catch a TypeError.
        raise ValueError("expected for example 5m, or a cron line such as '*/15 * * * *'")  # noqa: TRY004
    if isinstance(value, str):
        return {"cron": value} if len(value.split()) > 2 else {"every": value}  # noqa: PLR2004 - "10 m" is a span
    return value


Duration = Annotated[timedelta, BeforeValidator(_duration)]
Positive = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0))]
Size = Annotated[int, BeforeValidator(read_size), Field(gt=0)]
Price = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
LabelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$")]
Options = dict[str, Annotated[str, BeforeValidator(_to_string)]]


class Model(BaseModel):
    """Base of all models; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScheduleConfig(Model):
    """A schedule: ``every`` or ``cron``; a plain string is one of them."""

    every: Positive | None = None
    cron: str | None = None
    jitter: Duration = timedelta(0)

    @model_validator(mode="after")
    def _one(self) -> ScheduleConfig:
        if (self.every is None) == (self.cron is None):
            raise ValueError("give either every or cron")
        if self.every is not None and self.jitter > self.every:
            raise ValueError("its jitter is longer than every")
        return self


class BudgetConfig(Model):
    """At most ``time`` of running within any ``per``."""

    time: Positive
    per: Positive = timedelta(days=1)


def _count(value: Any) -> Any:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)", str(value).strip())
    if isinstance(value, bool) or match is None:
        raise ValueError("expected a number, for example 500k, 2M or 20000000")
    return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])


def _money(value: Any) -> Any:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\s*([A-Z]{3}))?", str(value).strip())
    if isinstance(value, bool) or match is None or not float(match[1]):
        raise ValueError("expected an amount above 0, for example 5 USD")
    return match[1] if match[2] is None else f"{match[1]} {match[2]}"


Count = Annotated[int, BeforeValidator(_count), Field(gt=0)]
Money = Annotated[str, BeforeValidator(_money)]


class FleetBudgetConfig(Model):
    """What all runs of the service may use within any ``per``.

    With ``shadow`` it only records what it would have done.
    """

    cpu: Positive | None = None
    bytes_written: Size | None = None
    requests: Count | None = None
    money: Money | None = None
    per: Positive = timedelta(days=1)
    shadow: StrictBool = False

    @model_validator(mode="after")
    def _any(self) -> FleetBudgetConfig:
        if not self.limits() and not self.shadow:
            raise ValueError("give at least one of cpu, bytes_written, requests and money, or shadow: true")
        return self

    def limits(self) -> dict[str, float]:
        """Those that are given, by name of an amount; processor time in seconds."""
        given = {
            "cpu": None if self.cpu is None else self.cpu.total_seconds(),
            "bytes_written": self.bytes_written,
            "requests": self.requests,
            "money": None if self.money is None else self.money.split()[0],
        }
        return {name: float(limit) for name, limit in given.items() if limit is not None}


class JobConfig(Model):
    """The keys of a job, for all tables or for one. A missing key is taken from the layer below."""

    enabled: StrictBool = True
    apply: StrictBool | None = None
    schedule: Annotated[ScheduleConfig | None, BeforeValidator(_schedule)] = None
    when: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    timeout: Positive | None = None
    hung_after: Positive | None = None
    windows: list[str] = Field(default_factory=list)
    budget: BudgetConfig | None = None
    heartbeat_url: str | None = None


class EraseConfig(Model):
    """When deleted rows are erased.

    They are gone from all files ``within`` a time: the job ``erase`` with that option.
    """

    within: Positive = timedelta(days=30)
    apply: StrictBool | None = None


class TtlConfig(Model):
    """When old rows are deleted.

    Those whose time in ``column`` is older than ``keep`` are erased, too: an option of ``erase``.
    """

    column: Annotated[str, Field(min_length=1)]
    keep: Positive


class Erasing(Model):
    """Keys of tables that say in short what options of the job ``erase`` say."""

    erase: EraseConfig | None = None
    ttl: TtlConfig | None = None
    jobs: dict[str, JobConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_of_erase(self) -> Self:
        given: dict[str, Any] = {} if self.erase is None else {"within": text.duration_text(self.erase.within)}
        if self.ttl is not None:
            given["ttl"] = {"column": self.ttl.column, "keep": text.duration_text(self.ttl.keep)}
        job = self.jobs.get("erase", JobConfig())
        if twice := sorted(given.keys() & job.options.keys()):
            raise ValueError(f"{twice[0]} is given twice: here, and among jobs.erase.options")
        if given:
            applies = {} if self.erase is None or self.erase.apply is None else {"apply": self.erase.apply}
            self.jobs["erase"] = job.model_copy(update={**applies, "options": {**job.options, **given}})
        return self


class Defaults(Erasing):
    """Defaults for all tables."""

    storage_options: Options = Field(default_factory=dict)
    timezone: str = "UTC"
    poll: Positive = timedelta(seconds=30)
    idle_poll: Positive | None = None
    expect_writes_within: Positive | None = None


class NamespaceConfig(Model):
    """The tables of a catalog, below a path of it, by an implementation of ``lance-namespace``."""

    impl: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    properties: Options = Field(default_factory=dict)
    path: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    include: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)

    @property
    def uri(self) -> str:
        """Its URI; properties that may be secrets are not part of it."""
        return catalogs.Catalog(self.impl, tuple(self.path), self.properties).uri()

    @property
    def secrets(self) -> dict[str, str]:
        """The other properties, as storage options."""
        return {
            f"{catalogs.PROPERTY}{key}": value
            for key, value in self.properties.items()
            if catalogs.is_secret_property(key, value)
        }


class ObjectivesConfig(Model):
    """What a table is to keep; what is missed comes before any saving."""

    max_backlog_age: Positive | None = None
    max_fragments: Annotated[Whole, Field(ge=1)] | None = None
    max_unindexed_rows: Annotated[Whole, Field(ge=0)] | None = None
    max_bytes_held: Size | None = None

    def limits(self) -> dict[Objective, float]:
        """Those that are given, by name; an age in seconds."""
        given: dict[Objective, Any] = {name: getattr(self, name) for name in get_args(Objective)}
        return {
            name: limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
            for name, limit in given.items()
            if limit is not None
        }


class TableConfig(Erasing):
    """One entry of ``tables``.

    A table (``uri``), all that match a pattern, those of a LanceDB folder (``database``) or a catalog.
    """

    uri: str | None = None
    pattern: str | None = None
    database: str | None = None
    namespace: NamespaceConfig | None = None
    name: str | None = None
    format: str | None = None
    include: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    branches: Literal["all"] | list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    max_tables: Annotated[Whole, Field(ge=1, le=10_000)] = 1000
    storage_options: Options = Field(default_factory=dict)
    timezone: str | None = None
    poll: Positive | None = None
    idle_poll: Positive | None = None
    expect_writes_within: Positive | None = None
    weight: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1_000_000)] = 1.0
    objectives: ObjectivesConfig = ObjectivesConfig()
    labels: dict[LabelName, Annotated[str, Field(min_length=1, max_length=63)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one(self) -> TableConfig:
        if sum(place is not None for place in (self.uri, self.pattern, self.database, self.namespace)) != 1:
            raise ValueError("give either uri or pattern or database or namespace")
        if self.namespace is not None and (self.include or self.exclude):
            raise ValueError("include and exclude of a namespace are keys of namespace")
        if self.uri is not None and (self.include or self.exclude):
            raise ValueError("include and exclude belong to a pattern")
        if self.name is not None and re.fullmatch(r"[A-Za-z0-9._/-]{1,200}", self.name) is None:
            raise ValueError("a name has letters, digits, '.', '_', '-' and '/' only, at most 200")
        return self

    @property
    def glob(self) -> str | None:
        """The pattern: the given one, or that of a database's tables, or a catalog; None if it is one table."""
        if self.namespace is not None:
            return self.namespace.uri
        return self.pattern if self.database is None else below(self.database, DATABASE_TABLES)


class HttpConfig(Model):
    """The address at which health, metrics and status are served."""

    enabled: StrictBool = True
    host: str = "127.0.0.1"
    port: Annotated[Whole, Field(ge=0, le=65535)] = 9464
    allowed_hosts: list[str] = Field(default_factory=list)
    token_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None

    @model_validator(mode="after")
    def _pair(self) -> HttpConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give both tls_certificate and tls_key, or neither")
        return self


class StorePrices(Model):
    """The prices of one store. Of 1,000 requests by kind, of a GiB read, written, stored a month; of a core's hour."""

    get: Price = 0.0
    put: Price = 0.0
    list: Price = 0.0
    delete: Price = 0.0
    read: Price = 0.0
    written: Price = 0.0
    stored: Price = 0.0
    cpu: Price = 0.0


def _with_list_prices(store: str) -> Any:
    listed = {name: getattr(cost.LIST_PRICES[store], name) for name in StorePrices.model_fields}
    return BeforeValidator(lambda given: {**listed, **given} if isinstance(given, dict) else given)


def _list_prices(store: str) -> StorePrices:
    return StorePrices(**{name: getattr(cost.LIST_PRICES[store], name) for name in StorePrices.model_fields})


class PricesConfig(Model):
    """What stores cost; a price that is not given is the list price."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = cost.CURRENCY
    s3: Annotated[StorePrices, _with_list_prices("s3")] = _list_prices("s3")
    gcs: Annotated[StorePrices, _with_list_prices("gcs")] = _list_prices("gcs")
    azure: Annotated[StorePrices, _with_list_prices("azure")] = _list_prices("azure")
    local: Annotated[StorePrices, _with_list_prices("local")] = _list_prices("local")

    def by_store(self) -> dict[str, cost.Prices]:
        """The prices by the store that a run's ``used`` names; with date and source as far as they are listed."""
        prices = {}
        for store, listed in cost.LIST_PRICES.items():
            given = getattr(self, store).model_dump()
            same = all(getattr(listed, name) == value for name, value in given.items())
            prices[store] = listed if same else cost.Prices(**given, source="the configuration file")
        return prices


class HistoryConfig(Model):
    """The run history; ``path`` is a SQLite file, by default in the state folder."""

    path: str | None = None
    keep: Positive = timedelta(days=30)
    max_runs: Annotated[Whole, Field(ge=100)] = 200_000


class LeasesConfig(Model):
    """Leases on the tables' own stores."""

    enabled: StrictBool = True
    ttl: Annotated[timedelta, BeforeValidator(_duration), Field(ge=timedelta(seconds=3))] = timedelta(minutes=5)


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip(".") or "member"


class FleetConfig(Model):
    """The fleet that this supervisor is a member of: it maintains its share of the tables."""

    uri: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")] = Field(default_factory=_host_name)
    heartbeat: Annotated[timedelta, BeforeValidator(_duration), Field(ge=timedelta(seconds=1))] = timedelta(seconds=15)
    storage_options: Options = Field(default_factory=dict)


class EventsConfig(Model):
    """The queue of the tables' events.

    S3 sends those of their buckets to SQS, so that a commit polls its table at once.
    """

    queue: Annotated[str, Field(min_length=1)]
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")] | None = None
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+/?$")] | None = None
    shared: StrictBool = True
    storage_options: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _address(self) -> EventsConfig:
        try:
            address_of(self.queue, self.endpoint)
        except InvalidUsageError as error:
            raise ValueError(f"queue: {error} {error.remedy}") from error
        return self


class PoolConfig(Model):
    """The worker processes of one pool."""

    workers: Annotated[Whole, Field(ge=1, le=256)] = 1
    max_runs: Annotated[Whole, Field(ge=1)] = 100
    memory: Size | None = None


class PoolsConfig(Model):
    """All pools: ``watch`` polls backlogs, the others run jobs."""

    merge: PoolConfig = PoolConfig()
    build: PoolConfig = PoolConfig()
    collect: PoolConfig = PoolConfig()
    watch: PoolConfig = PoolConfig(max_runs=2000)


class BackoffConfig(Model):
    """The wait after ``failures`` consecutive failures: ``first``, doubling up to ``longest``, each with jitter."""

    failures: Annotated[Whole, Field(ge=1)] = 3
    first: Positive = timedelta(minutes=10)
    longest: Positive = timedelta(hours=6)


class HeartbeatConfig(Model):
    """A URL to be fetched after each success; ``{table}`` and ``{job}`` in it are substituted."""

    url: str | None = None
    timeout: Positive = timedelta(seconds=10)


class TargetConfig(Model):
    """One target of notifications; secrets may be in files, which are read at each use."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    type: Literal["webhook", "slack", "teams", "email", "apprise"]
    level: Literal["warning", "critical"] = "warning"
    url: str | None = None
    url_file: str | None = None
    secret: str | None = None
    secret_file: str | None = None
    host: str | None = None
    port: Annotated[Whole, Field(ge=1, le=65535)] | None = None
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: str | None = None
    password: str | None = None
    password_file: str | None = None
    sender: str | None = None
    to: list[Annotated[str, Field(min_length=3)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> TargetConfig:
        for key in TARGET_SECRETS:
            if getattr(self, key) is not None and getattr(self, f"{key}_file") is not None:
                raise ValueError(f"give either {key} or {key}_file")
        mail = {"host", "port", "security", "username", "password", "password_file", "sender", "to"}
        signed = {"secret", "secret_file"} if self.type == "webhook" else set()
        known = mail if self.type == "email" else {"url", "url_file"} | signed
        if extra := sorted(self.model_fields_set - known - {"name", "type", "level"}):
            raise ValueError(f"a target of the type {self.type} has no {', '.join(extra)}")
        if self.type == "email" and not (self.host and self.sender and self.to):
            raise ValueError("e-mail needs host, sender and to")
        if self.type != "email" and self.url is None and self.url_file is None:
            raise ValueError("give url or url_file")
        if self.type != "apprise" and self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("its url is not http or https")
        if (self.password or self.password_file) and self.username is None:
            raise ValueError("password needs username")
        return self


TARGET_SECRETS = ("url", "secret", "password")
"""The keys of a target that are secret: the address of a chat's webhook is all that it asks for."""


class NotifyConfig(Model):
    """Who is told what is wrong: new, changed and resolved findings."""

    link: str | None = None
    group_wait: Duration = timedelta(minutes=1)
    max_per_hour: Annotated[Whole, Field(ge=1, le=1000)] = 12
    targets: list[TargetConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names(self) -> NotifyConfig:
        names = [target.name for target in self.targets]
        if again := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two targets have the name {again[0]}")
        if self.link is not None and not self.link.startswith(("http://", "https://")):
            raise ValueError("link is not http or https")
        return self


class Config(Model):
    """The whole file."""

    version: Literal[1] = 1
    state_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stop_grace: Positive = timedelta(seconds=60)
    misfire_grace: Positive = timedelta(hours=1)
    discover: Positive = timedelta(minutes=5)
    http: HttpConfig = HttpConfig()
    history: HistoryConfig = HistoryConfig()
    leases: LeasesConfig = LeasesConfig()
    fleet: FleetConfig | None = None
    events: EventsConfig | None = None
    prices: PricesConfig = PricesConfig()
    budget: FleetBudgetConfig | None = None
    pools: PoolsConfig = PoolsConfig()
    backoff: BackoffConfig = BackoffConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()
    notify: NotifyConfig = NotifyConfig()
    defaults: Defaults = Defaults()
    tables: list[TableConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _erased_in_time(self) -> Config:
        within = EraseConfig.model_fields["within"].default
        for table in self.tables:
            layers = [layer.jobs["erase"].options for layer in (table, self.defaults) if "erase" in layer.jobs]
            if any("ttl" in layer for layer in layers) and not any("within" in layer for layer in layers):
                layers[0]["within"] = text.duration_text(within)
        return self

    @model_validator(mode="after")
    def _one_currency(self) -> Config:
        currency = self.prices.currency
        if self.budget is not None and self.budget.money is not None:
            given = self.budget.money.split()[1:]
            if given not in ([], [currency]):
                raise ValueError(f"budget.money is in {given[0]}, and prices.currency is {currency}: use one currency")
        return self
