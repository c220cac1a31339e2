"""The search of bytes for values that must be gone: by code that knows no format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from memwal_ops.core import erasing
from memwal_ops.core.erasing import ErasedValues
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
    return dict(wanted.in_store(LocalObjectStore(str(folder))))


@pytest.mark.parametrize("name", ENCODED)
def test_each_form_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    for before in (0, 1, 3, 9):
        Path(tmp_path, f"has-{before}").write_bytes(b"\x00" * before + ENCODED[name] + b"zz")
    Path(tmp_path, "other").write_bytes(b'{"color":"red","n":17,"b":true,"id":"user-71"}' + b"a" * 40)
    Path(tmp_path, "empty").write_bytes(b"")
    assert found_in(values(), tmp_path).keys() == {f"has-{before}" for before in (0, 1, 3, 9)}


def test_across_the_parts_in_which_an_object_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasing, "_AT_ONCE", 64)
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
