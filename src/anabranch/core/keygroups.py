"""From keys to key groups, exactly as Spark's ``pmod(xxhash64(key...), G)`` does it in the JVM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DEFAULT_KEY_GROUPS = 1024
MAX_KEY_GROUPS = 32768


def key_groups_of(hashes: npt.NDArray[np.int64], key_groups: int) -> npt.NDArray[np.int32]:
    """The key group of each hash. NumPy's ``%`` takes the sign of the divisor, as Spark's ``pmod`` does."""
    if key_groups & (key_groups - 1) == 0:  # the same, several times as fast
        return (hashes & np.int64(key_groups - 1)).astype(np.int32)
    return (hashes % np.int64(key_groups)).astype(np.int32)
