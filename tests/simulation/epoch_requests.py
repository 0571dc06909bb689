"""What is asked of a simulated worker apart from the requests of an epoch: see the messages of the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epoch_history import Row

from anabranch.checkpoint.statefiles import StateFiles
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import Epoch, Generation, WorkerId


@dataclass(frozen=True)
class Health:
    """Answered with whether the worker knows the job."""


@dataclass(frozen=True)
class JobRequest:
    generation: Generation


@dataclass(frozen=True)
class Assign(JobRequest):
    """Hold exactly these key groups as of a committed epoch."""

    epoch: Epoch
    number: int
    groups: tuple[int, ...]
    files: StateFiles
    freeze: bool
    #: By former owner: the key groups that come from there.
    peers: Mapping[WorkerId, frozenset[int]]


@dataclass(frozen=True)
class Progress(JobRequest):
    """Answered with what has arrived, and what has not."""


@dataclass(frozen=True)
class Complete(JobRequest):
    """Bring everything that is on its way, then answer as to Progress."""


@dataclass(frozen=True)
class Release(JobRequest):
    """Everything has arrived after the assignment of this number."""

    number: int


@dataclass(frozen=True)
class CloseJob(JobRequest):
    """Forget the job."""


@dataclass(frozen=True)
class FetchKeys(JobRequest):
    """From worker to worker: the state of keys that are kept for their new owner."""

    as_of: Epoch
    stage: int
    keys: tuple[Row, ...]


@dataclass(frozen=True)
class FetchGroups(JobRequest):
    """From worker to worker: all state of key groups that are kept for their new owner."""

    as_of: Epoch
    stage: int
    groups: tuple[int, ...]
    #: Only those of keys that the last epoch changed, and that are there.
    recent: bool = False


class UnableError(AnabranchError):
    """The worker cannot do what it was asked to."""
