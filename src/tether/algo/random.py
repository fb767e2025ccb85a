"""Random numbers computed from a key, never drawn from a shared stream.

A key is (seed, purpose, iteration, row, column) or the part of it that a use has. Equal keys give
equal numbers on every machine, so the order of work, the number of workers and restarts change
nothing.
"""

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Word = int | np.ndarray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 8  # of the Feistel network


def uniform(seed: int, purpose: str, *words: Word) -> Float[Tensor, "..."]:
    """Return float64 numbers in [0, 1), one for each element of the broadcast words."""
    return torch.from_numpy((_hash(seed, purpose, *words) >> np.uint64(11)) * 2.0**-53)


def permutation(size: int, seed: int, purpose: str, *words: int) -> Int[Tensor, " size"]:
    """Return 0 .. size - 1 in an order that the key determines."""
    return torch.from_numpy(
        np.argsort(_hash(seed, purpose, *words, np.arange(size)), kind="stable")
    )


def permuted(
    places: Int[np.ndarray, " some"], size: int, seed: int, purpose: str, *words: int
) -> Int[np.ndarray, " some"]:
    """Return what stands at some places of an order of 0 .. size - 1 that the key determines.

    Nothing of `size` numbers is built. A Feistel network permutes the numbers of an even number of
    bits (Luby and Rackoff 1988, *How to construct pseudorandom permutations from pseudorandom
    functions*); one that is not below `size` goes through it again until it is (Black and Rogaway
    2002, *Ciphers with arbitrary finite domains*), 4 times on average at most. Another order than
    `permutation` has.
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # of each half
    low = (np.uint64(1) << bits) - np.uint64(1)
    found = np.asarray(places).astype(np.uint64)
    walking = np.ones(found.shape, dtype=bool)
    while walking.any():
        left, right = found[walking] >> bits, found[walking] & low
        for number in range(ROUNDS):
            left, right = right, left ^ (_hash(seed, purpose, *words, number, right) & low)
        found[walking] = left << bits | right
        walking = found >= np.uint64(size)
    return found.astype(np.int64)


def _hash(seed: int, purpose: str, *words: Word) -> np.ndarray:
    """Return 64 well-mixed bits from all words, each mixed in by the finaliser of SplitMix64.

    Steele, Lea and Flood 2014, *Fast Splittable Pseudorandom Number Generators*.
    """
    tag = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed, tag, *words):  # arrays of uint64 wrap around, as meant
        state = _finalise((state ^ np.asarray(word).astype(np.uint64)) + GOLDEN)
    return state


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
