"""Keyed pseudorandom permutations of a range, evaluated at any position.

A keyed bijection on [0, n): a Feistel network over the bits of the position, with cycle walking for
an n that is no power of two (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002). The round function is the finaliser of MurmurHash3 (A. Appleby), keyed by exclusive
or. Memory is that of the positions asked for, whatever n is.

It is fast and shuffles well, but is not a cipher. A network of four bits or more makes even
permutations only, so that of 5 samples, for example, the odd orders are 8 % more likely than
average, and the even ones 8 % less.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np
from numpy.typing import NDArray

from headrace.dtypes import IntArray

Keys = NDArray[np.uint32]

KEY_COUNT = 8
# for ranges of at least _SMALL; smaller ones take KEY_COUNT, since few bits mix slowly
_ROUNDS = 6
_SMALL = 64

_BLOCK = 65_536  # positions at a time: few calls of numpy, and temporaries that stay in the cache
_KEYS_PER_DIGEST = 16

# Bits of the network's domain, by the bit length of n - 1: at least two, since either half needs
# one, and never three: halves of one and two bits would take some 24 rounds until all orders are
# equally likely.
_WIDTHS = np.arange(64, dtype=np.uint64)
_WIDTHS[:2] = 2
_WIDTHS[3] = 4
_POWERS_OF_TWO = np.left_shift(np.uint64(1), np.arange(63, dtype=np.uint64))


def derive_keys(*parts: int | str, count: int) -> Keys:
    """Derives keys, uint32 [count], from strings and integers of any size (Python's and numpy's
    give the same keys).

    They are hashed, not added: seed 1 of epoch 0 must not equal seed 0 of epoch 1.
    """
    message = b""
    for part in parts:  # no two lists of parts give the same bytes
        if isinstance(part, str):
            message += b"s%d:%b" % (len(part.encode()), part.encode())
        else:
            message += b"i%d;" % operator.index(part)
    digests = b""
    for number in range(-(-count // _KEYS_PER_DIGEST)):
        salt = number.to_bytes(8, "little")
        digests += hashlib.blake2b(message, digest_size=4 * _KEYS_PER_DIGEST, salt=salt).digest()
    return np.frombuffer(digests, "<u4")[:count].astype(np.uint32)


def permute(positions: IntArray, n: int, keys: Keys) -> IntArray:
    """Maps positions in [0, n) to indices: a bijection on [0, n) that the keys choose.

    Args:
        positions: int64 [m].
        n: size of the range, below 2**63.
        keys: at least `KEY_COUNT`.

    Returns:
        int64 [m].
    """
    size = np.uint64(n)
    bits = _WIDTHS[(n - 1).bit_length()]
    rounds = keys[: KEY_COUNT if n < _SMALL else _ROUNDS]
    out = np.empty_like(positions)
    for start in range(0, positions.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        out[part] = _walk(positions[part].astype(np.uint64), size, bits, rounds)
    return out


def permute_within(positions: IntArray, sizes: IntArray, keys: Keys) -> IntArray:
    """Maps each position inside a range of its own: samples inside blocks of different sizes.

    An element with size n and a column of keys gets what `permute` gives for that n and those keys.

    Args:
        positions: int64 [m]; element i is in [0, sizes[i]).
        sizes: int64 [m].
        keys: of shape [at least `KEY_COUNT`, m]: a column an element.

    Returns:
        int64 [m].
    """
    out = np.empty_like(positions)
    limits = sizes.astype(np.uint64)
    bits = _WIDTHS[np.searchsorted(_POWERS_OF_TWO, limits - np.uint64(1), side="right")]
    is_small = limits < _SMALL
    for rounds, members in ((KEY_COUNT, is_small), (_ROUNDS, ~is_small)):
        group = np.flatnonzero(members)
        if group.size:
            values = positions[group].astype(np.uint64)
            out[group] = _walk(values, limits[group], bits[group], keys[:rounds, group])
    return out


def mix(values: NDArray[np.uint32], keys: Keys | np.uint32) -> NDArray[np.uint32]:
    """Hashes 32-bit integers under 32-bit keys: the MurmurHash3 finaliser of their exclusive or.

    Args:
        values: uint32 array.
        keys: uint32, one for all or any shape that broadcasts.

    Returns:
        uint32 array of the broadcast shape.
    """
    h = np.bitwise_xor(values, keys)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def _walk(
    values: NDArray[np.uint64],
    sizes: NDArray[np.uint64] | np.uint64,
    bits: NDArray[np.uint64] | np.uint64,
    keys: Keys,
) -> NDArray[np.uint64]:
    """Applies the network until every value ([m]) is below its size (one for all, or
    [m]; `bits` and `keys` likewise).

    It gets there, since the network permutes a finite domain and the walk began below the size; and
    soon, since the domain is hardly ever more than twice as large.
    """
    out = _feistel(values, bits, keys)
    outside = np.flatnonzero(out >= sizes)
    while outside.size:
        if isinstance(sizes, np.ndarray) and isinstance(bits, np.ndarray):
            again = _feistel(out[outside], bits[outside], keys[:, outside])
            is_out = again >= sizes[outside]
        else:
            again = _feistel(out[outside], bits, keys)
            is_out = again >= sizes
        out[outside] = again
        outside = outside[is_out]
    return out


def _feistel(
    values: NDArray[np.uint64],
    bits: NDArray[np.uint64] | np.uint64,
    keys: Keys,
) -> NDArray[np.uint64]:
    """A Feistel network over two halves of `bits` bits, which differ by one bit where `bits` is
    odd.

    The halves change places after each round and the number of rounds is even, so that they end
    with the widths they began with.
    """
    one = np.uint64(1)
    left_bits = bits >> one
    right_bits = bits - left_bits
    left_mask = (one << left_bits) - one
    right_mask = (one << right_bits) - one
    left = (values >> right_bits).astype(np.uint32)
    right = (values & right_mask).astype(np.uint32)
    mask = left_mask.astype(np.uint32)
    other_mask = right_mask.astype(np.uint32)
    for key in keys:
        mixed = mix(right, key)
        mixed &= mask
        mixed ^= left
        left = right
        right = mixed
        mask, other_mask = other_mask, mask
    return (left.astype(np.uint64) << right_bits) | right
