"""Sessions of browsers: a cookie after a token was given once, and the value that each form must send back."""

from __future__ import annotations

import hmac
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.supervisor.http.tokens import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.http.exchange import Request
    from memwal_ops.supervisor.http.tokens import Token

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
        """There is none yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[bytes, Session] = {}

    def begin(self, token: Token) -> str:
        """Begin a session, and return the value of its cookie; of too many, the oldest one ends."""
        name = secrets.token_urlsafe(32)
        session = Session(token.digest, secrets.token_urlsafe(32), self._clock() + SESSION_SECONDS)
        with self._lock:
            self._known = {key: one for key, one in self._known.items() if one.ends > self._clock()}
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
