"""Say who looks at a page: which buttons it has depends on that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
