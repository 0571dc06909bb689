"""Which key groups may hold keys that are due: a look for them need not read all state each time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH

_NEVER = np.iinfo(np.int64).max
_UNKNOWN = np.iinfo(np.int64).min


class ExpiryIndex:
    """For each key group a lower bound of the event times of its keys."""

    def __init__(self, event_time: EventTime, key_groups: int) -> None:
        self._event_time = event_time
        self._key_groups = key_groups
        #: Never above the true minimum, so that no key is overlooked. Nothing is known about restored state.
        self._earliest: npt.NDArray[np.int64] = np.full(key_groups, _UNKNOWN, dtype=np.int64)

    @property
    def event_time(self) -> EventTime:
        return self._event_time

    def note(self, changes: pa.Table) -> None:
        """Take in keys that were put; keys that were removed can only raise the minimum."""
        if not len(changes):
            return
        times = self._event_time.of(changes).fill_null(_NEVER).to_numpy()
        groups = key_groups_of(changes.column(HASH).to_numpy(), self._key_groups)
        np.minimum.at(self._earliest, groups, times)

    def candidates(self, groups: Collection[int], up_to: int) -> list[int]:
        """Those of the groups that may hold keys up to this time."""
        wanted = np.fromiter(groups, dtype=np.int64, count=len(groups))
        return [int(group) for group in wanted[self._earliest[wanted] <= up_to]]

    def split(self, batches: Sequence[pa.RecordBatch], scanned: Collection[int], up_to: int) -> list[pa.RecordBatch]:
        """The rows up to this time, out of all rows of the scanned groups; remembers the earliest."""
        # What has expired is still there until its removal is committed, and may have to be found again.
        earliest = np.full(self._key_groups, _NEVER, dtype=np.int64)
        expired = []
        for batch in batches:
            times = self._event_time.of(batch)
            expired.append(batch.filter(self._event_time.is_over(batch, up_to)))
            groups = key_groups_of(batch.column(HASH).to_numpy(), self._key_groups)
            np.minimum.at(earliest, groups, times.fill_null(_NEVER).to_numpy())
        chosen = np.fromiter(scanned, dtype=np.int64, count=len(scanned))
        self._earliest[chosen] = earliest[chosen]
        return expired
