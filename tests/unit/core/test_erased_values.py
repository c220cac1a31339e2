"""The search of bytes for values that must be gone: by code that knows no format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from memwal_ops.core import byte_scan
from memwal_ops.core.byte_scan import ErasedValues, ScanScope, Search, scan_bytes
from memwal_ops.storage.local import LocalObjectStore

MAIL, NAME, NUMBER = "alice.smith@example.com", 'Zo\u00eb "Z" \U0001f600 Q', 31612345678
VECTOR = np.random.default_rng(0).random(8, dtype=np.float32)
ENCODED = {
    "plain": MAIL.encode(),
    "JSON": json.dumps({"name": NAME}).encode(),
    "JSON without escapes": json.dumps({"name": NAME}, ensure_ascii=False).encode(),
    "a number as text": f'{{"phone":{NUMBER}}}'.encode(),
    "a number in binary": b"\xcf" + struct.pack(">q", NUMBER),
    "a float": struct.pack("<d", 52.370216),
    "a short text in JSON": b'["user-7"]',
    "a short text behind its length": struct.pack("<I", 6) + b"user-7",
    "a vector": VECTOR.tobytes(),
}


def values() -> ErasedValues:
    found = ErasedValues()
    found.add("the mail", {"to": [MAIL]})
    found.add("the rest", [NAME, NUMBER, 52.370216, "user-7", "red", 17, True, None, "aaaaaaaaaaaa"])
    found.add("the vector", VECTOR.tobytes())
    return found


def found_in(wanted: ErasedValues, folder: Path) -> dict[str, str]:
    scanned = ScanScope(LocalObjectStore(str(folder)), lambda values: None, lambda path: ("object", "."))
    return {
        one.name: one.why.partition(" have ")[2].partition(" of such")[0] for one in scan_bytes(scanned, wanted).holders
    }


@pytest.mark.parametrize("name", ENCODED)
def test_each_form_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    for before in (0, 1, 3, 9):
        Path(tmp_path, f"has-{before}").write_bytes(b"\x00" * before + ENCODED[name] + b"zz")
    Path(tmp_path, "other").write_bytes(b'{"color":"red","n":17,"b":true,"id":"user-71"}' + b"a" * 40)
    Path(tmp_path, "empty").write_bytes(b"")
    assert found_in(values(), tmp_path).keys() == {f"has-{before}" for before in (0, 1, 3, 9)}


def test_across_the_parts_in_which_an_object_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_scan, "_AT_ONCE", 64)
    for before in range(40, 70):
        Path(tmp_path, str(before)).write_bytes(b"." * before + MAIL.encode() + b"." * 200)
    assert found_in(values(), tmp_path) == {str(before): "the mail" for before in range(40, 70)}


def test_what_others_have_as_well_is_not_looked_for(tmp_path: Path) -> None:
    wanted = values()
    wanted.forget(json.dumps([f"to {MAIL}", NAME]).encode())
    wanted.forget(VECTOR.tobytes() * 2)
    for number, data in enumerate(ENCODED.values()):
        Path(tmp_path, str(number)).write_bytes(data)
    assert found_in(wanted, tmp_path).keys() == {"3", "4", "5", "6", "7"}


@given(
    data=st.lists(st.sampled_from([b"abcabc", b"abcabd", b"\0", b"x", b"abcabcabc", b"bcabcab"]), max_size=12),
    size=st.integers(1, 40),
    more=st.booleans(),
)
def test_the_same_is_found_as_one_by_one(data: list[bytes], size: int, *, more: bool) -> None:
    """Wherever the pieces begin."""
    whole = b"".join(data)
    values = {b"abcabc", b"abcabd", b"cabcab", b"bcabcabx", b"abcabc\0", b"abcabcabcabc"}
    values |= {f"never there {number}".encode() for number in range(9 * more)}
    found: set[bytes] = set()
    Search(values).add(found, [whole[at : at + size] for at in range(0, len(whole), size)], joined=True)
    assert found == {value for value in values if value in whole}


def test_many_values_in_much(seed: int = 7) -> None:
    random = Random(seed)
    values = {random.randbytes(random.randint(8, 64)) for _ in range(500)}
    values |= {f"https://example.com/users/{number}".encode() for number in range(500)}
    hidden = random.sample(sorted(values), 20)
    data = random.randbytes(300_000) + b"".join(random.randbytes(9) + value for value in hidden)
    found: set[bytes] = set()
    Search(values).add(found, [data])
    assert found == {value for value in values if value in data} >= set(hidden)
    apart: set[bytes] = set()
    Search({b"abcdefgh"}).add(apart, [b"abcd", b"efgh"])
    assert not apart, "pieces of a decoded file are values of their own"


def test_what_cannot_be_looked_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_scan, "_MAX_FORMS", 100)
    values = ErasedValues(["status"])
    for value in (17, "red", "red", "aaaaaaaaaaaaa", b"alice.smith", 31612345678):
        values.add("x", value)
    values.add("status", "never looked for")
    assert (values.too_short, len(values)) == (3, 4), "the number is looked for in three forms"
    for number in range(100):
        values.add("x", f"user number {number}")
    assert values.beyond >= 1
