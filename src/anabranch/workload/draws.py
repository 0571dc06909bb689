"""Random draws that depend on nothing but a seed, a stream's name and an event's number.

A generator with a hidden state must be run from its beginning to reach event n. These draws are hashes of n, so any
range of events can be made again, in any split, on any machine, and comes out the same.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]

#: Ranks up to this one are drawn from an exact table, those beyond from the integral of the density, which is by
#: then as good as flat between two ranks. It bounds the table's memory for any number of keys.
EXACT_RANKS = 65_536

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def bits(seed: int, stream: str, first: int, count: int) -> Bits:
    """Draw 64 random bits for each of the numbers first .. first + count - 1: SplitMix64, entered at any point."""
    salt = _mix_one(seed ^ _mix_one(zlib.crc32(stream.encode())))
    with np.errstate(over="ignore"):
        state = np.arange(count, dtype=np.uint64)
        state *= np.uint64(_GAMMA)
        state += np.uint64((salt + first * _GAMMA) & _MASK)
        state ^= state >> np.uint64(30)
        state *= np.uint64(_MIX_1)
        state ^= state >> np.uint64(27)
        state *= np.uint64(_MIX_2)
        state ^= state >> np.uint64(31)
    return state


def below(draws: Bits, bound: int) -> Integers:
    """Turn each draw into an integer in 0 .. bound - 1, by its upper half. The bound is at most 2**31."""
    upper = draws >> np.uint64(32)
    upper *= np.uint64(bound)
    upper >>= np.uint64(32)
    return upper.view(np.int64)


def choices(draws: Bits, weights: tuple[int, ...]) -> Integers:
    """Turn each draw into an index into the weights, as often as its weight says. Meant for few, small weights."""
    lookup = np.repeat(np.arange(len(weights), dtype=np.int64), weights)
    return lookup[below(draws, len(lookup))]


def ranks(seed: int, stream: str, first: int, count: int, *, size: int, skew: float) -> Integers:
    """Draw ranks 0 .. size - 1; rank r is as likely as (r + 1) ** -skew, so all are alike when skew is 0."""
    draws = bits(seed, stream, first, count)
    if skew == 0.0 or size == 1:
        return below(draws, size)
    table = zipf_table(size, skew)
    slots = below(draws, len(table.keep))
    # The lower half of the draw is independent of the upper, which chose the slot.
    draws &= np.uint64(0xFFFFFFFF)
    drawn = np.where(draws < table.keep[slots], slots, table.alias[slots])
    if size > EXACT_RANKS:
        beyond = np.flatnonzero(drawn == EXACT_RANKS)
        if len(beyond):
            fractions = bits(seed, stream + ".tail", first, count)[beyond]
            drawn[beyond] = _tail_ranks(fractions, size=size, skew=skew)
    return drawn


@dataclass(frozen=True)
class AliasTable:
    """Walker's alias method: one slot per outcome, and two look-ups per draw however uneven the outcomes are."""

    #: A slot stands for itself if 32 random bits are below this number ...
    keep: Bits
    #: ... and for this outcome otherwise.
    alias: Integers


@lru_cache(maxsize=8)
def zipf_table(size: int, skew: float) -> AliasTable:
    """Make a table in which outcome r < EXACT_RANKS is rank r, and EXACT_RANKS, where there is one, a rank beyond."""
    exact = min(size, EXACT_RANKS)
    weights = np.arange(1, exact + 1, dtype=np.float64) ** -skew
    if size > exact:
        low, high = exact + 0.5, size + 0.5
        weights = np.append(weights, _antiderivative(high, skew) - _antiderivative(low, skew))
    return _alias_table(weights)


def _alias_table(weights: npt.NDArray[np.float64]) -> AliasTable:
    shares = (weights * (len(weights) / weights.sum())).tolist()
    alias = list(range(len(shares)))
    small = [outcome for outcome, share in enumerate(shares) if share < 1.0]
    large = [outcome for outcome, share in enumerate(shares) if share >= 1.0]
    # Each step depends on the one before. It runs once for a size and skew, over at most EXACT_RANKS + 1 outcomes.
    while small and large:
        poor, rich = small.pop(), large[-1]
        alias[poor] = rich
        shares[rich] -= 1.0 - shares[poor]
        if shares[rich] < 1.0:
            small.append(large.pop())
    # What is left over differs from 1 by rounding only.
    for outcome in small + large:
        shares[outcome] = 1.0
    keep = (np.asarray(shares) * 2.0**32).astype(np.uint64)
    return AliasTable(keep, np.asarray(alias, dtype=np.int64))


def _tail_ranks(fractions: Bits, *, size: int, skew: float) -> Integers:
    """Draw ranks EXACT_RANKS .. size - 1: the integral of x ** -skew, inverted; rank r covers r + 1/2 .. r + 3/2."""
    unit = (fractions >> np.uint64(11)).astype(np.float64) * 2.0**-53
    low = _antiderivative(EXACT_RANKS + 0.5, skew)
    high = _antiderivative(size + 0.5, skew)
    area = low + unit * (high - low)
    points = np.exp(area) if _is_harmonic(skew) else (area * (1.0 - skew)) ** (1.0 / (1.0 - skew))
    return np.clip(np.floor(points - 0.5).astype(np.int64), EXACT_RANKS, size - 1)


def _antiderivative(x: float, skew: float) -> float:
    return float(np.log(x)) if _is_harmonic(skew) else float(x ** (1.0 - skew) / (1.0 - skew))


def _is_harmonic(skew: float) -> bool:
    """Return whether skew is 1, or so close that dividing by the difference would lose the digits that matter."""
    return abs(skew - 1.0) < 1e-9


def _mix_one(value: int) -> int:
    """Apply SplitMix64's output function to one Python integer."""
    state = (value + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
    return state ^ (state >> 31)
