"""What a stateful stage needs from the state workers: one read and one write per task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from anabranch.core.requests import Expiry
from anabranch.wire.routed import Answers


class StageState(Protocol):
    """The state of one stage as one task sees it: that of the epoch before, and a place for its changes."""

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        """The stored entries of distinct keys (schema ``layout.keys``), by state variable.

        Each table has the schema ``layout.answers``: INDEX is the row of the key in ``keys``, and rows are
        ordered by INDEX, and by position within a list.
        """
        ...

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        """As `read`, and in the same exchange the rows of the partition that are due (schema ``layout.rows``), and the
        entries of other keys that have a row which is."""
        ...

    def note_late(self, rows: int) -> None:
        """So many rows came too late and were dropped. Before the write."""
        ...

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Stages the changes of the task (schema ``layout.changes``), by state variable."""
        ...


def note_dropped(state: StageState, arrived: Iterable[pa.RecordBatch], timely: Iterable[pa.RecordBatch]) -> None:
    """Of the rows that arrived, those that are not timely have been dropped."""
    state.note_late(sum(batch.num_rows for batch in arrived) - sum(batch.num_rows for batch in timely))
