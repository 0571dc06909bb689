"""What must be true of a simulated job at its end: of its sink, its checkpoint, its workers and what they have left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from anabranch.checkpoint import paths
from anabranch.checkpoint.generations import generation_info, latest_generation
from anabranch.checkpoint.manifests import load_route
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import Documents, StateFiles, state_files
from anabranch.core.errors import CheckpointError, EpochError
from anabranch.core.ids import Epoch, Generation
from anabranch.core.schemas import StageSpec
from anabranch.worker.compaction import state_rows
from simulated.faults import BreakStorage
from simulated.job import COUNT, TIMERS, Batch, Model
from simulated.storage import SimStorage

if TYPE_CHECKING:
    from simulated.application import Application
    from simulated.driver import Driver

State = dict[tuple[str, int], tuple[int, ...]]
Sink = dict[int, tuple[tuple[int, int], ...]]
#: In one of so many histories the state as of every epoch that is kept is compared, and not only that of the newest.
_ALL_EPOCHS_EVERY = 4


class Checks:
    """Compares what is there with what the model says."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._history = application.history
        self._plain = application.plain

    def workers(self, driver: Driver) -> None:
        """The workers have the state of the last epoch."""
        assert driver.coordinator is not None
        last = last_committed_epoch(self._plain)
        found: dict[tuple[str, int], list[int]] = {}
        for stage in self._history.kind.stages:
            for variable in stage.layouts:
                epoch, rows = driver.coordinator.scan(stage, variable)
                if epoch != last:
                    # Another driver, which is fenced by now, told Spark to commit after this one had begun.
                    raise EpochError(f"the workers have epoch {epoch}, and Spark has committed {last}")
                _collect(found, variable, rows)
        expected = self.expected(last)[0][last]
        held = _state(found)
        assert held == expected, f"as of epoch {last} the workers have {held}, not {expected}"

    def is_durable(self) -> bool:
        """Whether the last epoch that Spark has committed can be restored."""
        last = last_committed_epoch(self._plain)
        documents = Documents(self._plain)
        return last in documents.epochs and documents.gap_before(last) is None

    def end(self) -> None:
        """Sink and checkpoint have exactly what the log of offsets says, and nothing is left behind."""
        application = self._application
        last = last_committed_epoch(self._plain)
        states, sink = self.expected(last)
        assert application.batch(last).end == self._history.rows, "not every row was processed"
        assert application.sink == sink, f"the sink has {application.sink}, not {sink}"
        documents = Documents(self._plain)
        self._documents(documents)
        if self._history.seed % _ALL_EPOCHS_EVERY == 0:
            for epoch in documents.epochs:
                if epoch > last - self._history.keep_epochs or documents.gap_before(epoch) is None:
                    self._compare(self._plain, documents.state_files(epoch), states[epoch])
        self._compare(self._plain, state_files(self._plain, last), states[last])
        for target, epoch in application.savepoints:
            place = SimStorage(application.disk, target)
            self._compare(place, state_files(place, epoch), states[epoch])
        self._failures()
        self._threads()
        self._rescales()

    def expected(self, last: Epoch) -> tuple[dict[Epoch, State], Sink]:
        """State and sink after every epoch of the log."""
        application = self._application
        model = Model(self._history.seed, self._history.kind)
        states: dict[Epoch, State] = {}
        sink: Sink = {}
        end = 0
        for number in range(last + 1):
            batch = self._batch(Epoch(number))
            assert batch.start == end, f"epoch {number} does not begin where the one before it ended"
            end = batch.end
            rows = model.run(batch)
            if number >= len(application.before):
                sink[number] = rows
            states[Epoch(number)] = model.state
        return states, sink

    def _batch(self, epoch: Epoch) -> Batch:
        before = self._application.before
        return before[epoch] if epoch < len(before) else self._application.batch(epoch)

    def _compare(self, storage: SimStorage, files: StateFiles, expected: State) -> None:
        stored = self.stored(storage, files)
        assert stored == expected, f"as of epoch {files.epoch} {storage.location} has {stored}, not {expected}"

    def stored(self, storage: SimStorage, files: StateFiles) -> State:
        """The state that files hold."""
        found: dict[tuple[str, int], list[int]] = {}
        for stage in self._history.kind.stages:
            for variable in stage.layouts:
                for rows in self._rows(storage, files, stage, variable):
                    _collect(found, variable, rows)
        return _state(found)

    def _rows(self, storage: SimStorage, files: StateFiles, stage: StageSpec, variable: str) -> Iterable[pa.Table]:
        return state_rows(storage, files, stage, variable, key_groups=self._history.key_groups)

    def _documents(self, documents: Documents) -> None:
        """Every manifest has a route that can be loaded, and every driver has said who it was."""
        for epoch in documents.writers:
            load_route(self._plain, documents.manifest(epoch).route_version)
        for number in range(1, latest_generation(self._plain) + 1):
            try:
                info = generation_info(self._plain, Generation(number))
            except CheckpointError:
                # A job that began with a savepoint has no generations before that.
                assert self._application.before, f"generation {number} was never claimed"
                continue
            assert "savepoint" in info or {"host", "pid"} <= info.keys(), f"generation {number} says {info}"

    def _failures(self) -> None:
        """What a driver needs from the checkpoint is there, unless the storage was in trouble."""
        if any(isinstance(fault, BreakStorage) for fault in self._history.faults):
            return
        for driver in self._application.drivers:
            assert not isinstance(driver.failure, CheckpointError), (
                f"a query fails, though storage works: {driver.failure}"
            )

    def _threads(self) -> None:
        """Nobody works on a job that is closed."""
        application = self._application
        for worker in application.workers.values():
            if worker.is_alive and not worker.jobs._jobs:
                going_on = [thread.name for thread in worker.process.threads]
                assert not going_on, f"{worker.name} has closed the job, and goes on with {going_on}"
        for driver in application.drivers:
            if driver.ended and driver.process.alive:
                going_on = [thread.name for thread in driver.process.threads]
                assert not going_on, f"{driver.process.name} has ended, and goes on with {going_on}"

    def _rescales(self) -> None:
        """Whoever asked for a rescale has been told how it ended."""
        for driver in self._application.drivers:
            if driver.ended:
                waiting = [rescale for rescale in driver.rescales if rescale.state in ("waiting", "migrating")]
                assert not waiting, f"{waiting[0].what} never ends"


def _collect(found: dict[tuple[str, int], list[int]], variable: str, rows: pa.Table) -> None:
    for row in rows.to_pylist():
        values = [row["due_ms"]] if variable == TIMERS else [row["n"]]
        if variable == COUNT:
            values.append(row["expires_ms"])
        found.setdefault((variable, row["k"]), []).extend(values)


def _state(found: Mapping[tuple[str, int], list[int]]) -> State:
    return {place: tuple(sorted(values) if place[0] == TIMERS else values) for place, values in found.items()}


def offsets(storage: Any, epoch: Epoch) -> Batch:
    """What Spark has planned as an epoch."""
    return Batch(**storage.read(f"{paths.SPARK_OFFSETS}/{epoch}"))
