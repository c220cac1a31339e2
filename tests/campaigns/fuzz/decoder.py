"""A decoder under fuzzing: where its inputs come from, what it may raise, and the register of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

U64_MAX = 2**64 - 1
REGION = UUID("00000000-0000-4000-8000-00000000000a")


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        run: decodes an input and checks what came of it; raises only ``refuses``.
        share: of all inputs, in relation to the others; few for a slow one.
        refuses: what it may raise.
        native: why nothing can keep it from standing still or ending the process, which is then no failure.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    builds: tuple[Any, ...]
    share: int
    refuses: tuple[type[Exception], ...]
    native: str = ""

    def input(self, rng: random.Random) -> bytes:
        """The next hostile input."""
        return bytes(rng.choice(self.builds)(rng, self.seeds))


DECODERS: dict[str, Decoder] = {}


def decoder(
    *builds: Any, seeds: Sequence[bytes], share: int, refuses: tuple[type[Exception], ...], native: str = ""
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Register a function as a decoder under its name."""

    def register(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        name = run.__name__
        DECODERS[name] = Decoder(name, run, tuple(seeds), builds, share, refuses, native)
        return run

    return register


class Recipe:
    """Values chosen by the bytes of an input, so that structures too are mutated, shrunk and replayed as bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """A number from 0 on; 0 when the bytes are used up."""
        byte = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return byte % limit

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def bytes(self, limit: int = 32) -> bytes:
        size = self.below(limit)
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken
