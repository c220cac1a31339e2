"""The tokens that may act, from a file that is read again when it changes.

Each line is ``ROLE TOKEN [NAME]``, with the roles ``view`` and ``operate``; a file with one word is one token with the
role ``operate``. Only digests are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from memwal_ops.errors import InvalidConfigError
from memwal_ops.storage.redaction import remember

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memwal_ops.supervisor.config.model import HttpConfig

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
        """Read nothing yet."""
        self.path = path
        self._managed = managed
        self._stamp: object = None
        self._known: tuple[Token, ...] = ()

    def tokens(self) -> tuple[Token, ...]:
        """Return the tokens of the file as it is now.

        Raises:
            InvalidConfigError: it cannot be used; then nobody may act.
        """
        try:
            found = os.stat(self.path)
        except OSError as error:
            self._stamp = None
            raise _refused(self.path, f"cannot be read: {error.strerror}") from error
        stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
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
        found = None
        for token in self.tokens():
            if hmac.compare_digest(token.digest, given):
                found = token
        return found


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

    Raises:
        InvalidConfigError: it cannot be read, others may read or change it, or a line is invalid.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _refused(path, "is not a file")
            # A volume of Kubernetes gives a secret of root to the group of the pod.
            others = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
            if not managed and found.st_mode & others:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                raise _refused(path, f"can be used by others (mode {mode})", f"Run chmod 600 {path}.")
            if not managed and found.st_uid not in {0, os.geteuid()}:
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
