"""Compute squared L2 distances, exact and estimated from codes; and select neighbours by them.

LM-Prune: keep the nearest candidate, drop those much nearer to it than to the node, repeat until R are kept; if fewer
than 8 are, keep the nearest of the dropped: by the rule alone, a row in the middle of a cluster excludes all others of
it, and most of them find not even themselves. Candidates equal to the node are also kept, up to half of the list: one of
them would exclude all others, and duplicate vectors would form chains that break when one of them is deleted.
"""

from __future__ import annotations

import numba
import numpy as np

_UNROLLED = 4
"""Dimensions of one byte of a code of 32, with 128 dimensions."""
_LEAST, _NEARER = 8, 1


@numba.njit(cache=True, nogil=True, fastmath=True)
def squared(a, b):
    """The distance between two float32 vectors."""
    total = np.float32(0)
    for at in range(a.shape[0]):
        difference = a[at] - b[at]
        total += difference * difference
    return total


@numba.njit(cache=True, nogil=True)
def nearest(vectors, count, query, chosen):
    """The indexes of the vectors nearest to ``query`` among the first ``count``, into ``chosen``; returns their number."""
    far = np.empty(chosen.shape[0], np.float32)
    held = 0
    for index in range(count):
        distance = squared(vectors[index], query)
        if held == chosen.shape[0]:
            if distance >= far[held - 1]:
                continue
            held -= 1
        at = held
        while at > 0 and far[at - 1] > distance:
            far[at], chosen[at] = far[at - 1], chosen[at - 1]
            at -= 1
        far[at], chosen[at] = distance, index
        held += 1
    return held


@numba.njit(cache=True, nogil=True, fastmath=True)
def fill_table(book, query, table):
    """Store each code value's share of the squared distance to ``query`` in ``table`` [bytes, 256]; returns the rest."""
    rest = np.float32(0)
    for at in range(query.shape[0]):
        difference = query[at] - book.base[at]
        rest += difference * difference
    for byte in range(table.shape[0]):
        start, width = book.starts[byte], book.widths[byte]
        table[byte, :] = 0
        for at in range(width):
            double = np.float32(2) * (query[start + at] - book.base[start + at])
            for value in range(256):  # innermost, so that it is compiled to vector instructions
                part = book.parts[byte, value, at]
                table[byte, value] += part * (part - double)
    return rest


@numba.njit(cache=True, nogil=True, fastmath=True)
def estimated(table, rest, codes):
    """The estimated squared distance between a code and the query of ``table``."""
    total = rest
    for byte in range(table.shape[0]):
        total += table[byte, codes[byte]]
    return total


@numba.njit(cache=True, nogil=True, fastmath=True, inline="always")
def _of_eight(table, byte, word):
    """The shares of eight bytes of a code, from ``byte`` on, that are one word."""
    mask = np.uint64(0xFF)
    first = table[byte, word & mask] + table[byte + 1, (word >> np.uint64(8)) & mask]
    second = table[byte + 2, (word >> np.uint64(16)) & mask] + table[byte + 3, (word >> np.uint64(24)) & mask]
    third = table[byte + 4, (word >> np.uint64(32)) & mask] + table[byte + 5, (word >> np.uint64(40)) & mask]
    fourth = table[byte + 6, (word >> np.uint64(48)) & mask] + table[byte + 7, word >> np.uint64(56)]
    return (first + second) + (third + fourth)


@numba.njit(cache=True, nogil=True, fastmath=True)
def estimate(table, rest, codes, words, chosen, count, distances):
    """Store the estimated distances of the first ``count`` codes in ``chosen`` in ``distances``.

    Args:
        table, rest: of the query.
        codes: uint8, one code after the other; their length is that of the table.
        words: uint64, the same memory: codes that are whole words are read so, in two thirds of the time.
        chosen: int64, indexes of codes.
        count: number of them.
        distances: float32.
    """
    size = table.shape[0]
    if size % 8 == 0:
        for index in range(count):
            at, total = chosen[index] * (size // 8), rest
            for word in range(size // 8):
                total += _of_eight(table, 8 * word, words[at + word])
            distances[index] = total
    else:
        for index in range(count):
            at = chosen[index] * size
            distances[index] = estimated(table, rest, codes[at : at + size])


@numba.njit(cache=True, nogil=True)
def encode(book, vector, code):
    """Encode a vector into ``code``."""
    if book.threshold.shape[0]:
        half = code.shape[0] // 2
        code[:] = 0
        for at in range(vector.shape[0]):
            difference = vector[at] - book.base[at]
            if difference > book.threshold[at]:
                code[at >> 3] |= np.uint8(1 << (at & 7))
            elif difference < -book.threshold[at]:
                code[half + (at >> 3)] |= np.uint8(1 << (at & 7))
        return
    for byte in range(code.shape[0]):
        start, width = book.starts[byte], book.widths[byte]
        best, chosen = np.float32(np.inf), 0
        for value in range(256):
            total = np.float32(0)
            for at in range(width):
                difference = vector[start + at] - book.base[start + at] - book.parts[byte, value, at]
                total += difference * difference
            if total < best:
                best, chosen = total, value
        code[byte] = chosen


@numba.njit(cache=True, nogil=True)
def encode_many(book, vectors, codes):
    """Encode vectors [n, d] into ``codes`` [n, bytes]."""
    for row in range(vectors.shape[0]):
        encode(book, vectors[row], codes[row])


@numba.njit(cache=True, nogil=True)
def mean_error(book, vectors):
    """The mean squared distance between vectors [n, d] and what their codes stand for."""
    code, near = np.empty(book.starts.shape[0], np.uint8), np.empty(vectors.shape[1], np.float32)
    total = 0.0
    for row in range(vectors.shape[0]):
        encode(book, vectors[row], code)
        decode(book, code, near)
        total += squared(vectors[row], near)
    return total / vectors.shape[0]


@numba.njit(cache=True, nogil=True)
def decode(book, code, vector):
    """Decode the approximate vector of a code into ``vector``."""
    vector[:] = book.base
    if book.parts.shape[2] == _UNROLLED and vector.shape[0] == _UNROLLED * code.shape[0]:  # a third faster
        for byte in range(code.shape[0]):
            part = book.parts[byte, code[byte]]
            for at in range(_UNROLLED):
                vector[_UNROLLED * byte + at] += part[at]
        return
    for byte in range(code.shape[0]):
        start, value = book.starts[byte], code[byte]
        for at in range(book.widths[byte]):
            vector[start + at] += book.parts[byte, value, at]


@numba.njit(cache=True, nogil=True)
def with_room(links):
    """The number of links to which a full list is pruned: the next few need no pruning."""
    return links - max(1, links // 8)


@numba.njit(cache=True, nogil=True)
def of_new(links):
    """The number of links that an insert gives a node, at most: each is a backlink in another block to be written.

    Links from later nodes fill the list. Recall is that of full lists, unless lists are short.
    """
    return max(links // 2, min(links, 32))


@numba.njit(cache=True, nogil=True)
def of_built(links):
    """The number of links that a build leaves: the first links to a node do not prune its list; as in ``of_new``."""
    return max(with_room(links), min(links, 48))


@numba.njit(cache=True, nogil=True)
def prune(vectors, distances, count, alpha, most, chosen):
    """Select neighbours.

    Args:
        vectors: float32 [count or more, d], of the candidates.
        distances: float32, their squared distances to the node.
        count: number of candidates.
        alpha: squared: a candidate is dropped if ``alpha * d(kept, it) < d(node, it)``.
        most: the maximum number to select.
        chosen: receives their indices, nearest first.

    Returns:
        The number selected.
    """
    order = np.argsort(distances[:count])
    gone = np.zeros(count, np.uint8)
    kept = 0
    equal = max(1, most // 2)
    for at in range(count):
        index = order[at]
        if gone[index]:
            continue
        if distances[index] == 0:
            if equal == 0:
                continue
            equal -= 1
        chosen[kept] = index
        kept += 1
        if kept == most:
            break
        for later in range(at + 1, count):
            other = order[later]
            if not gone[other] and alpha * squared(vectors[index], vectors[other]) < distances[other]:
                gone[other] = _NEARER
    for at in range(count):
        if kept >= min(most, _LEAST):
            break
        if gone[order[at]] == _NEARER:
            chosen[kept] = order[at]
            kept += 1
    return kept


@numba.njit(cache=True, nogil=True)
def extend(vectors, distances, count, held, alpha, most, chosen):
    """Like :func:`prune`, for a list whose ``held`` first candidates stay: compares others only until it is full.

    So a node that is rewired keeps its links, and not all candidates are compared with each other.

    Returns:
        The number selected, without those that stay.
    """
    order = np.argsort(distances[:count])
    equal = max(1, most // 2)
    for index in range(held):
        chosen[index] = index
        equal -= distances[index] == 0
    kept = held
    for at in range(count):
        if kept == most:
            break
        new = order[at]
        if new < held:
            continue
        if distances[new] == 0:
            if equal <= 0:
                continue
            equal -= 1
        excluded = False
        for other in range(kept):
            near = chosen[other]
            if distances[near] <= distances[new] and alpha * squared(vectors[near], vectors[new]) < distances[new]:
                excluded = True
                break
        if not excluded:
            chosen[kept] = new
            kept += 1
    for index in range(held, kept):
        chosen[index - held] = chosen[index]
    return kept - held
