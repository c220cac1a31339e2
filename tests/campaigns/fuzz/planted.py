"""Decoders with one fault each, on which the harness is tried."""

from __future__ import annotations

import os

from tests.campaigns.fuzz import mutate
from tests.campaigns.fuzz.decoder import Decoder

_kept: list[bytes] = []


def _raises(data: bytes) -> object:
    return data.index(b"\x07") if len(data) > 20 else None


def _hangs(data: bytes) -> object:
    while data[:1] == b"\x01":
        pass
    return None


def _allocates(data: bytes) -> object:
    return b"x" * (560 << 20) if data[:1] == b"\x02" else None


def _aborts(data: bytes) -> object:
    if data[:1] == b"\x03":
        os.abort()
    return None


def _fine(data: bytes) -> object:
    return int(data)


DECODERS = {
    run.__name__[1:]: Decoder(run.__name__[1:], run, (b"\x05",), (mutate.noise,), 1, refuses)
    for run, refuses in ((_raises, ()), (_hangs, ()), (_allocates, ()), (_aborts, ()), (_fine, (ValueError,)))
}
