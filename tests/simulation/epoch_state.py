"""The job's state on a simulated worker: the package's own holdings, over dictionaries. See the worker's jobstate."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_checkpoint import VARIABLE, FilesOrigin, origin_files
from epoch_history import STAGES, Row
from epoch_peers import Peer
from epoch_requests import Assign, FetchGroups, FetchKeys
from epoch_rows import DictState, Rows, Value, counts_of

from anabranch.core.ids import Epoch
from anabranch.core.keygroups import key_groups_of
from anabranch.worker.adoption import Adoption
from anabranch.worker.holdings import Holdings, Sources, Variable
from anabranch.worker.migration import Migration

if TYPE_CHECKING:
    from epoch_worker import WorkerProcess


class StepwiseHoldings(Holdings):
    """Drained step by step when the simulation says so, in any order, instead of by a thread."""

    def __init__(self, states: Any, key_groups: int, start_drain: Callable[[], None]) -> None:
        super().__init__(states, key_groups)
        self._begin_draining = start_drain

    def start_drain(self) -> None:
        self._not_yet = []
        if self._all():
            self._begin_draining()

    def is_missing(self, variable: Variable, row: Rows) -> bool:
        """Whether the state of this key has not arrived."""
        return any(_lacks(each, row) for each in self._arriving.get(variable, ()))

    def comes_from_peers(self, variable: Variable) -> frozenset[int]:
        """The key groups that are on their way from their former owner."""
        arriving = self._arriving.get(variable, ())
        return frozenset(group for each in arriving if _from_peer(each) for group in each.pending)

    def drain_some(self, rng: random.Random) -> bool:
        """Bring some key groups; whether there may be more to do."""
        self._let_go()
        unfinished = [each for each in self._all() if each not in self._not_yet]
        if not unfinished:
            return False
        self._prepare()
        each = rng.choice(unfinished)
        pending = each.pending
        if pending:
            each.drain(rng.sample(pending, rng.randint((len(pending) + 1) // 2, len(pending))))
        return True


def _lacks(each: Adoption | Migration, row: Rows) -> bool:
    if isinstance(each, Adoption):
        return bool(len(each._missing(row.hashes)))
    if each._from_checkpoint is not None:
        return _lacks(each._from_checkpoint, row) and bool(len(each._known.missing(row)))
    return bool(each._pending[key_groups_of(row.hashes, len(each._pending))].all() and len(each._known.missing(row)))


def _from_peer(each: Adoption | Migration) -> bool:
    return isinstance(each, Migration) and each._from_checkpoint is None


class HeldState:
    """All that a worker has of the job, from one reset to the next."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.world = worker.world
        history = self.world.history
        self.states: dict[Variable, Any] = {(stage, VARIABLE): DictState(history.group_of) for stage in range(STAGES)}
        self.holdings = StepwiseHoldings(self.states, history.key_groups, partial(worker.start_drain, self))
        #: Whether a step of the drain is due or under way.
        self.draining = False

    def close(self) -> None:
        self.holdings.close()
        for state in self.states.values():
            state.close()

    def assign(self, request: Assign) -> None:
        holdings, seen, world = self.holdings, self.world.seen, self.world
        if holdings._all():
            seen["assigned while groups are pending"] += any(map(holdings.pending, self.states))
            seen["assigned while groups come from peers"] += any(map(holdings.comes_from_peers, self.states))
        if holdings.frozen:
            returning = [as_of for group, as_of in holdings.frozen.items() if group in request.groups]
            seen["a group returns to where it is kept"] += bool(returning)
            seen["a group returns unchanged to where it is kept"] += request.epoch in returning and request.freeze
            seen["kept groups are dropped for a new driver"] += not request.freeze

        def from_checkpoint(variable: Variable, _: Collection[int]) -> FilesOrigin:
            return FilesOrigin(world.storage, origin_files(request.files, variable[0]), world.reading_breaks)

        def from_peer(name: Any, variable: Variable) -> Peer:
            return Peer(self.worker, name, request.generation, request.epoch, variable[0])

        peers = {name: (partial(from_peer, name), groups) for name, groups in request.peers.items()}
        adopted, left = holdings.assign(
            request.groups, Sources(from_checkpoint, peers), freeze_as_of=request.epoch if request.freeze else None
        )
        seen["groups adopted"] += bool(adopted)
        seen["groups frozen" if request.freeze else "groups dropped"] += bool(left)
        if not peers:
            holdings.start_drain()

    # -- for tasks

    def fetch(self, stage: int, rows: Iterable[Row]) -> None:
        keys = self.keys(rows)
        self.holdings.fetch((stage, VARIABLE), keys.hashes, keys)

    def fetch_changed(self, stage: int, rows: Iterable[Row]) -> None:
        """Those that were read are here; no key may change before it is."""
        self.fetch(stage, rows)

    def read(self, stage: int, keys: Collection[Row], rest: Collection[int] | None, epoch: Epoch) -> dict[Row, Value]:
        """The state of these keys, and, if ``rest`` says so, all of some key groups."""
        self.fetch(stage, keys)
        state = self.states[stage, VARIABLE]
        if rest is None:
            here = state.rows(epoch)
            return {row: here[row] for row in keys if row in here}
        self.holdings.complete((stage, VARIABLE), rest)
        group_of = self.world.history.group_of
        return {row: value for row, value in state.rows(epoch).items() if row in keys or group_of[row] in rest}

    # -- for other workers

    def fetch_keys(self, request: FetchKeys) -> list[tuple[Row, Value]]:
        keys, variable = self.keys(request.keys), (request.stage, VARIABLE)
        group_of = self.world.history.group_of
        self.note_chain(variable, {group_of[row] for row in request.keys})
        self.holdings.fetch_frozen(variable, keys.hashes, keys, request.as_of)
        here = self.states[variable].rows()
        found = [(row, here[row]) for row in request.keys if row in here]
        self.check_kept({group_of[row] for row in request.keys}, request.as_of)
        return found

    def fetch_groups(self, request: FetchGroups) -> list[tuple[Row, Value]]:
        variable, state = (request.stage, VARIABLE), self.states[request.stage, VARIABLE]
        scanned: list[tuple[Row, Value]]
        if request.recent:
            self.holdings.check_frozen(request.groups, request.as_of)
            scanned = state.scan_recent(set(request.groups) - self.holdings.pending(variable))
        else:
            self.note_chain(variable, request.groups)
            self.holdings.complete_frozen(variable, request.groups, request.as_of)
            scanned = state.scan(request.groups)
        self.check_kept(request.groups, request.as_of)
        return scanned

    def check_kept(self, groups: Collection[int], as_of: Epoch) -> None:
        """What was dropped while others were asked for the rest must not be taken for what does not exist."""
        self.holdings.check_frozen(groups, as_of)

    def note_chain(self, variable: Variable, groups: Collection[int]) -> None:
        if not self.holdings._all():
            return
        kept = self.holdings.frozen.keys() & set(groups)
        self.world.seen["a chain of two sources"] += bool(kept & self.holdings.comes_from_peers(variable))

    # -- the check

    def keys(self, rows: Iterable[Row]) -> Rows:
        return Rows.of_keys(rows, self.world.history.hash_of)

    def check(self, expected: dict[Row, int]) -> None:
        """What is here is what it should be, and nothing is missing but what is still on its way."""
        group_of, held, name = self.world.history.group_of, self.holdings.groups, self.worker.name
        for (stage, variable), state in self.states.items():
            kept = self.holdings.frozen
            pending = self.holdings.pending((stage, variable))
            here = counts_of(state.rows())
            if kept or not all(group_of[row] in held for row in here):
                astray = [row for row in here if group_of[row] not in held and group_of[row] not in kept]
                assert not astray, f"{name} has {astray}, which it neither holds nor keeps for others"
                here = {row: count for row, count in here.items() if group_of[row] in held}
            wanted = {row: count for row, count in expected.items() if row[0] == stage and group_of[row] in held}
            wrong = [row for row, count in here.items() if wanted.get(row) != count]
            # A read that broke may have left something older, which nobody sees before the rest has come.
            wrong = [row for row in wrong if not self.holdings.is_missing((stage, variable), self.keys([row]))]
            assert not wrong, f"{name} holds {here} instead of {wanted}"
            missing = [row for row in wanted if row not in here and group_of[row] not in pending]
            assert not missing, f"{name} lacks {missing}"
