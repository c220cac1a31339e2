"""Compute XXH3-64 of node blocks, compiled; equal to that of the xxhash package for inputs above 240 bytes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(offset: int) -> np.ndarray:
    return np.frombuffer(_SECRET[offset : offset + 64], "<u8").astype(np.uint64)


_KEYS = np.frombuffer(_SECRET, "<u8").astype(np.uint64)
_SCRAMBLE, _LAST, _MERGE = _words(128), _words(121), _words(11)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
_PRIME = np.uint64(_P32_1)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_LENGTH_PRIME = np.uint64(_P64_1)
_CHECKSUM_WORD = 5


@numba.njit(cache=True, nogil=True, inline="always")
def _fold(a, b):
    """The 128-bit product, with its halves combined by exclusive or."""
    half = np.uint64(32)
    low_a, high_a, low_b, high_b = a & _LOW, a >> half, b & _LOW, b >> half
    low, cross_a, cross_b, high = low_a * low_b, high_a * low_b, low_a * high_b, high_a * high_b
    cross = (low >> half) + (cross_a & _LOW) + cross_b
    upper = (cross_a >> half) + (cross >> half) + high
    lower = (cross << half) | (low & _LOW)
    return upper ^ lower


@intrinsic
def _accumulate(_: Any, words: Any, keys: Any, stripes: Any, acc: Any) -> Any:  # noqa: ARG001 - the values are in the code
    """Add ``stripes`` stripes of 64 bytes to the eight lanes at ``acc``; all but ``stripes`` are addresses.

    As vector instructions, which LLVM does not find in a loop over lanes: a third of the time for a block of 4 KiB.
    """
    return types.void(types.uintp, types.uintp, types.intp, types.uintp), _vector_loop


def _vector_loop(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    words, keys, stripes, acc = arguments
    lanes, number = ir.VectorType(ir.IntType(64), 8), stripes.type

    def at(address: Any) -> Any:
        return builder.inttoptr(address, lanes.as_pointer())

    def read(base: Any, one: Any, size: int) -> Any:
        return builder.load(at(builder.add(base, builder.mul(one, number(size)))), align=8)

    before, loop, after = builder.block, builder.append_basic_block("stripe"), builder.append_basic_block("after")
    first = builder.load(at(acc), align=8)
    builder.branch(loop)
    builder.position_at_end(loop)
    one, products, sums = builder.phi(number), builder.phi(lanes), builder.phi(lanes)
    word = read(words, one, 64)
    key = builder.xor(word, read(keys, one, 8))
    product = builder.mul(builder.and_(key, lanes([0xFFFFFFFF] * 8)), builder.lshr(key, lanes([32] * 8)))
    steps = ((one, number(0), number(1)), (products, first, product), (sums, lanes([0] * 8), word))
    following = [builder.add(phi, more) for phi, _, more in steps]
    for (phi, start, _), value in zip(steps, following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following[0], stripes), loop, after)
    builder.position_at_end(after)
    neighbours = ir.VectorType(ir.IntType(32), 8)([1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(following[2], following[2], neighbours)
    builder.store(builder.add(following[1], swapped), at(acc), align=8)
    return context.get_dummy_value()


@numba.njit(cache=True, nogil=True)
def block_checksum(words):
    """The checksum of a block given as uint64 [block_size / 8]; its checksum field counts as zero."""
    acc = _START.copy()
    count = words.shape[0]
    full = (count * 8 - 1) // 1024
    key = _KEYS[_CHECKSUM_WORD]
    acc[_CHECKSUM_WORD ^ 1] -= words[_CHECKSUM_WORD]
    found = words[_CHECKSUM_WORD] ^ key
    acc[_CHECKSUM_WORD] += (key & _LOW) * (key >> np.uint64(32)) - (found & _LOW) * (found >> np.uint64(32))
    for block in range(full + 1):
        stripes = 16 if block < full else (count * 8 - 1 - 1024 * full) // 64
        start = np.uintp(words.ctypes.data) + np.uintp(1024 * block)
        _accumulate(start, np.uintp(_KEYS.ctypes.data), stripes, np.uintp(acc.ctypes.data))
        if block < full:
            for lane in range(8):
                mixed = acc[lane] ^ (acc[lane] >> np.uint64(47)) ^ _SCRAMBLE[lane]
                acc[lane] = mixed * _PRIME
    at = count - 8
    for lane in range(8):
        word = words[at + lane]
        key = word ^ _LAST[lane]
        acc[lane ^ 1] += word
        acc[lane] += (key & _LOW) * (key >> np.uint64(32))
    result = np.uint64(count * 8) * _LENGTH_PRIME
    for pair in range(4):
        result += _fold(acc[2 * pair] ^ _MERGE[2 * pair], acc[2 * pair + 1] ^ _MERGE[2 * pair + 1])
    result ^= result >> np.uint64(37)
    result *= _AVALANCHE
    return result ^ (result >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def seal(words, first, last):
    """Write the checksums of the blocks ``first`` to ``last - 1`` of an array uint64 [n, block_size / 8]."""
    for row in range(first, last):
        words[row, _CHECKSUM_WORD] = block_checksum(words[row])


@numba.njit(cache=True, nogil=True)
def intact(words):
    """Whether the checksum of each block of an array uint64 [n, block_size / 8] is right: bool [n]."""
    right = np.empty(words.shape[0], np.bool_)
    for row in range(words.shape[0]):
        right[row] = words[row, _CHECKSUM_WORD] == block_checksum(words[row])
    return right
