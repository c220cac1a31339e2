"""Decode, verify and encode WAL fragments of both dialects.

``wiki``: one JSON document; its checksum is XXH64 over compact JSON of ``deletes`` and ``vectors`` with sorted keys.
``native``: ``0x01`` and positional MessagePack, or the JSON of the first releases; its checksum is XXH3-64 over
compact JSON of both lists. Neither covers ``id``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import xxhash

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.zeppelin.wire.json_text import joined, json_text, vector_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

Attributes = dict[str, Any]
WIKI, NATIVE = "wiki", "native"
_MESSAGE_PACK = b"\x01"
_WIKI_FIELDS = {"id", "namespace", "vectors", "deletes", "checksum", "created_at"}
_NATIVE_FIELDS = {"id", "vectors", "deletes", "checksum"}
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, eq=False)
class Fragment:
    """A fragment.

    Attributes:
        id: its ULID.
        ids: of the vectors, in order; an id may repeat, and the last one counts.
        values: shape (len(ids), dimensions), float32, finite.
        attributes: one for each vector.
        deletes: ids; they apply before the vectors of the same fragment.
        namespace: wiki only.
        created_at: ISO 8601; wiki only.
    """

    id: str
    ids: Sequence[str]
    values: NDArray[np.float32]
    attributes: Sequence[Attributes | None]
    deletes: Sequence[str]
    namespace: str | None = None
    created_at: str | None = None

    @property
    def dimensions(self) -> int | None:
        """None if it has no vector."""
        return self.values.shape[1] if len(self.ids) else None


def encode_fragment(fragment: Fragment, dialect: str) -> bytes:
    """The object of a fragment."""
    return _encode_wiki(fragment) if dialect == WIKI else _encode_native(fragment)


def decode_fragment(data: bytes, dialect: str) -> Fragment:
    """Decode a fragment, and verify its checksum.

    Raises:
        InvalidFormatError: foreign or truncated bytes, an unknown version, a wrong checksum, values that are not
            finite numbers, or of several lengths.
    """
    try:
        if dialect == WIKI:
            return _decode_wiki(data)
        if data[:1] == b"{":
            return _decode_native_json(data)
        if data[:1] == _MESSAGE_PACK:
            return _decode_native(data)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        raise InvalidFormatError(f"It is not a {dialect} fragment: {error!r:.200}.") from error
    raise InvalidFormatError(f"It begins with {data[:4]!r}, which is not a known version of a fragment.")


def check_id(given: object, what: str) -> str:
    """Check a vector's id. Raises ``InvalidFormatError``."""
    if not isinstance(given, str) or not given:
        raise InvalidFormatError(f"{what} {given!r:.80} is not an id: it must be a non-empty string.")
    return given


# -- wiki


def wiki_checksum(deletes_text: str, vectors_text: str) -> int:
    """XXH64, seed 0, over ``{"deletes":[...],"vectors":[...]}``."""
    return xxhash.xxh64_intdigest(f'{{"deletes":{deletes_text},"vectors":{vectors_text}}}'.encode())


def _encode_wiki(fragment: Fragment) -> bytes:
    deletes, vectors = json_text(list(fragment.deletes)), _wiki_vectors(fragment)
    fields = {
        "checksum": str(wiki_checksum(deletes, vectors)),
        "created_at": json_text(fragment.created_at),
        "deletes": deletes,
        "id": json_text(fragment.id),
        "namespace": json_text(fragment.namespace),
        "vectors": vectors,
    }
    return ("{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}").encode()


def _wiki_vectors(fragment: Fragment) -> str:
    rows = zip(fragment.ids, vector_texts(fragment.values), fragment.attributes, strict=True)
    return joined(
        [
            f'{{"attributes":{json_text(more or {})},"id":{json_text(name)},"values":{text}}}'
            for name, text, more in rows
        ]
    )


def _decode_wiki(data: bytes) -> Fragment:
    text = data.decode()
    document, spans = _members(text)
    missing = _WIKI_FIELDS - {"namespace", "created_at"} - document.keys()
    if missing:
        raise InvalidFormatError(f"It is not a fragment: {', '.join(sorted(missing))} is missing.")
    vectors, deletes = document["vectors"], document["deletes"]
    if not isinstance(vectors, list) or not isinstance(deletes, list):
        raise InvalidFormatError("vectors and deletes must be lists.")
    expected = document["checksum"]
    # For writers with sorted keys and no spaces, the checksum covers the text unchanged.
    if wiki_checksum(text[slice(*spans["deletes"])], text[slice(*spans["vectors"])]) != expected:
        tried = (wiki_checksum(*texts) for texts in _wiki_spellings(text, vectors, deletes))
        if expected not in tried:
            raise InvalidFormatError(f"Its checksum is {expected!r}, which does not match its content.")
    rows = [_wiki_row(one) for one in vectors]
    return Fragment(
        id=check_id(document["id"], "The fragment's"),
        ids=[row[0] for row in rows],
        values=matrix([row[1] for row in rows]),
        attributes=[row[2] for row in rows],
        deletes=[check_id(one, "The deleted") for one in deletes],
        namespace=_text(document.get("namespace")),
        created_at=_text(document.get("created_at")),
    )


def _wiki_row(one: Any) -> tuple[str, list[float], Attributes | None]:
    if not isinstance(one, dict) or not isinstance(one.get("values"), list):
        raise InvalidFormatError(f"{one!r:.80} is not a vector.")
    return check_id(one.get("id"), "The vector's"), one["values"], check_attributes(one.get("attributes"))


def _wiki_spellings(text: str, vectors: list[Any], deletes: list[Any]) -> Iterator[tuple[str, str]]:
    """The texts that a checksum may cover: the document says "serialized", and does not define how numbers are written.

    First as in the file, then shortest doubles as written by Python and by serde, then shortest singles. Python
    writes 1e-05, others 0.00001: with only one of them, valid namespaces would be blocked.
    """
    tokens = json.loads(text, parse_float=_Token, parse_int=_Token)
    for escaped in (False, True):
        strings = _python(ensure_ascii=escaped)
        yield strings(deletes), _with_tokens(tokens["vectors"], strings)
        yield strings(deletes), strings(vectors)
    yield json_text(deletes), json_text(vectors)
    rows = [_wiki_row(one) for one in vectors]
    singles = vector_texts(matrix([row[1] for row in rows]))
    for rest in (json_text, _python(ensure_ascii=False)):
        yield (
            rest(deletes),
            joined(
                [_members_text({**one, "values": None}, rest, at) for one, at in zip(vectors, singles, strict=True)]
            ),
        )


def _members_text(one: Mapping[str, Any], rest: Callable[[Any], str], values: str) -> str:
    parts = [f"{rest(key)}:{values if key == 'values' else rest(one[key])}" for key in sorted(one)]
    return "{" + ",".join(parts) + "}"


def _python(*, ensure_ascii: bool) -> Callable[[Any], str]:
    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=ensure_ascii)

    return text


class _Token(str):
    """A number as written in the file."""

    __slots__ = ()


def _with_tokens(value: Any, strings: Callable[[Any], str]) -> str:
    if isinstance(value, _Token):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{strings(key)}:{_with_tokens(value[key], strings)}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_with_tokens(one, strings) for one in value) + "]"
    return strings(value)


def _members(text: str) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The members of a JSON object, and the start and end of each value's text."""
    decoder = json.JSONDecoder(parse_constant=_refused)
    found: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise InvalidFormatError(f"It begins with {text[:8]!r}, so it is not a JSON object.")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}" or found:
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in found or text[at : at + 1] != ":":
            raise InvalidFormatError(f"{key!r:.40} is not a member of a fragment, or a duplicate.")
        begins = _skip(text, at + 1)
        found[key], at = decoder.raw_decode(text, begins)
        spans[key] = (begins, at)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise InvalidFormatError(f"It is truncated or not JSON at character {at}.")
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise InvalidFormatError(f"There is extra data after its end, at character {at + 1}.")
    return found, spans


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _refused(constant: str) -> float:
    raise InvalidFormatError(f"{constant} is not a JSON number.")


# -- native


def native_checksum(fragment: Fragment) -> int:
    """XXH3-64, seed 0, over ``[[[id,[values],attributes or null],...],[deletes]]``."""
    rows = zip(fragment.ids, vector_texts(fragment.values), fragment.attributes, strict=True)
    vectors = joined([f"[{json_text(name)},{text},{json_text(more)}]" for name, text, more in rows])
    return xxhash.xxh3_64_intdigest(f"[{vectors},{json_text(list(fragment.deletes))}]".encode())


def _encode_native(fragment: Fragment) -> bytes:
    packer = msgpack.Packer(autoreset=True)
    parts = [_MESSAGE_PACK, packer.pack_array_header(4), packer.pack(fragment.id)]
    parts.append(packer.pack_array_header(len(fragment.ids)))
    for name, values, more in zip(fragment.ids, fragment.values, fragment.attributes, strict=True):
        parts += [packer.pack_array_header(2 if more is None else 3), packer.pack(name), _packed(packer, values)]
        if more is not None:
            parts.append(packer.pack(more))
    parts += [packer.pack(list(fragment.deletes)), packer.pack(native_checksum(fragment))]
    return b"".join(parts)


def _packed(packer: Any, values: NDArray[np.float32]) -> bytes:
    """A list of single-precision numbers: 0xCA and four bytes, big-endian, each."""
    packed = np.empty(len(values), dtype=[("tag", "u1"), ("value", ">f4")])
    packed["tag"], packed["value"] = 0xCA, values
    header: bytes = packer.pack_array_header(len(values))
    return header + packed.tobytes()


def _decode_native(data: bytes) -> Fragment:
    found = msgpack.unpackb(memoryview(data)[1:], strict_map_key=True)
    if not isinstance(found, list) or len(found) != len(_NATIVE_FIELDS):
        raise InvalidFormatError("It is not a list of id, vectors, deletes and checksum.")
    name, vectors, deletes, checksum = found
    rows = [(one[0], one[1], one[2] if len(one) == 3 else None) for one in vectors]  # noqa: PLR2004 - with attributes
    if any(len(one) not in {2, 3} for one in vectors):
        raise InvalidFormatError("A vector has neither two nor three parts.")
    return _native(name, rows, deletes, checksum)


def _decode_native_json(data: bytes) -> Fragment:
    found = json.loads(data, parse_constant=_refused)
    if found.keys() - _NATIVE_FIELDS or _NATIVE_FIELDS - found.keys():
        raise InvalidFormatError(f"It has the unexpected members {', '.join(sorted(found))}.")
    rows = [(one["id"], one["values"], one.get("attributes")) for one in found["vectors"]]
    return _native(found["id"], rows, found["deletes"], found["checksum"])


def _native(name: Any, rows: list[tuple[Any, Any, Any]], deletes: list[Any], checksum: Any) -> Fragment:
    fragment = Fragment(
        id=check_id(name, "The fragment's"),
        ids=[check_id(row[0], "The vector's") for row in rows],
        values=matrix([row[1] for row in rows]),
        attributes=[check_attributes(row[2]) for row in rows],
        deletes=[check_id(one, "The deleted") for one in deletes],
    )
    if checksum != native_checksum(fragment):
        raise InvalidFormatError(f"Its checksum is {checksum!r}, which does not match its content.")
    return fragment


# -- both


def matrix(rows: Sequence[Sequence[float]]) -> NDArray[np.float32]:
    """Rows of numbers as one array of shape (rows, dimensions).

    Raises:
        InvalidFormatError: rows of several lengths, or empty; a value that is not a single-precision number.
    """
    if not rows:
        return np.zeros((0, 0), dtype=np.float32)
    widths = {len(row) for row in rows}
    if len(widths) > 1 or not min(widths):
        raise InvalidFormatError(f"Its vectors have {sorted(widths)} dimensions.")
    try:
        with np.errstate(over="ignore"):
            wide = np.array(rows)
            found = wide.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidFormatError(f"A vector has a value that is not a number: {error}.") from error
    if wide.dtype.kind not in "fiu" or found.ndim != 2 or not np.isfinite(found).all():  # noqa: PLR2004 - a matrix
        raise InvalidFormatError("A vector has a value that is not a finite single-precision number.")
    return found


def check_attributes(found: Any) -> Attributes | None:
    """Check that attributes can be stored, and return them.

    Raises:
        InvalidFormatError: a value that is not a string, number, boolean or a list of one of them.
    """
    if found is None:
        return None
    if not isinstance(found, dict):
        raise InvalidFormatError(f"The attributes {found!r:.80} are not a map.")
    for key, value in found.items():
        if not isinstance(key, str) or not _is_attribute(value):
            raise InvalidFormatError(f"The attribute {key!r:.40} is {value!r:.80}, which cannot be stored.")
    return found


def _is_attribute(value: object) -> bool:
    if isinstance(value, list):
        kinds = {type(one) for one in value}
        return kinds <= {str} or kinds <= {int} or kinds <= {int, float}
    return isinstance(value, str | int | float)


def _text(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise InvalidFormatError(f"{found!r:.80} is not a string.")
    return found
