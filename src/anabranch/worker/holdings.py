"""What a worker holds of a job: its key groups, and which of them are still on their way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np

from anabranch.core.errors import AnabranchError, WorkerError
from anabranch.core.keygroups import key_groups_of
from anabranch.worker.adoption import Adoption
from anabranch.worker.layers import VariableState
from anabranch.worker.origins import Hashes, Origin

logger = logging.getLogger(__name__)

Variable = tuple[int, str]
#: Makes the origin of a variable's state, for some key groups.
MakeOrigin = Callable[[Variable, Collection[int]], Origin]

#: Key groups that the drain brings at a time: readers of unfetched keys wait for no longer than this takes.
_GROUPS_PER_STEP = 16
#: After each step the drain rests as many times as long as the step took, so that epochs come first.
_REST = 1.0
_REST_MIN_S = 0.002
#: How long the drain waits before it tries again after a failure.
_RETRY_S = 1.0


class Holdings:
    """The key groups of one job on one worker. The drain runs in a thread of its own, from assign to its end."""

    def __init__(self, states: Mapping[Variable, VariableState], key_groups: int) -> None:
        self._states = states
        self._key_groups = key_groups
        self._lock = threading.Lock()
        self._groups: frozenset[int] = frozenset()
        #: The same, by key group.
        self._held = np.zeros(key_groups, dtype=np.bool_)
        self._adoptions: dict[Variable, list[Adoption]] = {}
        #: Rows that adoptions brought which are over: on demand, and by the drain.
        self._brought = 0, 0
        self._stop = threading.Event()
        self._drain: threading.Thread | None = None

    @property
    def groups(self) -> frozenset[int]:
        return self._groups

    def assign(self, groups: Collection[int], make_origin: MakeOrigin) -> tuple[frozenset[int], frozenset[int]]:
        """Hold exactly these key groups: drop others, and adopt those that are not here. Both are returned."""
        with self._lock:
            wanted = frozenset(groups)
            dropped, adopted = self._groups - wanted, wanted - self._groups
            if dropped:
                self._drop(dropped)
            for variable, adoptions in self._adoptions.items():
                # Their files may be cleaned up from now on; those that the driver names are kept for us.
                for adoption in adoptions:
                    adoption.redirect(make_origin(variable, adoption.pending))
            if adopted:
                for variable, state in self._states.items():
                    adoption = Adoption(state, make_origin(variable, adopted), adopted, self._key_groups)
                    self._adoptions.setdefault(variable, []).append(adoption)
            self._groups = wanted
            held = np.zeros(self._key_groups, dtype=np.bool_)
            held[list(wanted)] = True
            self._held = held
            self._start_drain()
        return adopted, dropped

    def fetch(self, variable: Variable, hashes: Hashes) -> None:
        """Make sure that the state of these keys is here. Keys of others are refused: they would seem not to exist."""
        strange = hashes[~self._held[key_groups_of(hashes, self._key_groups)]]
        if len(strange):
            group = int(key_groups_of(strange[:1], self._key_groups)[0])
            raise WorkerError(f"Key group {group} is not held by this worker. The task has an old route: run it again.")
        for adoption in self._adoptions.get(variable, ()):
            adoption.fetch(hashes)

    def complete(self, variable: Variable, groups: Collection[int] | None = None) -> None:
        """Make sure that these key groups (None: all) are here as a whole."""
        if groups is not None and not self._held[list(groups)].all():
            raise WorkerError("Some key groups are not held by this worker. The task has an old route: run it again.")
        for adoption in self._adoptions.get(variable, ()):
            adoption.drain(adoption.pending if groups is None else groups)

    def pending(self, variable: Variable) -> frozenset[int]:
        """The key groups of which some state may not have arrived."""
        return frozenset(group for adoption in self._adoptions.get(variable, ()) for group in adoption.pending)

    def progress(self) -> dict[str, int]:
        """How far the adoptions are, and how many rows they have brought: on demand, and by the drain."""
        with self._lock:
            adoptions = self._all()
            fetched, drained = self._brought
        return {
            "pendingGroups": len({group for adoption in adoptions for group in adoption.pending}),
            "fetchedRows": fetched + sum(adoption.fetched_rows for adoption in adoptions),
            "drainedRows": drained + sum(adoption.drained_rows for adoption in adoptions),
        }

    def close(self) -> None:
        """End the drain. What is pending stays so."""
        self._stop.set()
        if self._drain is not None:
            self._drain.join()

    def _drop(self, groups: frozenset[int]) -> None:
        for adoption in self._all():
            adoption.forget(groups)
        for state in self._states.values():
            state.drop_groups(groups)

    def _all(self) -> list[Adoption]:
        return [adoption for of_variable in self._adoptions.values() for adoption in of_variable]

    def _start_drain(self) -> None:
        if self._drain is not None and self._drain.is_alive():
            return
        if any(adoption.pending for adoption in self._all()):
            self._drain = threading.Thread(target=self._run_drain, name="drain", daemon=True)
            self._drain.start()

    def _run_drain(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._let_go()
                unfinished = self._all()
                if not unfinished:
                    self._drain = None
                    return
            self._step(unfinished[0])

    def _let_go(self) -> None:
        """Of adoptions that are over, and of what they keep of their origin."""
        over = [adoption for adoption in self._all() if not adoption.pending]
        fetched, drained = self._brought
        self._brought = fetched + sum(a.fetched_rows for a in over), drained + sum(a.drained_rows for a in over)
        for variable, adoptions in self._adoptions.items():
            self._adoptions[variable] = [adoption for adoption in adoptions if adoption not in over]

    def _step(self, adoption: Adoption) -> None:
        started = time.monotonic()
        try:
            adoption.drain(adoption.pending[:_GROUPS_PER_STEP])
        except AnabranchError as error:
            # Whoever needs the state meets the same error and reports it; it may be over by the next try.
            logger.warning("state cannot be brought yet: %s", error)
            self._stop.wait(_RETRY_S)
            return
        self._stop.wait(max(_REST_MIN_S, _REST * (time.monotonic() - started)))
