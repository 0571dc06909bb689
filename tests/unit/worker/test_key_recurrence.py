"""Whether epochs change the same keys again."""

import numpy as np
import pytest

from anabranch.worker.state.key_recurrence import KeyRecurrence

RNG = np.random.default_rng(5)


def hashes(count: int) -> np.typing.NDArray[np.int64]:
    return RNG.integers(-(2**63), 2**63 - 1, count)


def test_nothing_is_known_before_the_second_epoch() -> None:
    repetition = KeyRecurrence()
    repetition.note(hashes(1000))
    assert repetition.share == 0.0


def test_epochs_of_the_same_keys_repeat() -> None:
    repetition, keys = KeyRecurrence(), hashes(10_000)
    for _ in range(6):
        repetition.note(RNG.permutation(keys))
    assert repetition.share > 0.95


def test_epochs_of_other_keys_do_not() -> None:
    repetition = KeyRecurrence()
    for _ in range(6):
        repetition.note(hashes(10_000))
    assert repetition.share < 0.01


def test_half_of_the_keys_again_is_about_half() -> None:
    repetition, keys = KeyRecurrence(), hashes(20_000)
    for _ in range(8):
        repetition.note(np.concatenate((keys, hashes(20_000))))
    assert repetition.share == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("many", [20_000, 50])
def test_few_keys_among_many_and_many_after_few_are_told_as_well(many: int) -> None:
    repetition, keys = KeyRecurrence(), hashes(20_000)
    for count in (many, 3000, many, 3000):
        repetition.note(keys[:count])
    assert repetition.share > 0.02


def test_an_epoch_without_changes_tells_nothing() -> None:
    repetition, keys = KeyRecurrence(), hashes(10_000)
    for _ in range(6):
        repetition.note(keys)
    before = repetition.share
    repetition.note(keys[:0])
    assert repetition.share == before
