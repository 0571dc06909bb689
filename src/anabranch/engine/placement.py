"""Which task processes which rows: by key group, computed in the JVM."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from anabranch.core.schemas import HASH
from anabranch.wire.routed import StageAccess

#: The partition of a row's key group. Tasks read it from their rows: Spark's own partition id is that of the task,
#: which is another number once a later operation unites or coalesces partitions.
PARTITION = "_partition"


def place(rows: DataFrame, key_names: Sequence[str], access: StageAccess) -> DataFrame:
    """Put PARTITION and HASH in front, and move every row to the partition that its key group is assigned to."""
    hashed = F.xxhash64(*key_names)
    placed = rows.select(_partition_of(hashed, access).alias(PARTITION), hashed.alias(HASH), "*")
    return placed.repartitionById(access.parallelism, F.col(PARTITION))


def _partition_of(hashed: Column, access: StageAccess) -> Column:
    # Spark folds the split and the cast into one array literal, so a row costs one look-up.
    table = F.split(F.lit(",".join(map(str, access.partitions.tolist()))), ",").cast("array<int>")
    return F.get(table, F.pmod(hashed, F.lit(access.key_groups)).cast("int"))
