"""Which task processes which rows: by key group, computed in the JVM."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.core.schemas import HASH
from anabranch.wire.routed import StageAccess

#: The partition of a row's key group. Tasks read it from their rows: Spark's own partition id is that of the task,
#: which is another number once a later operation unites or coalesces partitions.
PARTITION = "_partition"


def with_hash(rows: DataFrame, key_names: Sequence[str]) -> DataFrame:
    """Put the hash of the key in front."""
    return rows.select(F.xxhash64(*key_names).alias(HASH), "*")


def place(rows: DataFrame, access: StageAccess) -> DataFrame:
    """Move every row to the partition that its key group is assigned to."""
    # Spark folds the split and the cast into one array literal, so a row costs one look-up.
    table = F.split(F.lit(",".join(map(str, access.partitions.tolist()))), ",").cast("array<int>")
    group = F.pmod(F.col(HASH), F.lit(access.key_groups)).cast("int")
    placed = rows.select(F.get(table, group).alias(PARTITION), "*")
    return placed.repartitionById(access.parallelism, F.col(PARTITION))
