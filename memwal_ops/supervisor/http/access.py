"""Decide who may act: a bearer token, or a session of a browser whose page is this service's own."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidConfigError
from memwal_ops.log import get_logger
from memwal_ops.supervisor.http.exchange import HttpError
from memwal_ops.supervisor.http.sessions import Sessions, cookie, is_csrf_of
from memwal_ops.supervisor.observe.viewer import Viewer

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.supervisor.http.exchange import Request
    from memwal_ops.supervisor.http.host_names import HostNames
    from memwal_ops.supervisor.http.sessions import Session
    from memwal_ops.supervisor.http.tokens import Role, Token, TokenFile

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
        """No session has begun."""
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

        Raises:
            HttpError: 403.
        """
        host = request.headers.get("Host")
        foreign = [
            one for one in request.headers.get_all("Origin", []) if not self._names.is_own_origin(str(one), host)
        ]
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        if foreign or site not in {"same-origin", "none"}:
            raise HttpError(403, "A page of another site must not act: open the pages of this service themselves.")

    def caller(self, request: Request, csrf: Callable[[], str]) -> Caller:
        """Return who acts; ``csrf`` returns the value that the form sent back, for a session.

        Raises:
            HttpError: 401 without a valid token, 403 for a role that may not or a foreign form, 429 after many failed
                attempts, 503 if the file of tokens cannot be used.
        """
        if self._tokens is None:
            raise HttpError(403, _ENABLE)
        given = [str(one) for one in request.headers.get_all("Authorization", [])]
        if given:
            scheme, _, secret = given[0].partition(" ")
            token = self._token(request, secret.strip() if len(given) == 1 and scheme.lower() == "bearer" else "")
        else:
            session, found = self._session(request)
            if session is None or found is None:
                raise HttpError(401, "Give a token: Authorization: Bearer TOKEN.", _CHALLENGE)
            if not is_csrf_of(session, csrf()):
                raise HttpError(403, "The form is not of this session: load the page again.")
            token = found
        if token.role != "operate":
            raise HttpError(403, f"The token {token.name} has the role {token.role}, which may not act.")
        return Caller(token.name, token.role, session=not given)

    def sign_in(self, request: Request, secret: str) -> tuple[Token, tuple[str, str]]:
        """Begin a session; return the token, and the header that sets its cookie.

        Raises:
            HttpError: 401, 403, 429 or 503, as :meth:`caller`.
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
        """Return the session of a request, and its token, if that is still in the file."""
        session = None if self._tokens is None else self._sessions.of(request)
        if session is None:
            return None, None
        token = self._find(lambda tokens: next((one for one in tokens.tokens() if one.digest == session.token), None))
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
        """There was none."""
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
