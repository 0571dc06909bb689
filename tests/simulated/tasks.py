"""The tasks of a simulated Spark job: the package's own client of the state, and the job's plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from anabranch.core.errors import AnabranchError, EpochError
from anabranch.core.requests import Expiry
from anabranch.core.schemas import INDEX, Op, StageSpec
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import Answers, RoutedState, Routing, StageAccess
from simulated.job import (
    COUNT,
    NOTHING,
    SUM,
    TIMERS,
    Batch,
    Entry,
    counted,
    hash_of,
    is_blind,
    key_of,
    second_key,
    summed,
)
from simulated.network import SimClient
from simulated.world import Process

if TYPE_CHECKING:
    from simulated.application import Application

Told = dict[int, list[int]]


class SimRoutedState(RoutedState):
    """The package's client, with connections of the simulation."""

    def __init__(self, access: StageAccess, application: Application, process: Process, **numbers: int) -> None:
        super().__init__(access, **numbers)
        self._application = application
        self._process = process

    def _client(self, routing: Routing, worker: int) -> Any:
        timeout_s = self._access.timeout_s
        return SimClient(self._application.network, self._process, routing.addresses[worker], timeout_s)

    def _on_each(self, workers: Sequence[int], call: Callable[[int], Any]) -> list[Any]:
        return self._process.gather([lambda worker=worker: call(worker) for worker in workers])


class Executors:
    """Where the tasks of one driver run; they outlive it for a while."""

    def __init__(self, application: Application, process: Process) -> None:
        self.application = application
        self.process = process
        self._attempts = 0

    def open(self, access: StageAccess, epoch: TaskEpoch, partition: int) -> SimRoutedState:
        self._attempts += 1
        numbers = {"epoch": epoch.epoch, "run": epoch.run, "partition": partition, "attempt": self._attempts}
        return SimRoutedState(access, self.application, self.process, **numbers)

    def first_stage(self, access: StageAccess, epoch: TaskEpoch, partition: int, batch: Batch, weight: int) -> Told:
        """Counts the rows of a partition; what stage 1 is told, by its keys."""
        history, kind = self.application.history, self.application.history.kind
        rows: dict[int, int] = {}
        for row in range(batch.start, batch.end):
            key = key_of(row, history.seed)
            if partition == partition_of(access, key):
                rows[key] = rows.get(key, 0) + 1
        blind = {key for key in rows if not kind.timed and is_blind(key, batch)}
        state = self.open(access, epoch, partition)
        now_ms = epoch.processing_time_ms
        asked = sorted(rows.keys() - blind)
        due = Expiry(TIMERS, "due_ms", "", now_ms) if kind.timed else None
        answers = state.ask(keys_table(access.stage, asked), due=due)
        entries = entries_of(answers, asked, kind.timed)
        told: Told = {}
        after: dict[int, Entry] = {}
        for key in sorted({*rows, *entries}):
            after[key], says = counted(entries.get(key, NOTHING), rows.get(key, 0), weight, now_ms, kind)
            if says:
                told.setdefault(second_key(key), []).extend(says)
        self.finish(state, count_changes(access.stage, entries, after))
        return told

    def second_stage(self, access: StageAccess, epoch: TaskEpoch, partition: int, told: Told) -> dict[int, int]:
        """Sums what stage 0 says; all sums of the partition in complete mode, else those that changed."""
        complete = self.application.history.kind.complete
        mine = sorted(key for key in told if partition == partition_of(access, key))
        state = self.open(access, epoch, partition)
        answers = state.ask(keys_table(access.stage, mine), rest=complete)
        before = dict.fromkeys(mine, 0)
        found = answers.found[SUM]
        for index, total in zip(found.column(INDEX).to_pylist(), found.column("n").to_pylist(), strict=True):
            before[mine[index]] = total
        after = {key: summed(before[key], told[key]) for key in mine}
        self.finish(state, {SUM: value_changes(access.stage, SUM, {key: (n,) for key, n in after.items()})})
        if complete:
            rest = answers.rest[SUM]
            after |= dict(zip(rest.column("k").to_pylist(), rest.column("n").to_pylist(), strict=True))
        return after

    def finish(self, state: SimRoutedState, changes: Mapping[str, pa.Table]) -> None:
        application = self.application
        if application.take("tasks_to_skip"):
            return
        if application.take("tasks_to_break"):
            # Its changes are sealed on some of the workers, and then it dies.
            routing = state._routing()
            for worker in state._involved(routing)[:1]:
                state._write_to(routing, worker, dict(changes) if len(state._involved(routing)) == 1 else {}, late=0)
            raise EpochError("a task broke")
        if application.take("tasks_to_repeat"):
            application.world.seen["a task has a speculative copy"] += 1
            copy = SimRoutedState(
                state._access,
                application,
                self.process,
                epoch=state._epoch,
                run=state._run,
                partition=state._partition,
                attempt=state._attempt + 1000,
            )
            self.process.start(lambda: suppressed(copy.write, changes), name="copy")
        state.write(changes)


def suppressed(call: Callable[..., Any], *arguments: Any) -> None:
    """A task of which nobody waits for the end."""
    try:
        call(*arguments)
    except AnabranchError:
        return


def partition_of(access: StageAccess, key: int) -> int:
    group = hash_of(access.stage.number, key) % access.key_groups
    return int(access.partitions[group])


def keys_table(stage: StageSpec, keys: Sequence[int]) -> pa.Table:
    layout = next(iter(stage.layouts.values()))
    hashes = [hash_of(stage.number, key) for key in keys]
    return pa.table([pa.array(hashes, pa.int64()), pa.array(keys, pa.int64())], schema=layout.keys)


def entries_of(answers: Answers, asked: Sequence[int], timed: bool) -> dict[int, Entry]:
    """What is remembered of keys, of those that were asked for and of those that are due."""
    found: dict[int, Entry] = {}
    parts = [(asked, answers.found)]
    if answers.due_keys is not None:
        parts.append((answers.due_keys.column("k").to_pylist(), answers.due))
    for keys, tables in parts:
        counts: dict[int, tuple[int, int]] = {}
        timers: dict[int, list[int]] = {}
        table = tables[COUNT]
        expiries = table.column("expires_ms").to_pylist()
        for index, n, expires in zip(
            table.column(INDEX).to_pylist(), table.column("n").to_pylist(), expiries, strict=True
        ):
            counts[keys[index]] = n, expires
        if timed:
            table = tables[TIMERS]
            for index, due in zip(table.column(INDEX).to_pylist(), table.column("due_ms").to_pylist(), strict=True):
                timers.setdefault(keys[index], []).append(due)
        for key in {*counts, *timers}:
            count, expires = counts.get(key, (0, 0))
            found[key] = Entry(count, expires, tuple(sorted(timers.get(key, ()))))
    return found


def count_changes(stage: StageSpec, before: Mapping[int, Entry], after: Mapping[int, Entry]) -> dict[str, pa.Table]:
    values = {key: (entry.count, entry.expires_ms) if entry.count else None for key, entry in after.items()}
    changes = {COUNT: value_changes(stage, COUNT, values)}
    if TIMERS in stage.layouts:
        rows: list[tuple[int, int, int]] = []
        for key, entry in after.items():
            old = before.get(key, NOTHING).timers
            rows += [(key, Op.DELETE, timer) for timer in old if timer not in entry.timers]
            rows += [(key, Op.PUT, timer) for timer in entry.timers if timer not in old]
        changes[TIMERS] = pa.table(
            [
                pa.array([hash_of(stage.number, key) for key, _, _ in rows], pa.int64()),
                pa.array([op for _, op, _ in rows], pa.int8()),
                pa.array([key for key, _, _ in rows], pa.int64()),
                pa.array([timer for _, _, timer in rows], pa.int64()),
            ],
            schema=stage.layouts[TIMERS].changes,
        )
    return changes


def value_changes(stage: StageSpec, variable: str, values: Mapping[int, tuple[int, ...] | None]) -> pa.Table:
    """Sets the values of keys, and deletes those of keys without any."""
    layout = stage.layouts[variable]
    keys = list(values)
    columns = [
        pa.array([hash_of(stage.number, key) for key in keys], pa.int64()),
        pa.array([Op.DELETE if values[key] is None else Op.PUT for key in keys], pa.int8()),
        pa.array(keys, pa.int64()),
    ]
    columns += [
        pa.array([value and value[position] for value in values.values()], pa.int64())
        for position in range(len(layout.value))
    ]
    return pa.table(columns, schema=layout.changes)
