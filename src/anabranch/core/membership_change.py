"""A change of a job's workers while it is being made: what it is for, and who leaves with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership_events import RescaleRequest
from anabranch.core.routes import Route


@dataclass
class ChangeInTheMaking:
    """A change that is being made."""

    next_epoch: Epoch
    lost: list[WorkerId] = field(default_factory=list)
    joined: list[WorkerId] = field(default_factory=list)
    leaving: set[WorkerId] = field(default_factory=set)
    #: Those that leave because they were named.
    named: frozenset[WorkerId] = frozenset()
    requests: list[RescaleRequest] = field(default_factory=list)
    #: The route that is being saved.
    route: Route | None = None
    fruitless_tries: int = 0

    def choose_leaving(self, members: Sequence[WorkerId], wanted: int) -> None:
        """Those that were named leave, and as many more as there are too many: the newest first."""
        self.leaving = set(self.named & set(members))
        if len(self.leaving) == len(members):
            self.leaving = set()  # all others are lost: somebody has to stay
        for worker in reversed(members):
            if len(members) - len(self.leaving) <= wanted:
                break
            self.leaving.add(worker)

    def take_back(self, staying: frozenset[WorkerId]) -> list[RescaleRequest]:
        """Takes the requests that these workers leave out of the change, because they could not."""
        taken = [request for request in self.requests if request.leaving in staying]
        self.requests = [request for request in self.requests if request not in taken]
        return taken
