"""Encode and decode attribute indexes of a cluster: bitmaps (``ZBMP``), inverted lists (``ZFTS``); JSON with a header.

Positions are rows of the cluster. A field gets no bitmap if it has more than 10,000 values, or one that cannot be a
key: a map, a list in a list, an integer beyond doubles. A reader then filters by the attributes themselves.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.zeppelin.wire.json_text import compact_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes

_BITMAP, _TEXT = b"ZBMP\x01", b"ZFTS\x01"
_MAX_VALUES = 10_000
_WORD = re.compile(r"\w+")
_MAX_WORD_LENGTH = 40


def bitmap_name(cluster: int) -> str:
    """The name of a cluster's bitmap object."""
    return f"bitmap_{cluster}.bin"


def text_name(cluster: int) -> str:
    """The name of a cluster's inverted-list object."""
    return f"fts_index_{cluster}.bin"


def encode_bitmaps(rows: Sequence[Attributes | None], fields: Iterable[str]) -> bytes:
    """The bitmaps of some fields."""
    built = {field: bitmap for field in sorted(fields) if (bitmap := _bitmap(rows, field)) is not None}
    document = {"vector_count": len(rows), "fields": built}
    return _BITMAP + compact_json(document)


def decode_bitmaps(data: bytes) -> dict[str, dict[str, BitMap]]:
    """Per field the rows of its values. Raises ``InvalidFormatError``."""
    document = _document(data, _BITMAP)
    try:
        return {
            field: {value: BitMap.deserialize(bytes(rows)) for value, rows in found["values"].items()}
            for field, found in document["fields"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidFormatError(f"Its bitmaps cannot be read: {error!r:.120}.") from error


def value_key(value: Any) -> str:
    """The key of a value in a bitmap index: values of different types have different keys."""
    if isinstance(value, bool):
        return f"b:{str(value).lower()}"
    if isinstance(value, int):
        return f"i:{value}"
    if isinstance(value, float):
        return f"f:{_bits(value)}"
    return f"s:{value}"


def encode_text_index(rows: Sequence[Attributes | None], fields: Iterable[str]) -> bytes:
    """The inverted lists of some fields."""
    built = {field: found for field in sorted(fields) if (found := _inverted(rows, field)) is not None}
    document = {"vector_count": len(rows), "fields": built}
    return _TEXT + compact_json(document)


def decode_text_index(data: bytes) -> Mapping[str, Any]:
    """Per field ``avg_doc_length``, ``doc_count`` and ``postings``. Raises ``InvalidFormatError``."""
    found = _document(data, _TEXT).get("fields")
    if not isinstance(found, dict):
        raise InvalidFormatError("It has no fields.")
    return found


def words(text: object) -> list[str]:
    """The words of a text: lower-case runs of letters and digits. No stemming and no stop words.

    The wiki document does not define them; merge refuses native namespaces with full text.
    """
    return (
        [word for word in _WORD.findall(text.lower()) if len(word) <= _MAX_WORD_LENGTH] if isinstance(text, str) else []
    )


def _bitmap(rows: Sequence[Attributes | None], field: str) -> dict[str, Any] | None:
    present = BitMap()
    values: dict[str, BitMap] = {}
    numbers: set[float] = set()
    is_list = False
    for position, row in enumerate(rows):
        value = None if row is None else row.get(field)
        if value is None:
            continue
        present.add(position)
        is_list = is_list or isinstance(value, list)
        for one in value if isinstance(value, list) else (value,):
            if not isinstance(one, str | int | float):
                return None
            values.setdefault(value_key(one), BitMap()).add(position)
            if isinstance(one, int | float) and not isinstance(one, bool):
                try:
                    numbers.add(float(one))
                except OverflowError:
                    return None
    if len(values) > _MAX_VALUES:
        return None
    return {
        "present": [*present.serialize()],
        "values": {key: [*values[key].serialize()] for key in sorted(values)},
        "sorted_numeric_keys": [_bits(one) for one in sorted(numbers)],
        "is_list": is_list,
    }


def _inverted(rows: Sequence[Attributes | None], field: str) -> dict[str, Any] | None:
    postings: dict[str, list[dict[str, int]]] = {}
    lengths = []
    for position, row in enumerate(rows):
        found = words((row or {}).get(field))
        if found:
            lengths.append(len(found))
        for word, count in Counter(found).items():
            postings.setdefault(word, []).append({"position": position, "tf": count})
    if not lengths:
        return None
    return {
        "avg_doc_length": sum(lengths) / len(lengths),
        "doc_count": len(lengths),
        "postings": {word: {"df": len(postings[word]), "entries": postings[word]} for word in sorted(postings)},
    }


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return int(bits)


def _document(data: bytes, magic: bytes) -> dict[str, Any]:
    if not data.startswith(magic):
        raise InvalidFormatError(f"It begins with {data[:5]!r}, and not with {magic!r}.")
    try:
        found = json.loads(data[len(magic) :])
    except (ValueError, RecursionError) as error:
        raise InvalidFormatError(f"It is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise InvalidFormatError("It is not a JSON object.")
    return found
