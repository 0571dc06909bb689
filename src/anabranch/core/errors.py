"""What can go wrong, as a small tree.

AnabranchError
 ├─ UnsupportedError    the query asks for something that Anabranch does not do; change the query
 ├─ SettingsError       a setting is unknown, ill-typed or impossible; change the setting
 ├─ CheckpointError     the checkpoint belongs to something else, is damaged, or cannot be written
 ├─ WorkerError         a state worker refused or failed a request
 │   ├─ FencedError     a newer driver has taken over the job; this one must stop
 │   └─ LostWorkerError a state worker cannot be reached or does not answer
 └─ EpochError          an epoch could not be completed; the query stops and resumes from its checkpoint

Every message says what happened and ends in what to do.
"""


class AnabranchError(Exception):
    """The base of every error that Anabranch raises on purpose."""


class UnsupportedError(AnabranchError):
    """The query asks for something that Anabranch does not do."""


class SettingsError(AnabranchError):
    """A setting is unknown, ill-typed or impossible."""


class CheckpointError(AnabranchError):
    """The checkpoint belongs to another job, is damaged, or cannot be written."""


class WorkerError(AnabranchError):
    """A state worker refused or failed a request."""


class FencedError(WorkerError):
    """A newer driver has taken over the job; this one must stop."""


class LostWorkerError(WorkerError):
    """A state worker cannot be reached or does not answer."""


class EpochError(AnabranchError):
    """An epoch could not be completed; nothing of it is part of the state."""
