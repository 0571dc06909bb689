"""What Spark's own logs in a checkpoint say: which micro-batches it planned, and which it committed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from anabranch.checkpoint import paths
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import NO_EPOCH, Epoch

#: In the place of the offset of a source that has none yet.
_NO_OFFSET = "-"


def last_committed_epoch(storage: Storage) -> Epoch:
    """Returns the newest epoch that Spark will not run again; NO_EPOCH if it committed none.

    A manifest of a later epoch is not part of the state: Spark runs that epoch again, from the same offsets.
    """
    return _newest_batch(storage, paths.SPARK_COMMITS)


def last_planned_epoch(storage: Storage) -> Epoch:
    """Returns the newest epoch that Spark has chosen the input of; NO_EPOCH if it never has."""
    return _newest_batch(storage, paths.SPARK_OFFSETS)


def has_offsets(storage: Storage) -> bool:
    """Tells whether a streaming query has ever planned a micro-batch on this checkpoint."""
    return last_planned_epoch(storage) != NO_EPOCH


def read_entries(storage: Storage, epoch: Epoch) -> Mapping[str, int]:
    """Returns how far an epoch has read the logs of Spark's file sources: the last entry of each, by its folder.

    Other sources have offsets of other kinds, and keep no log of what they read: they are left out. A source that had
    nothing to read yet, whatever its kind, has read up to -1.
    """
    lines = storage.read(f"{paths.SPARK_OFFSETS}/{epoch}").decode().splitlines()
    # After the version of the format and what else Spark notes. Version 2 has the names of the sources before them.
    if lines[:1] == ["v2"]:
        offsets = dict(line.partition(":")[::2] for line in lines[2:])
    else:
        offsets = {str(number): line for number, line in enumerate(lines[2:])}
    entries = {name: _log_entry(offset) for name, offset in offsets.items()}
    return {name: entry for name, entry in entries.items() if entry is not None}


def _log_entry(offset: str) -> int | None:
    if offset == _NO_OFFSET:
        return -1
    try:
        document = json.loads(offset)
    except ValueError:
        return None
    entry = document.get("logOffset") if isinstance(document, dict) else None
    return entry if isinstance(entry, int) else None


def _newest_batch(storage: Storage, folder: str) -> Epoch:
    batches = (paths.spark_batch_of(name) for name in storage.list_names(folder))
    return max((batch for batch in batches if batch is not None), default=NO_EPOCH)
