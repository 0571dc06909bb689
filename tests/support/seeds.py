"""How much is left to chance: tests whose input is drawn from a seed take one, or as many as TEST_SEEDS says."""

from __future__ import annotations

import os


def seeds(first: int) -> list[int]:
    """The seed of every run, and those that follow it: ``TEST_SEEDS=20 ./run test tests/integration -k seed``."""
    return [first + more for more in range(int(os.environ.get("TEST_SEEDS", "1")))]
