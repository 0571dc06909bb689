"""What rows that arrive do to a table: those of a known key replace its row, others are added, some remove theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

_NUMBER = "_number"


@dataclass(frozen=True)
class Upsert:
    """A table after some rows have arrived."""

    table: pa.Table
    #: The rows that were added or replaced.
    put: pa.Table
    #: The last rows of keys that are not in the table any more; they may not have been before.
    removed: pa.Table


def upserted(table: pa.Table, rows: pa.Table, removes: pa.Array, keys: Sequence[str]) -> Upsert:
    """The table after the rows, in their order: of those with one key, the last counts. `removes` says which remove."""
    both = pa.concat_tables([table, rows.cast(table.schema)])
    numbered = both.select(list(keys)).append_column(_NUMBER, pa.array(np.arange(len(both))))
    latest = numbered.group_by(list(keys)).aggregate([(_NUMBER, "max")]).column(f"{_NUMBER}_max").to_numpy()
    latest = np.sort(latest)
    known = len(table)
    gone = np.zeros(len(both), np.bool_)
    gone[known:] = removes.to_numpy(zero_copy_only=False)
    new = latest[latest >= known]
    return Upsert(
        table=both.take(pa.array(latest[~gone[latest]])).combine_chunks(),
        put=both.take(pa.array(new[~gone[new]])).combine_chunks(),
        removed=both.take(pa.array(new[gone[new]])).combine_chunks(),
    )
