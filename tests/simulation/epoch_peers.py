"""From one simulated worker to another: what is kept there for us, through a network that fails; and who waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epoch_requests import FetchGroups, FetchKeys
from epoch_rows import Rows

from anabranch.core.errors import AnabranchError, LostWorkerError
from anabranch.core.ids import Epoch, Generation, WorkerId
from anabranch.worker import adoption, holdings, migration

if TYPE_CHECKING:
    from epoch_worker import WorkerProcess

#: Rows of a piece of a drain.
PIECE_ROWS = 1


@dataclass(frozen=True)
class Peer:
    """One variable of the key groups that another worker keeps, as of an epoch. See the worker's peers."""

    asker: WorkerProcess
    name: WorkerId
    generation: Generation
    as_of: Epoch
    stage: int

    def fetch(self, keys: Rows) -> Iterator[Rows]:
        rows = self._ask(FetchKeys(self.generation, self.as_of, self.stage, tuple(keys.keys)))
        world = self.asker.world
        if world.rng.random() < 0.3:
            world.sleep(world.rng.randint(1, world.history.peer_ticks))
        world.seen["fetched from a frozen copy"] += bool(rows)
        yield Rows.of(rows, self.asker.world.history.hash_of)

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[Rows]:  # noqa: ARG002
        """The rows are those of the moment of the call, and come piece by piece as long as both workers live."""
        yield from self._pieces(FetchGroups(self.generation, self.as_of, self.stage, tuple(groups)), "drained")

    def recent(self, groups: Collection[int]) -> Iterator[Rows]:
        request = FetchGroups(self.generation, self.as_of, self.stage, tuple(groups), recent=True)
        yield from self._pieces(request, "prefetched")

    def _pieces(self, request: FetchGroups, what: str) -> Iterator[Rows]:
        world = self.asker.world
        rows = self._ask(request)
        world.rng.shuffle(rows)
        for start in range(0, len(rows), PIECE_ROWS):
            if start:
                world.sleep(world.rng.randint(1, world.history.peer_ticks))
                if not world.workers[self.name].reachable or world.loses_message():
                    world.seen["a drain from a frozen copy breaks"] += 1
                    self._fail(LostWorkerError(f"{self.name} does not answer any more"))
            yield Rows.of(rows[start : start + PIECE_ROWS], world.history.hash_of)
        world.seen[f"{what} from a frozen copy"] += bool(rows)

    def _ask(self, request: FetchKeys | FetchGroups) -> list[Any]:
        if not self.asker.reachable or self.asker.world.peer_breaks():
            self._fail(LostWorkerError(f"{self.name} cannot be reached from {self.asker.name}"))
        answer = self.asker.world.ask(self.name, request, self.asker.world.history.peer_timeout)
        if isinstance(answer, AnabranchError):
            self._fail(answer)
        return list(answer)

    def _fail(self, error: AnabranchError) -> None:
        # The driver that checks the end of a history takes over from the one before, and fences its sources.
        self.asker.world.seen["fell back to the checkpoint"] += not self.asker.world.calm
        raise error


class BusyError(Exception):
    """Somebody holds the lock who waits for another worker: whoever wants it too starts over a little later."""


class OneAtATime:
    """A lock. In a simulation there is nobody who could let go of it while we wait."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        if self._held:
            raise BusyError
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class _Locks:
    Lock = OneAtATime


@contextmanager
def without_threads() -> Iterator[None]:
    """What brings state uses locks of the simulation while this lasts, is quiet about what it does, and copies less."""
    modules: tuple[Any, ...] = (adoption, holdings, migration)
    known, asdict = [module.threading for module in modules], holdings.asdict
    was_quiet, migration.logger.disabled = migration.logger.disabled, True
    try:
        for module in modules:
            module.threading = _Locks
        setattr(holdings, "asdict", vars)  # noqa: B010  (it is not exported)
        yield
    finally:
        migration.logger.disabled = was_quiet
        setattr(holdings, "asdict", asdict)  # noqa: B010
        for module, threading in zip(modules, known, strict=True):
            module.threading = threading
