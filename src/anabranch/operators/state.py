"""What a stateful stage needs from the state workers: one read and one write per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from anabranch.wire.routed import Answers, Expiry


class StageState(Protocol):
    """The state of one stage as one task sees it: that of the epoch before, and a place for its changes."""

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        """The stored entries of distinct keys (schema ``layout.keys``), by state variable.

        Each table has the schema ``layout.answers``: INDEX is the row of the key in ``keys``, and rows are
        ordered by INDEX, and by position within a list.
        """
        ...

    def ask(self, keys: pa.Table, *, rest: bool = False, expiries: Sequence[Expiry] = ()) -> Answers:
        """As `read`, and in the same exchange the rows of the partition that are due (schema ``layout.rows``)."""
        ...

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Stages the changes of the task (schema ``layout.changes``), by state variable."""
        ...
