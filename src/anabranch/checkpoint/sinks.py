"""The numbers that epochs have in the log of a file sink.

Spark's file sink writes one entry of its log for each batch, counts on having all of them when it compacts the log, and
takes no batch that it has already. So the entries of a job follow the one that was the last before its first epoch
there: from 0 in a new directory, although the first epoch of a job that starts from a savepoint is another; and after
those of others in a directory that has a log. How far numbers are from epochs is written down before the first epoch.
"""

from __future__ import annotations

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.rewind import pending
from anabranch.checkpoint.sparklog import last_planned_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import Epoch


def shift_of(storage: Storage, spark: Storage, place: str, *, committed: Epoch, latest: int) -> int:
    """What to add to an epoch to get its number in the log of a sink, the same as long as the job lasts.

    ``committed`` is the epoch that the job resumes after, ``latest`` the newest entry that the log has; -1: none.
    """
    path = paths.sink_file(place)
    found = storage.read_if_present(path)
    if found is None:
        shift = _new_shift(spark, committed, latest)
        storage.create(path, documents.encode({"place": place, "shift": shift}))
        found = storage.read(path)  # of two drivers at once, the older may have been faster
    content = documents.decode(storage, path, found)
    try:
        return int(content["shift"])
    except (KeyError, TypeError, ValueError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error


def _new_shift(spark: Storage, committed: Epoch, latest: int) -> int:
    has_run = last_planned_epoch(spark) > committed or bool(pending(spark))
    # Epochs of a job that has run here before, which are repeated, are in the log under their own numbers.
    return 0 if has_run and latest >= committed else latest - committed
