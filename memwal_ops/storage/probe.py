"""Verify that a store enforces conditional writes, before any commit relies on them.

Every commit to a Lance table depends on put-if-absent: if a store accepts the header and ignores it, two writers both
publish version 7, and the second one overwrites the first one's rows. Formats with a single manifest object need
compare-and-swap. Stores differ in how they expect an entity tag in ``If-Match``: Azurite quotes it in the response to
HEAD and not in a listing, Ceph RGW 16.2 compares only the tag without quotes, RFC 9110 and AWS S3 require them. So tags
are kept without quotes, and the spelling to send is tried out on the store.

Which stores passed is cached for a day in the user's cache folder, one small file for each. Whatever cannot be read, is
older, comes from the future, or from another release of this package or of the client library, is ignored: the store is
probed again. A failed probe is never cached, and with a folder that cannot be written, every process probes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import obstore

from memwal_ops import errors
from memwal_ops.storage.api import Store
from memwal_ops.storage.errors import translate
from memwal_ops.storage.locations import Location
from memwal_ops.storage.options import is_lance_only, is_secret_key
from memwal_ops.version import __version__

CACHE_VARIABLE = "MEMWAL_OPS_CACHE"
_VALID_SECONDS = 86_400.0
_RELEASES = f"memwal-ops {__version__}, obstore {obstore.__version__}"
# Parts of the names of variables that lead requests elsewhere or change them; client libraries read them themselves.
_ENDPOINT_VARIABLES = ("ENDPOINT", "ACCOUNT_NAME", "EMULATOR", "AZURITE", "PROXY", "CONDITIONAL", "BASE_URL")
_USER = re.compile(r"(?<=://)[^/@]*@")


def service_of(location: Location) -> str | None:
    """Identify the service behind a location: scheme, bucket, and all options but credentials.

    None for what is not remembered beyond this process: memory, and local files, where a probe takes some
    milliseconds, and the same path may be another file system a minute later.

    Only the user in a URL is left out of a value. The redactor of messages masks more: all of a host that is a user's
    name too, and the port behind a name like ``disaster-recovery``, so that two services would be one.
    """
    if location.scheme in {"file", "memory"}:
        return None
    bucket = location.uri.split("://", 1)[1].partition("/")[0]
    options = sorted(
        (key, _USER.sub("", value))
        for key, value in location.lance_options.items()
        if not is_secret_key(key) and not is_lance_only(key)
    )
    variables = sorted(
        (name, _USER.sub("", value))
        for name, value in os.environ.items()
        if any(part in name.upper() for part in _ENDPOINT_VARIABLES)
    )
    digest = hashlib.sha256(json.dumps([location.scheme, bucket, options, variables]).encode()).hexdigest()
    return f"{location.scheme}://{bucket} {digest}"


def is_proven(service: str) -> bool:
    """Whether the store was seen, by this release and within a day, to enforce conditional writes."""
    path = _path(service)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            record = json.loads(file.read(4096))
        age = time.time() - float(record["proven"])
        return bool(record["service"] == service and record["releases"] == _RELEASES and 0 <= age < _VALID_SECONDS)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False


def remember(service: str) -> None:
    """Remember a success; the file is renamed into place, so that another process reads all of it or nothing."""
    path = _path(service)
    if path is None:
        return
    document = {"service": service, "releases": _RELEASES, "proven": time.time()}
    with suppress(OSError):
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _remove_old(folder)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump(document, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def forget(service: str) -> None:
    """Remove a cached success."""
    path = _path(service)
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _path(service: str) -> str | None:
    """The path of its cache file; None if there is no cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given is None:
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
        given = os.path.join(base, "memwal-ops")
    if not os.path.isabs(given):
        return None
    return os.path.join(given, "proven-stores", f"{hashlib.sha256(service.encode()).hexdigest()}.json")


def _remove_old(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _VALID_SECONDS:
                    os.unlink(entry.path)


PROBE_FOLDER = "_mem_wal_ops/probe"
_RIVALS = 8
NO_SWAP = "Use numbered versions by put-if-absent on this store; Lance tables need nothing else."
_proven: set[str] = set()
_lock = threading.Lock()


def probe_conditional_writes(store: Store, *, again: bool = False) -> None:
    """Verify put-if-absent by trying it (S3-044, S3-045): ten writes, two reads, one delete.

    An object is created, then created again with other content (which must be refused and change
    nothing), and then 8 threads create another object concurrently, of which exactly one must succeed.
    On local files a hard link to an existing name must be refused too: the write is made
    exclusive by a link there. The objects are deleted in any case. A success is remembered until the process ends, and
    of a remote store (its service and bucket) for a day, see :mod:`memwal_ops.storage.probe`; a failure
    never is. ``again``: try it, even if a success is remembered.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce it.
        ReadOnlyStoreError: the store cannot be written.
    """
    mark = getattr(store, "mark", None)
    if mark is not None:
        mark()  # also if it is proven: a commit that follows may be pylance's, which passes the store by
    service: str | None = getattr(store, "service", None)
    key = service or store.root
    if not again:
        with _lock:
            if key in _proven:
                return
        if service is not None and is_proven(service):
            return
    name = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
    raced = f"{name}-raced"
    written = [name]
    try:
        _refuses_second(store, name, written)
        written.append(raced)
        _has_one_winner(store, raced)
        if store.root.startswith("/"):
            _links_are_exclusive(os.path.join(store.root, name))
    except errors.ConditionalWriteUnsupportedError:
        with _lock:
            _proven.discard(key)
        if service is not None:
            forget(service)
        raise
    finally:
        if written:
            store.delete_many(written)
    with _lock:
        _proven.add(key)
    if service is not None:
        remember(service)


def probe_compare_and_swap(store: Store) -> None:
    """Verify compare-and-swap by trying it (S4-021): of 8 concurrent replacements of one object, one must succeed.

    This also determines how the store expects the entity tag, see
    :func:`memwal_ops.storage.probe.accepted_spelling`. The object is deleted in any case.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce it, or has none (local files).
        ReadOnlyStoreError: the store cannot be written.
    """
    name = f"{PROBE_FOLDER}/{uuid.uuid4().hex}-swapped"
    written = [name]
    try:
        create_object(store, name, b"old " + os.urandom(16), written)
        meta = store.head(name)
        tag = meta.e_tag if meta is not None else None
        if tag is None:
            raise errors.ConditionalWriteUnsupportedError(
                f"{store.root} gives its objects no entity tags.", remedy=NO_SWAP
            )
        rivals = [f"rival {number} ".encode() + os.urandom(16) for number in range(_RIVALS)]
        with ThreadPoolExecutor(_RIVALS) as pool:
            results = pool.map(lambda data: store.compare_and_swap(name, data, tag), rivals)
            won = [rival for rival, first in zip(rivals, results, strict=True) if first]
        if len(won) != 1 or store.get(name) != won[0]:
            raise errors.ConditionalWriteUnsupportedError(
                f"{store.root} let {len(won)} of {_RIVALS} writers replace one object at the same time.", remedy=NO_SWAP
            )
    finally:
        if written:
            store.delete_many(written)


def create_object(store: Store, name: str, data: bytes, written: list[str]) -> None:
    """Create an object; if the store refuses it, its name is removed from ``written``: there is nothing to delete."""
    try:
        created = store.put_if_absent(name, data)
    except errors.StoreUnavailableError:
        raise  # it may have succeeded
    except errors.MemwalOpsError:
        written.remove(name)
        raise
    if not created:
        raise errors.ConditionalWriteUnsupportedError(f"{store.root} refused to create an object that did not exist.")


def _refuses_second(store: Store, name: str, written: list[str]) -> None:
    first, second = b"first " + os.urandom(16), b"second " + os.urandom(16)
    create_object(store, name, first, written)
    taken = store.put_if_absent(name, second)
    if taken or store.get(name) != first:
        raise errors.ConditionalWriteUnsupportedError(
            f"{store.root} overwrote an object that was to be created only if absent."
        )


def _has_one_winner(store: Store, name: str) -> None:
    rivals = [f"rival {number} ".encode() + os.urandom(16) for number in range(_RIVALS)]
    with ThreadPoolExecutor(_RIVALS) as pool:
        results = pool.map(lambda data: store.put_if_absent(name, data), rivals)
        won = [rival for rival, first in zip(rivals, results, strict=True) if first]
    if len(won) != 1 or store.get(name) != won[0]:
        raise errors.ConditionalWriteUnsupportedError(
            f"{store.root} let {len(won)} of {_RIVALS} writers create one object at the same time."
        )


def _links_are_exclusive(existing: str) -> None:
    other = f"{existing}-link"
    try:
        os.link(existing, other)
        try:
            os.link(existing, other)
        except FileExistsError:
            return
        raise errors.ConditionalWriteUnsupportedError("The file system replaced an existing file by a hard link.")
    except OSError as exc:
        if exc.errno in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise errors.ConditionalWriteUnsupportedError(
                "The file system has no hard links, by which a file is created exclusively."
            ) from exc
        raise translate(exc, path=other, action="write") from exc
    finally:
        if os.path.lexists(other):
            os.unlink(other)


# The standard's spelling first: if the store compares it, the other one is not tried.
_SPELLINGS = ('"{}"', "{}")


def bare(e_tag: str) -> str:
    """The tag without surrounding quotes; a weak one (``W/"..."``) unchanged."""
    return e_tag[1:-1] if len(e_tag) > 1 and e_tag.startswith('"') and e_tag.endswith('"') else e_tag


def accepted_spelling(store: Store, swap: Callable[[str, bytes, str], bool]) -> str:
    """The spelling of a tag in ``If-Match`` that the store compares, as a format string; 3 to 6 small requests.

    Tried on a temporary object: a spelling is accepted only if a swap with
    the current tag succeeds *and* one with the previous tag is refused. A store that ignores a
    condition it cannot parse would otherwise overwrite, with the second spelling, what another
    writer had just written.

    ``swap``: one conditional write of (path, data, the tag exactly as it is sent).

    Raises:
        ConditionalWriteUnsupportedError: no spelling is compared.
        ReadOnlyStoreError: the store cannot be written.
    """
    path = f"{PROBE_FOLDER}/{uuid.uuid4().hex}-tag"
    written = [path]
    try:
        create_object(store, path, b"created " + os.urandom(16), written)
        for spelling in _SPELLINGS:
            meta = store.head(path)
            if meta is None or meta.e_tag is None:
                break
            sent = spelling.format(meta.e_tag)
            if not swap(path, b"swapped " + os.urandom(16), sent):
                continue
            if swap(path, b"stale " + os.urandom(16), sent):
                break
            return spelling
    finally:
        if written:
            store.delete_many(written)
    raise unsupported(store.root, "does not enforce compare-and-swap (If-Match)")


def unsupported(root: str, why: str) -> errors.ConditionalWriteUnsupportedError:
    """The error for a store without compare-and-swap."""
    return errors.ConditionalWriteUnsupportedError(f"{root} {why}.", remedy=NO_SWAP)
