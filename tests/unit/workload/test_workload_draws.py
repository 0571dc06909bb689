"""Draws depend on the seed, the stream and the number alone, and have the shape that was asked for."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.workload.draws import EXACT_RANKS, below, bits, choices, ranks

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The published generator's output that follows a state."""
    mixed = (state + _GAMMA) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def test_draws_are_those_of_splitmix64() -> None:
    """The generator is entered where the stream begins; its own first outputs for seed 0 are published."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(number * _GAMMA) for number in range(3)] == published
    for seed in (0, 7):
        salt = splitmix64(seed ^ splitmix64(zlib.crc32(b"id")))
        assert bits(seed, "id", 0, 5).tolist() == [splitmix64(salt + (number - 1) * _GAMMA) for number in range(5)]
        assert bits(seed, "id", 3, 2).tolist() == bits(seed, "id", 0, 5).tolist()[3:]


@given(
    first=st.integers(0, 2**50),
    cut=st.integers(0, 64),
    skew=st.sampled_from([0.0, 0.7, 1.0, 1.3]),
    size=st.sampled_from([1, 10, 1000, 5_000_000]),
)
def test_a_range_drawn_in_two_parts_is_the_range_drawn_at_once(first: int, cut: int, skew: float, size: int) -> None:
    whole = ranks(3, "key", first, 64, size=size, skew=skew)
    parts = [
        ranks(3, "key", first, cut, size=size, skew=skew),
        ranks(3, "key", first + cut, 64 - cut, size=size, skew=skew),
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert whole.min() >= 0
    assert whole.max() < size


def test_seeds_and_streams_give_unrelated_draws() -> None:
    samples = [bits(seed, stream, 0, 20_000) for seed in (0, 1) for stream in ("id", "title")]
    assert len(np.unique(np.concatenate(samples))) == 80_000
    units = [sample / 2.0**64 for sample in samples]
    correlations = np.corrcoef(units) - np.eye(4)
    assert np.abs(correlations).max() < 0.03


@pytest.mark.parametrize("bound", [1, 2, 100, 2**31])
def test_bounded_draws_are_even(bound: int) -> None:
    drawn = below(bits(1, "x", 0, 200_000), bound)
    assert drawn.min() >= 0
    assert drawn.max() < bound
    counts = np.bincount(drawn * min(bound, 10) // bound, minlength=min(bound, 10))
    np.testing.assert_allclose(counts / 200_000, 1 / min(bound, 10), rtol=0.05)


def test_choices_follow_their_weights() -> None:
    drawn = choices(bits(1, "x", 0, 100_000), (6, 3, 1))
    np.testing.assert_allclose(np.bincount(drawn) / 100_000, [0.6, 0.3, 0.1], atol=0.01)


@pytest.mark.parametrize("skew", [0.5, 0.99, 1.0, 1.1, 1.0 + 1e-10, 2.0])
@pytest.mark.parametrize("size", [100, 100_000, 3_000_000])
def test_ranks_follow_the_zipf_distribution(skew: float, size: int) -> None:
    count = 400_000
    drawn = ranks(7, "key", 0, count, size=size, skew=skew)
    weights = np.arange(1, size + 1, dtype=np.float64) ** -skew
    shares = weights / weights.sum()
    # Bins that double in width, so that the head, the table's end and the tail beyond it each count.
    edges = np.unique(np.minimum(np.append(0, 2 ** np.arange(0, 23)), size))
    expected = np.add.reduceat(shares, edges[:-1]) * count
    observed = np.histogram(drawn, bins=edges)[0]
    spread = np.sqrt(np.maximum(expected, 1.0))
    assert np.abs(observed - expected).max() < (5 * spread).max()
    assert (np.abs(observed - expected) < 5 * spread).all()


def test_ranks_beyond_the_table_are_drawn_up_to_the_last() -> None:
    size = EXACT_RANKS + 3
    drawn = ranks(7, "key", 0, 3_000_000, size=size, skew=0.1)
    assert np.bincount(drawn, minlength=size)[-4:].min() > 0


def test_a_steep_distribution_gives_almost_only_the_first_rank() -> None:
    drawn = ranks(7, "key", 0, 10_000, size=10_000_000, skew=50.0)
    assert (drawn == 0).all()
