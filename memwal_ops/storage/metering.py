"""Count the requests of this process to stores, and their bytes, for the ledger of runs (:class:`Meter`).

What obstore sends is counted here, one request at a time, with those that are repeated. What a library sends by itself
is read from that library, by :meth:`Meter.watch`. A request has one of four kinds, as stores bill them.

Obstore's clients are made here, with their own retry switched off.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import obstore
from obstore.exceptions import UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage import locations
from memwal_ops.storage.errors import translate
from memwal_ops.storage.options import is_ours, known_options, split_for_obstore

if TYPE_CHECKING:
    from obstore.store import ClientConfig

Client: TypeAlias = "AzureStore | GCSStore | LocalStore | MemoryStore | S3Store"

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def remote_client(location: locations.Location) -> Client:
    """The client of a remote or memory location.

    Memory locations with the same URI share one store, for the life of the process. Raises ``InvalidUsageError``: an
    unknown or invalid option.
    """
    if location.scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(location.uri, MemoryStore())
    bucket, prefix = locations.bucket_and_prefix(location)
    config, client_options = split_for_obstore(location.lance_options)
    arguments: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": cast("ClientConfig", client_options),
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
    }
    try:
        if location.scheme in locations.S3:
            return _s3(location, bucket, config, arguments)
        if location.scheme == "gs":
            return GCSStore(bucket, config=cast("Any", config), **arguments)
        return AzureStore(bucket, config=cast("Any", config), **arguments)
    except UnknownConfigurationKeyError as exc:
        for key in config:
            check_known({key: config[key]})
        error = translate(exc, path=location.uri, action="read")
        raise InvalidUsageError(f"The storage options cannot be used: {error}", remedy=known_options()) from exc
    except Exception as exc:
        # Building sends no request: every failure here is due to an option.
        error = translate(exc, path=location.uri, action="read")
        raise InvalidUsageError(f"The storage options cannot be used: {error}") from exc


def check_known(options: Mapping[str, str]) -> None:
    """Refuse an option that no store has. Options of other stores are accepted, as tables may share options.

    Raises ``InvalidUsageError``: an unknown option; the remedy lists the known ones.
    """
    config, _ = split_for_obstore(options)
    for key in config:
        if is_ours(key) or any(_has(kind, key) for kind in (S3Store, AzureStore, GCSStore)):
            continue
        raise InvalidUsageError(f"There is no storage option {key!r}.", remedy=known_options(key))


def _has(kind: Any, key: str) -> bool:
    try:
        kind("bucket", config={key: ""})
    except UnknownConfigurationKeyError:
        return False
    except Exception:  # noqa: BLE001 - the key is known: its value is invalid, or another option is missing
        return True
    return True


def _s3(location: locations.Location, bucket: str, config: dict[str, str], arguments: dict[str, Any]) -> S3Store:
    provider = location.aws.provider() if location.aws is not None else None
    if provider is not None:
        # With a provider, obstore must not see the keys as well: they would never be renewed.
        for key in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
            config.pop(key, None)
        arguments["credential_provider"] = provider
    return S3Store(bucket, config=cast("Any", config), **arguments)


Kind = Literal["get", "put", "list", "delete"]
"""``get`` has HEAD, too; ``put`` has copies and the parts of an upload."""
KINDS: tuple[Kind, ...] = ("get", "put", "list", "delete")
_PAGE = 1000
_ONE_BY_ONE, _LOCAL = "GCSStore", "LocalStore"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by kind, and bytes. ``bytes_read``: of objects; the answers of listings are not counted."""

    requests: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, before: Traffic) -> Traffic:
        """What was added after an earlier reading."""
        requests: dict[str, int] = {kind: self.requests.get(kind, 0) - before.requests.get(kind, 0) for kind in KINDS}
        return Traffic(requests, self.bytes_read - before.bytes_read, self.bytes_written - before.bytes_written)


class Meter:
    """The traffic of a process. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests: Counter[str] = Counter()
        self._read = self._written = 0
        self._watched: dict[int, Callable[[], Traffic]] = {}
        self._ended: deque[Callable[[], Traffic]] = deque()

    def count(self, kind: Kind, number: int = 1, *, read: int = 0, written: int = 0) -> None:
        """Add requests of a kind."""
        with self._lock:
            self._requests[kind] += number
            self._read += read
            self._written += written

    def watch(self, owner: object, read: Callable[[], Traffic]) -> None:
        """Add what ``read`` returns, now and as long as ``owner`` lives; ``read`` must not refer to ``owner``."""
        key = id(owner)
        with self._lock:
            self._drain()

        def ended() -> None:
            # The garbage collector may call it inside of any other method: it takes no lock. And within a commit of
            # pylance, which calls us: its figures cannot be read there, but later.
            self._ended.append(read)
            self._watched.pop(key, None)

        self._watched[key] = read
        weakref.finalize(owner, ended).atexit = False

    def traffic(self) -> Traffic:
        """All traffic so far."""
        with self._lock:
            self._drain()
            readings = [read() for read in list(self._watched.values())]
            requests = Counter(self._requests)
            for reading in readings:
                requests.update(reading.requests)
            return Traffic(
                dict(requests),
                self._read + sum(reading.bytes_read for reading in readings),
                self._written + sum(reading.bytes_written for reading in readings),
            )

    def _drain(self) -> None:
        """Add what was sent for owners that have ended; not where pylance may have called us."""
        while self._ended:
            last = self._ended.popleft()()
            self._requests.update(last.requests)
            self._read += last.bytes_read
            self._written += last.bytes_written


REMOTE, LOCAL = Meter(), Meter()
"""What this process sends to stores, and what it does on local files: of a table in a store, those are copies."""


def _meter(client: object) -> Meter:
    return LOCAL if type(client).__name__ == _LOCAL else REMOTE


def get(client: Client, path: str) -> obstore.GetResult:
    """``obstore.get``, counted with the size of the object."""
    _meter(client).count("get")
    result = obstore.get(client, path)
    _meter(client).count("get", 0, read=result.meta["size"])
    return result


def get_range(client: Client, path: str, *, start: int, length: int) -> bytes:
    """``obstore.get_range``, counted."""
    _meter(client).count("get")
    content = bytes(obstore.get_range(client, path, start=start, length=length))
    _meter(client).count("get", 0, read=len(content))
    return content


def head(client: Client, path: str) -> obstore.ObjectMeta:
    """``obstore.head``, counted."""
    _meter(client).count("get")
    return obstore.head(client, path)


def put(client: Client, path: str, data: bytes, **options: Any) -> None:
    """``obstore.put``, counted."""
    _meter(client).count("put", written=len(data))
    obstore.put(client, path, data, **options)


def copy(client: Client, source: str, target: str) -> None:
    """``obstore.copy``, counted."""
    _meter(client).count("put")
    obstore.copy(client, source, target)


def delete(client: Any, paths: str | Sequence[str]) -> None:
    """``obstore.delete``, counted: a batch is one request, where the store has batches."""
    single = isinstance(paths, str) or type(client).__name__ != _ONE_BY_ONE
    _meter(client).count("delete", 1 if single else len(paths))
    obstore.delete(client, paths)


def list_with_delimiter(client: Client, folder: str | None) -> obstore.ListResult[Sequence[obstore.ObjectMeta]]:
    """``obstore.list_with_delimiter``, counted: a request for each 1,000 entries."""
    _meter(client).count("list")
    listing = obstore.list_with_delimiter(client, folder)
    _meter(client).count("list", (len(listing["objects"]) + len(listing["common_prefixes"])) // _PAGE)
    return listing


def pages(client: Client, folder: str | None, offset: str | None) -> Iterator[Sequence[obstore.ObjectMeta]]:
    """``obstore.list``, counted: a request for each page of 1,000 objects."""
    _meter(client).count("list")
    for number, page in enumerate(obstore.list(client, folder, offset=offset, chunk_size=_PAGE)):
        if number:
            _meter(client).count("list")
        yield page
