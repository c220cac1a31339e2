"""Decide who may act, and what a viewer sees: by a bearer token, or a session of a browser.

No page of another host or origin reads it, or acts. Tokens are in a file that is read again when it changes, each a
line ``ROLE TOKEN [NAME]`` with the roles ``view`` and ``operate``; a file with one word is one token with the role
``operate``. Only digests are kept. A session is a cookie after a token was given once; each form sends back its value.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal, get_args
from urllib.parse import urlsplit

from memwal_ops.errors import InvalidConfigError
from memwal_ops.log import get_logger
from memwal_ops.storage.options import remember
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.supervisor.http.connections import HttpError, Request

EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HostNames:
    """The names of a service bound to ``host``. ``allowed``: more of them, as of a proxy before it."""

    def __init__(self, host: str, allowed: Iterable[str]) -> None:
        own = socket.gethostname() if host in EVERYWHERE else host
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._names = {"localhost", own.lower().rstrip("."), *self._allowed}

    def is_own(self, host: str) -> bool:
        """Whether a ``Host`` header names this service: by one of its names, or by an address, which no DNS rebinds."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return name in self._names or bool(ip_address(name))
        except ValueError:
            return False

    def is_own_origin(self, origin: str, host: str | None) -> bool:
        """Whether an ``Origin`` is that of a page of this service, which was requested by the ``Host``.

        That of another port is not: cookies are shared by all ports of a host. Behind a proxy that sends another
        ``Host``, it is a name of ``http.allowed_hosts``.
        """
        try:
            parts = urlsplit(origin)
            name, port = (parts.hostname or "").rstrip("."), parts.port
            default = _DEFAULT_PORTS[parts.scheme]
            asked = urlsplit(f"//{host or ''}")
            same = (name, port or default) == ((asked.hostname or "").rstrip("."), asked.port or default)
        except (KeyError, ValueError):
            return False
        return bool(name) and (same or (name in self._allowed and port in {None, default}))


Role = Literal["view", "operate"]
CREDENTIAL = "http-token"
"""The name for systemd's ``LoadCredential``."""
_SHORTEST = 16
_MAX_BYTES = 64 << 10
# What an Authorization header can have (RFC 6750).
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/=-]{{{_SHORTEST},512}}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,100}")
_FORM = "Write a line for each token: view or operate, the token, and a name for the audit log."


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its role, its name in the audit log, and its digest."""

    role: Role
    name: str
    digest: bytes


class TokenFile:
    """The tokens of a file. ``managed``: the service manager made it, and its mode is not checked."""

    def __init__(self, path: str, *, managed: bool = False) -> None:
        self.path = path
        self._managed = managed
        self._stamp: object = None
        self._known: tuple[Token, ...] = ()

    def tokens(self) -> tuple[Token, ...]:
        """Return the tokens of the file as it is now.

        Raises ``InvalidConfigError``: it cannot be used; then nobody may act.
        """
        try:
            status = os.stat(self.path)
        except OSError as error:
            self._stamp = None
            raise _refused(self.path, f"cannot be read: {error.strerror}") from error
        stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            self._stamp = None
            secrets = read_tokens(self.path, managed=self._managed)
            remember(secret for _, _, secret in secrets)
            self._known = tuple(Token(role, name, digest(secret)) for role, name, secret in secrets)
            self._stamp = stamp
        return self._known

    def find(self, secret: str) -> Token | None:
        """Return the token with this text; compared in constant time with every one."""
        given = digest(secret)
        match = None
        for token in self.tokens():
            if hmac.compare_digest(token.digest, given):
                match = token
        return match


def token_file_of(config: HttpConfig, environ: Mapping[str, str]) -> TokenFile | None:
    """Return the file of the tokens: as configured, else systemd's credential ``http-token``; None: there is none."""
    if config.token_file is not None:
        path = os.path.abspath(os.path.expanduser(config.token_file))
        folder = environ.get("CREDENTIALS_DIRECTORY")
        return TokenFile(path, managed=bool(folder) and path.startswith(f"{folder}/"))
    path = os.path.join(environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    return TokenFile(path, managed=True) if os.path.isabs(path) and os.path.exists(path) else None


def digest(secret: str) -> bytes:
    """Return the digest by which tokens are compared."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: str, *, managed: bool = False) -> list[tuple[Role, str, str]]:
    """Return role, name and text of each token of a file.

    Raises ``InvalidConfigError``: it cannot be read, others may read or change it, or a line is invalid.
    """
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refused(path, "is not a file")
            # A volume of Kubernetes gives a secret of root to the group of the pod.
            others = 0o037 if status.st_uid == 0 != os.geteuid() else 0o077
            if not managed and status.st_mode & others:
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                raise _refused(path, f"can be used by others (mode {mode})", f"Run chmod 600 {path}.")
            if not managed and status.st_uid not in {0, os.geteuid()}:
                raise _refused(path, "belongs to another user", f"Run chown on {path}: to the service's user, or root.")
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refused(path, "is not text") from error
    if len(text) > _MAX_BYTES:
        raise _refused(path, "is larger than 64 KiB")
    tokens = [*_tokens(path, text.splitlines())]
    if not tokens:
        raise _refused(path, "is empty")
    if len({secret for _, _, secret in tokens}) < len(tokens):
        raise _refused(path, "has a token twice")
    return tokens


def _tokens(path: str, lines: Iterable[str]) -> Iterator[tuple[Role, str, str]]:
    words = {number: line.split() for number, line in enumerate(lines, 1) if line.split() and line.strip()[0] != "#"}
    if len(words) == 1 and len(only := next(iter(words.values()))) == 1:
        words = {number: ["operate", *only] for number in words}
    for number, parts in words.items():
        role, secret, name = (*parts, *("", ""))[:3] if len(parts) <= len(_COLUMNS) else ("", "", "")
        if role not in get_args(Role):
            raise _refused(path, f"has no role and token in line {number}")
        if not _TOKEN.fullmatch(secret):
            why = (
                f"has a token in line {number} that is shorter than {_SHORTEST} characters, or has others than letters"
            )
            raise _refused(path, f"{why}, digits and . _ ~ + / = -", "Make one: openssl rand -hex 32")
        if name and not _NAME.fullmatch(name):
            raise _refused(path, f"has a name in line {number} with others than letters, digits and . _ @ -")
        yield role, name or f"{role}-{number}", secret  # type: ignore[misc]  # it is one of the roles


_COLUMNS = ("role", "token", "name")


def _refused(path: str, why: str, remedy: str = _FORM) -> InvalidConfigError:
    return InvalidConfigError(f"The file of tokens {path} {why}.", remedy=remedy)


COOKIE = "memwal_ops_session"
SESSION_SECONDS = 12 * 3600
_MAX_SESSIONS = 100


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a browser. The digest of its token, which must still be in the file, its CSRF value, and its end."""

    token: bytes
    csrf: str
    ends: float


class Sessions:
    """All sessions, in memory: a restart ends them. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[bytes, Session] = {}

    def begin(self, token: Token) -> str:
        """Begin a session, and return the value of its cookie; of too many, the oldest one ends."""
        name = secrets.token_urlsafe(32)
        session = Session(token.digest, secrets.token_urlsafe(32), self._clock() + SESSION_SECONDS)
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if known.ends > self._clock()}
            while len(self._known) >= _MAX_SESSIONS:
                del self._known[next(iter(self._known))]
            self._known[digest(name)] = session
        return name

    def of(self, request: Request) -> Session | None:
        """Return the session of a request; None: it has no cookie, or more than one, or the session has ended."""
        given = _cookies(request)
        if len(given) != 1:
            return None
        with self._lock:
            session = self._known.get(digest(given.pop()))
        return None if session is None or session.ends <= self._clock() else session

    def end(self, request: Request) -> None:
        """End the session of a request."""
        with self._lock:
            for name in _cookies(request):
                self._known.pop(digest(name), None)


def is_csrf_of(session: Session, given: str) -> bool:
    """Whether a form sent the value of its session; compared in constant time."""
    return hmac.compare_digest(session.csrf.encode(), given.encode("utf-8", "surrogateescape"))


def cookie(value: str, *, secure: bool, seconds: int = SESSION_SECONDS) -> tuple[str, str]:
    """Return the header that sets the cookie; ``seconds`` of 0 removes it."""
    more = "; Secure" if secure else ""
    return "Set-Cookie", f"{COOKIE}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{more}"


def _cookies(request: Request) -> set[str]:
    pairs = (part.strip().partition("=") for line in request.headers.get_all("Cookie", []) for part in line.split(";"))
    return {value for name, _, value in pairs if name == COOKIE and value}


@dataclass(frozen=True, slots=True)
class Viewer:
    """Someone who looks at a page.

    Attributes:
        role: ``view`` or ``operate`` after a token of that role was given; None: no token was given.
        csrf: the value that a form of this session must send back; None without a session.
        acting: whether a token is configured at all: without one, nobody can sign in.
    """

    role: Literal["view", "operate"] | None = None
    csrf: str | None = None
    acting: bool = False

    @property
    def may_act(self) -> bool:
        """Whether pages have buttons that change something."""
        return self.role == "operate" and self.csrf is not None


ANONYMOUS = Viewer()
"""Someone who gave no token, of a service that has none."""

_MAX_FAILED = 10
_FAILED_SECONDS = 60.0
_MAX_CLIENTS = 1000
_ENABLE = (
    "No token is configured, so that nothing can be changed over HTTP: write one into a file that only the service "
    "reads, and name it in http.token_file."
)
_CHALLENGE = ("WWW-Authenticate", 'Bearer realm="memwal-ops"')


@dataclass(frozen=True, slots=True)
class Caller:
    """Who acts. The name and the role of the token, and whether by the session of a browser."""

    name: str
    role: Role
    session: bool


class Access:
    """Checks requests that act; ``tokens``: None if none is configured."""

    def __init__(self, tokens: TokenFile | None, names: HostNames, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens, self._names = tokens, names
        self._sessions = Sessions(clock)
        self._failed = FailedAttempts(clock)
        self._log = get_logger(__name__)

    def viewer(self, request: Request) -> Viewer:
        """Return who looks at a page."""
        try:
            session, token = self._session(request)
        except HttpError:
            session, token = None, None
        acting = self._tokens is not None
        if session is None or token is None:
            return Viewer(acting=acting)
        return Viewer(token.role, session.csrf, acting)

    def check_origin(self, request: Request) -> None:
        """Refuse what a page of another site sends: the browser names that site, and adds the cookie by itself.

        Raises ``HttpError``: 403.
        """
        host = request.headers.get("Host")
        foreign = [
            origin
            for origin in request.headers.get_all("Origin", [])
            if not self._names.is_own_origin(str(origin), host)
        ]
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        if foreign or site not in {"same-origin", "none"}:
            raise HttpError(403, "A page of another site must not act: open the pages of this service themselves.")

    def caller(self, request: Request, csrf: Callable[[], str]) -> Caller:
        """Return who acts; ``csrf`` returns the value that the form sent back, for a session.

        Raises ``HttpError``: 401 without a valid token, 403 for a role that may not or a foreign form, 429 after many
        failed attempts, 503 if the file of tokens cannot be used.
        """
        if self._tokens is None:
            raise HttpError(403, _ENABLE)
        given = [str(header) for header in request.headers.get_all("Authorization", [])]
        if given:
            scheme, _, secret = given[0].partition(" ")
            token = self._token(request, secret.strip() if len(given) == 1 and scheme.lower() == "bearer" else "")
        else:
            session, match = self._session(request)
            if session is None or match is None:
                raise HttpError(401, "Give a token, as Bearer TOKEN in the header Authorization.", _CHALLENGE)
            if not is_csrf_of(session, csrf()):
                raise HttpError(403, "The form is not of this session: load the page again.")
            token = match
        if token.role != "operate":
            raise HttpError(403, f"The token {token.name} has the role {token.role}, which may not act.")
        return Caller(token.name, token.role, session=not given)

    def sign_in(self, request: Request, secret: str) -> tuple[Token, tuple[str, str]]:
        """Begin a session; return the token, and the header that sets its cookie.

        Raises ``HttpError``: 401, 403, 429 or 503, as :meth:`caller`.
        """
        if self._tokens is None:
            raise HttpError(403, _ENABLE)
        token = self._token(request, secret)
        self._sessions.end(request)
        return token, cookie(self._sessions.begin(token), secure=request.secure)

    def sign_out(self, request: Request) -> tuple[str, str]:
        """End a session; return the header that removes its cookie."""
        self._sessions.end(request)
        return cookie("", secure=request.secure, seconds=0)

    def _token(self, request: Request, secret: str) -> Token:
        wait = self._failed.seconds_to_wait(request.client)
        if wait:
            raise HttpError(
                429, "Too many wrong tokens came from this address: wait.", ("Retry-After", str(int(wait) + 1))
            )
        token = self._find(lambda tokens: tokens.find(secret)) if secret else None
        if token is None:
            self._failed.add(request.client)
            self._log.warning("http_token_refused", client=request.client, path=request.path[:200])
            raise HttpError(401, "The token is wrong.", _CHALLENGE)
        return token

    def _session(self, request: Request) -> tuple[Session | None, Token | None]:
        session = None if self._tokens is None else self._sessions.of(request)
        if session is None:
            return None, None
        token = self._find(
            lambda tokens: next((token for token in tokens.tokens() if token.digest == session.token), None)
        )
        return session, token

    def _find(self, search: Callable[[TokenFile], Token | None]) -> Token | None:
        assert self._tokens is not None  # noqa: S101 - the callers checked it
        try:
            return search(self._tokens)
        except InvalidConfigError as error:
            self._log.error("token_file_refused", error=str(error))
            raise HttpError(503, f"Nobody may act until this is corrected: {error} {error.remedy}") from error


class FailedAttempts:
    """Wrong tokens by the address of the client: at most 10 in a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}

    def seconds_to_wait(self, client: str) -> float:
        """Return how long no token of this address is compared; 0: it may try."""
        with self._lock:
            times = self._times.get(client)
            full = times is not None and len(times) >= _MAX_FAILED
            left = times[0] + _FAILED_SECONDS - self._clock() if times is not None and full else 0.0
        return max(0.0, left)

    def add(self, client: str) -> None:
        """Count a wrong token."""
        with self._lock:
            times = self._times.pop(client, deque(maxlen=_MAX_FAILED))
            times.append(self._clock())
            self._times[client] = times
            while len(self._times) > _MAX_CLIENTS:
                del self._times[next(iter(self._times))]
