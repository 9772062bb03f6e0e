"""Keyed pseudorandom permutations of a range, evaluated at any position.

A keyed bijection on [0, n): a Feistel network over the bits of the position, with cycle walking for
an n that is no power of two (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002). The round function is the finaliser of MurmurHash3 (A. Appleby), keyed by exclusive
or. Memory is that of the positions asked for, whatever n is.

It shuffles well and fast, and is no cipher. A network of four bits and more makes even permutations
only, so that for instance of 5 samples the odd orders are 8 % likelier than average and the even
ones 8 % less likely.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray
from headrace.errors import ConfigError

KEY_COUNT = 8
# of ranges of at least _SMALL; smaller ones take KEY_COUNT: few bits mix slowly, and orders would
# not be equally likely
_ROUNDS = 6
_SMALL = 64

# positions at a time: the temporaries of a round stay in the cache, and numpy's overhead stays
# small
_BLOCK = 32_768
_KEYS_PER_DIGEST = 16


def derive_keys(*parts: object, count: int) -> NDArray[np.uint64]:
    """Derives round keys from integers and strings by a hash.

    A hash, and never a sum: seed 1 of epoch 0 must not be seed 0 of epoch 1.

    Args:
        *parts: integers of any size (Python's and numpy's give the same keys) and strings.
        count: number of keys.

    Returns:
        uint64 array of shape [count]; only the low 32 bits of each key are used.

    Raises:
        ConfigError: a part is neither an integer nor a string.
    """
    message = b"".join(map(_encode, parts))
    digests = (
        hashlib.blake2b(
            message, digest_size=4 * _KEYS_PER_DIGEST, salt=number.to_bytes(8, "little")
        ).digest()
        for number in range(-(-count // _KEYS_PER_DIGEST))
    )
    return np.frombuffer(b"".join(digests), dtype="<u4")[:count].astype(np.uint64)


def _encode(part: object) -> bytes:
    """Encodes a part so that no two lists of parts give the same bytes."""
    if isinstance(part, str):
        text = part.encode()
        return b"s%d:%b" % (len(text), text)
    if isinstance(part, int | np.integer):
        return b"i%d;" % operator.index(part)
    raise ConfigError(
        f"keys are derived from integers and strings, not from {part!r} ({type(part).__name__})"
    )


def permute(positions: ArrayLike, n: int, keys: NDArray[np.uint64]) -> IntArray:
    """Maps positions to indices: a bijection on [0, n) that the keys choose.

    Args:
        positions: integers in [0, n), of any shape.
        n: size of the range, below 2**63.
        keys: at least `KEY_COUNT` keys from `derive_keys`.

    Returns:
        int64 array of indices in [0, n), of the shape of `positions`.

    Raises:
        ConfigError: a position outside [0, n), positions that are no integers, or too few keys.
    """
    return _mapped(positions, n, keys, back=False)


def unpermute(indices: ArrayLike, n: int, keys: NDArray[np.uint64]) -> IntArray:
    """Maps indices back to positions: ``unpermute(permute(positions, n, keys), n, keys)`` are the
    positions.

    Args:
        indices: integers in [0, n), of any shape.
        n, keys: as for `permute`.

    Returns:
        int64 array of positions in [0, n), of the shape of `indices`.

    Raises:
        ConfigError: an index outside [0, n), indices that are no integers, or too few keys.
    """
    return _mapped(indices, n, keys, back=True)


def permute_within(positions: ArrayLike, sizes: ArrayLike, keys: NDArray[np.uint64]) -> IntArray:
    """Maps each position inside a range of its own: samples inside blocks of different sizes.

    An element with size n and a column of keys gets what `permute` gives for that n and those keys.

    Args:
        positions: integers, one a range, of shape [m]; element i is in [0, sizes[i]).
        sizes: integers of shape [m].
        keys: of shape [at least `KEY_COUNT`, m]: a column an element.

    Returns:
        int64 array of shape [m]; element i is in [0, sizes[i]).

    Raises:
        ConfigError: a position outside its range, shapes that don't fit, or too few keys.
    """
    flat, limits = _checked(positions, keys), _checked(sizes, keys)
    if flat.ndim != 1 or limits.shape != flat.shape or keys.shape[1:] != flat.shape:
        raise ConfigError(
            f"positions, sizes and key columns must be as many, got shapes {flat.shape}, "
            f"{limits.shape} and {keys.shape}"
        )
    wrong = np.flatnonzero((flat < 0) | (flat >= limits))
    if wrong.size:
        raise ConfigError(
            f"position {flat[wrong[0]]} at element {wrong[0]} is outside [0, {limits[wrong[0]]})"
        )
    out = np.empty(flat.size, np.int64)
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        out[part] = _permute_mixed(
            flat[part].astype(np.uint64), limits[part].astype(np.uint64), keys[:, part]
        )
    return out


def _mapped(values: ArrayLike, n: int, keys: NDArray[np.uint64], *, back: bool) -> IntArray:
    array = _checked(values, keys)
    if array.size and (array.min() < 0 or array.max() >= n):
        raise ConfigError(f"positions must be in [0, {n}), got {array.min()} to {array.max()}")
    flat, out = array.ravel(), np.empty(array.size, np.int64)
    size, bits = np.asarray(n, np.uint64), np.asarray(_width(n), np.uint64)
    rounds = keys[: KEY_COUNT if n < _SMALL else _ROUNDS].astype(np.uint32)
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        out[part] = _walk(flat[part].astype(np.uint64), size, bits, rounds, back=back)
    return out.reshape(array.shape)


def mix(values: NDArray[np.uint32], keys: NDArray[np.uint32] | np.uint32) -> NDArray[np.uint32]:
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


def _width(n: int) -> int:
    """Bits of the network's domain; at least two, since either half needs one.

    Never three: halves of one and two bits would take some 24 rounds until all orders are equally
    likely.
    """
    bits = max(2, (n - 1).bit_length())
    return 4 if bits == 3 else bits


_POWERS_OF_TWO = np.left_shift(np.uint64(1), np.arange(63, dtype=np.uint64))
_WIDTHS = np.array([_width(2**bits) for bits in range(64)], np.uint64)  # by bit length of n - 1


def _permute_mixed(
    values: NDArray[np.uint64], sizes: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> IntArray:
    """`permute_within` of a few positions, grouped by their number of rounds only."""
    columns = keys[:KEY_COUNT].astype(np.uint32)
    bits = _WIDTHS[np.searchsorted(_POWERS_OF_TWO, sizes - np.uint64(1), side="right")]
    out = np.empty(values.size, np.int64)
    small = sizes < _SMALL
    for rounds, group in ((KEY_COUNT, np.flatnonzero(small)), (_ROUNDS, np.flatnonzero(~small))):
        if group.size:
            out[group] = _walk(values[group], sizes[group], bits[group], columns[:rounds, group])
    return out


def _walk(
    values: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    keys: NDArray[np.uint32],
    *,
    back: bool = False,
) -> NDArray[np.uint64]:
    """Applies the network, or its inverse, until every value ([m]) is below its size (one for all,
    or [m]; `bits` and `keys` likewise).

    It comes back below, since the network permutes a finite domain and the walk began below; and
    soon, since the domain is hardly ever more than twice the size.
    """
    out = _feistel(values, bits, keys, back=back)
    outside = np.flatnonzero(out >= sizes)
    while outside.size:
        limits, widths, columns = (
            (sizes[outside], bits[outside], keys[:, outside]) if sizes.ndim else (sizes, bits, keys)
        )
        again = _feistel(out[outside], widths, columns, back=back)
        out[outside] = again
        outside = outside[again >= limits]
    return out


def _feistel(
    values: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    keys: NDArray[np.uint32],
    *,
    back: bool = False,
) -> NDArray[np.uint64]:
    """A Feistel network over two halves of `bits` bits, which differ by one bit where `bits` is
    odd.

    The halves change places after each round and the number of rounds is even, so that they end
    with the widths they began with. Its inverse, `back`, is the same with the halves and the order
    of the keys the other way round.
    """
    one = np.uint64(1)
    right_bits = bits - (bits >> one)
    high, low = (one << (bits >> one)) - one, (one << right_bits) - one
    left, right = (values >> right_bits).astype(np.uint32), (values & low).astype(np.uint32)
    mask, other_mask = high.astype(np.uint32), low.astype(np.uint32)
    if back:
        left, right, mask, other_mask, keys = right, left, other_mask, mask, keys[::-1]
    for key in keys:
        mixed = mix(right, key)
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
        mask, other_mask = other_mask, mask
    if back:
        left, right = right, left
    return (left.astype(np.uint64) << right_bits) | right


def _checked(positions: ArrayLike, keys: NDArray[np.uint64]) -> NDArray[np.integer]:
    """Positions or sizes as an array of integers, if there are keys enough."""
    array = np.asarray(positions)
    if not array.size:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"positions and sizes must be integers, got an array of {array.dtype}")
    if len(keys) < KEY_COUNT:
        raise ConfigError(f"a permutation needs {KEY_COUNT} keys, got {len(keys)}")
    return array
