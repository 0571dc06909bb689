"""How many of an epoch's keys were already among those of the epoch before: whether it pays to bring these first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Of many hashes, one in sixteen is looked at: the same ones in every epoch.
_SAMPLED = 16
_MANY = 4096
#: What counts of earlier epochs.
_DECAY = 0.5


class KeyRecurrence:
    """Follows the keys that epochs change."""

    def __init__(self) -> None:
        self._before: npt.NDArray[np.int64] | None = None
        self._is_sampled = False
        #: The share of an epoch's keys that the epoch before had as well, from 0 to 1.
        self.share = 0.0

    def note(self, hashes: npt.NDArray[np.int64]) -> None:
        """The keys that an epoch changed."""
        if not len(hashes):
            return
        is_many = len(hashes) > _MANY
        found = np.unique(_sample(hashes) if is_many else hashes)
        if self._before is not None:
            now = _sample(found) if self._is_sampled and not is_many else found
            before = _sample(self._before) if is_many and not self._is_sampled else self._before
            again = float(np.isin(now, before, assume_unique=True).mean()) if len(now) else 0.0
            self.share = _DECAY * self.share + (1 - _DECAY) * again
        self._before, self._is_sampled = found, is_many


def _sample(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # Not by the lowest bits: they make the key group.
    chosen: npt.NDArray[np.int64] = hashes[(hashes >> np.int64(32)) % _SAMPLED == 0]
    return chosen
