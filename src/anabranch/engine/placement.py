"""Which task processes which rows: by key group, computed in the JVM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from anabranch.core.schemas import HASH
from anabranch.wire.routed import StageAccess

#: The partition of a row's key group. Tasks read it from their rows: Spark's own partition id is that of the task,
#: which is another number once a later operation unites or coalesces partitions.
PARTITION = "_partition"


def place(rows: DataFrame, key_names: Sequence[str], access: StageAccess) -> DataFrame:
    """Put PARTITION and HASH in front, and move every row to the partition that its key group is assigned to."""
    table = ",".join(map(str, access.partitions.tolist()))
    columns = _placement(id(rows.sparkSession._jvm), tuple(key_names), table, access.key_groups)
    return rows.select(*columns, "*").repartitionById(access.parallelism, PARTITION)


@lru_cache(maxsize=64)
def _placement(jvm: int, key_names: tuple[str, ...], table: str, key_groups: int) -> tuple[Column, Column]:
    """Partition and hash. Kept from epoch to epoch, for one JVM: making a column takes several round trips to it."""
    del jvm
    hashed = F.xxhash64(*key_names)
    # Spark folds the split and the cast into one array literal, so a row costs one look-up.
    partitions = F.split(F.lit(table), ",").cast("array<int>")
    partition = F.get(partitions, F.pmod(hashed, F.lit(key_groups)).cast("int"))
    return partition.alias(PARTITION), hashed.alias(HASH)
