"""Messages by bytes: none is larger than the limit, and answers are the same as in one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight

from anabranch.core import requests
from anabranch.core.errors import WorkerError
from anabranch.core.ids import Epoch, Generation, Run, RunId
from anabranch.core.requests import Expiry
from anabranch.core.schemas import INDEX
from anabranch.wire import frames
from anabranch.wire.routed import Answers, RoutedState, Routing, StageAccess
from anabranch.worker.state.variable_state import VariableState
from support.keyed_state import KEY_GROUPS, KEYS, SPEC, STAGE, Entries, changes_to, entries, keys_table
from support.state_workers import CREDENTIALS, JOB, Driver, MakeDriver, Service, attempt_of, fell_back, making, owned_by

#: What a message has beside the rows: its header, the schema of each table, and the padding of each column.
ROOM_BYTES = 6_000
EVEN = frozenset(range(0, KEY_GROUPS, 2))
steady = settings(deadline=None, derandomize=True, max_examples=12)


class Sizes:
    """Records the messages that services get and give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        do_action, scan = Service.do_action, Service._scan

        def recorded_action(service: Service, context: Any, action: flight.Action) -> Iterator[flight.Result]:
            self.note(f"{action.type} asked", action.body.size)
            for result in do_action(service, context, action):
                self.note(f"{action.type} answered", result.body.size)
                yield result

        def recorded_scan(service: Service, ticket: bytes) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
            schema, batches = scan(service, ticket)
            return schema, self.noted(batches)

        monkeypatch.setattr(Service, "do_action", recorded_action)
        monkeypatch.setattr(Service, "_scan", recorded_scan)

    def note(self, kind: str, size: int) -> None:
        self.largest[kind] = max(self.largest[kind], size)
        self.count[kind] += 1

    def noted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.note("stream", batch.nbytes)
            yield batch

    def clear(self) -> None:
        self.largest.clear()
        self.count.clear()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    return Sizes(monkeypatch)


@contextmanager
def limit(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "MESSAGE_BYTES", size)
        yield


def state_of(driver: Driver, attempt: int = 0) -> RoutedState:
    """The state as a task sees it that has all key groups."""
    names = list(driver.workers)
    owners = np.array([names.index(owner) for owner in driver.owners], dtype=np.int16)
    access = StageAccess(
        job=JOB,
        generation=driver.generation,
        key_groups=KEY_GROUPS,
        stage=SPEC,
        routing=Routing(tuple(names), tuple(worker.address for worker in driver.workers.values()), owners),
        parallelism=1,
        partitions=np.zeros(KEY_GROUPS, dtype=np.int32),
        cache_route=True,
        timeout_s=60.0,
        credentials=CREDENTIALS,
    )
    return access.open(epoch=driver.epoch + 1, run=driver.run, partition=0, attempt=attempt)


def commit(driver: Driver, changes: Mapping[str, Entries | None]) -> None:
    """What one task has written to all workers becomes part of the state."""
    for worker in driver.owning:
        answer = worker.ask(requests.Prepare(**driver.numbers, chosen=frozenset({attempt_of(0)})))
        driver.files += [file for _, file in answer.files]
    for worker in driver.owning:
        worker.ask(requests.Commit(**driver.numbers))
    driver.epoch = Epoch(driver.epoch + 1)
    driver.committed_by = RunId(Generation(driver.generation), Run(driver.run))
    driver.model |= changes
    driver.model = {key: value for key, value in driver.model.items() if value is not None}


def large(number: int, size: int = 1000) -> Entries:
    return {"total": number, "items": [f"{number}-{n}-".ljust(size, "x") for n in range(3)], "seen": {"m": number}}


def rows_of(table: pa.Table | None) -> list[dict[str, Any]]:
    return [] if table is None else table.to_pylist()


def content(answers: Answers) -> dict[str, Any]:
    """All that is in an answer, in an order of its own where none is promised."""
    due_keys = [row["k"] for row in rows_of(answers.due_keys)]
    due = {
        name: sorted((due_keys[row.pop(INDEX)], sorted(row.items())) for row in rows_of(table))
        for name, table in answers.due.items()
    }
    return {
        "found": {name: rows_of(table) for name, table in answers.found.items()},
        "rest": {name: sorted(map(str, rows_of(table))) for name, table in answers.rest.items()},
        "expired": {name: sorted(map(str, rows_of(table))) for name, table in answers.expired.items()},
        "due keys": sorted(due_keys),
        "due": due,
    }


EXPIRY = Expiry("total", "n", "", 40)
KINDS: dict[str, dict[str, Any]] = {
    "read": {},
    "rest": {"rest": True},
    "expired": {"expiries": [EXPIRY]},
    "due": {"due": EXPIRY},
    "all": {"rest": True, "expiries": [EXPIRY], "due": EXPIRY},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_in_small_messages_is_the_same(make: MakeDriver, sizes: Sizes, kind: str) -> None:
    driver = make("a", "b")
    driver.run_epoch({key: large(n) for n, key in enumerate(KEYS[:40])})
    driver.give(owned_by("b", EVEN))
    driver.begin()
    asked = [*KEYS[3:20], "nobody"]
    whole = content(state_of(driver).ask(keys_table(asked), **KINDS[kind]))
    assert whole["found"]["items"]
    sizes.clear()
    with limit(10_000):
        assert content(state_of(driver).ask(keys_table(asked), **KINDS[kind])) == whole
    assert max(sizes.largest.values()) <= 10_000 + ROOM_BYTES
    assert sizes.count["read answered"] > sizes.count["read asked"] == 2


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with making(tmp_path_factory.mktemp("bounded")) as make:
        driver = make("a", "b", "c")
        driver.run_epoch({key: large(n, 1 + 97 * n % 701) for n, key in enumerate(KEYS[:40])})
        driver.give({group: "abc"[group % 3] for group in range(KEY_GROUPS)})
        driver.begin()
        yield driver


@given(
    size=st.integers(1, 4000),
    asked=st.lists(st.sampled_from([*KEYS, "nobody", "no one"]), unique=True, max_size=50),
    kind=st.sampled_from(list(KINDS)),
)
@steady
def test_any_limit_gives_the_same_answer(driver: Driver, size: int, asked: list[str], kind: str) -> None:
    """Keys of equal hash, keys that do not exist, no keys at all, and rows that are larger than the limit."""
    whole = content(state_of(driver).ask(keys_table(asked), **KINDS[kind]))
    with limit(size):
        assert content(state_of(driver).ask(keys_table(asked), **KINDS[kind])) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_too_many_for_a_message_are_asked_for_in_several(
    make: MakeDriver, sizes: Sizes, kind: str
) -> None:
    driver = make("a", "b")
    driver.run_epoch({key: large(n) for n, key in enumerate(KEYS[:40])})
    driver.give(owned_by("b", EVEN))
    driver.begin()
    asked = [*KEYS[3:20], *(f"{'nobody' * 200}-{n}" for n in range(80))]
    whole = content(state_of(driver).ask(keys_table(asked), **KINDS[kind]))
    sizes.clear()
    with limit(10_000):
        assert content(state_of(driver).ask(keys_table(asked), **KINDS[kind])) == whole
    assert sizes.count["read asked"] > 8
    assert sizes.largest["read asked"] <= 10_000 + ROOM_BYTES


def test_changes_in_small_messages_are_the_same(make: MakeDriver, sizes: Sizes) -> None:
    driver = make("a", "b")
    driver.give(owned_by("b", EVEN))
    changes = {key: large(n) if n % 3 else None for n, key in enumerate(KEYS)}
    sizes.clear()
    with limit(10_000):
        driver.begin()
        state_of(driver).write(changes_to(changes))
    assert sizes.largest["write asked"] <= 10_000 + ROOM_BYTES
    assert sizes.count["write asked"] > 10
    commit(driver, changes)
    assert driver.scan_all() == driver.model


def test_a_small_task_needs_one_read_and_one_write_of_each_worker(make: MakeDriver, sizes: Sizes) -> None:
    driver = make("a", "b")
    driver.give(owned_by("b", EVEN))
    driver.begin()
    sizes.clear()
    state = state_of(driver)
    state.ask(keys_table(KEYS), **KINDS["all"])
    state.write(changes_to({key: entries(n) for n, key in enumerate(KEYS)}))
    asked = {kind: sizes.count[kind] for kind in sizes.count if kind.startswith(("read", "write"))}
    assert asked == {"read asked": 2, "read answered": 2, "write asked": 2, "write answered": 2}


@pytest.mark.parametrize("by", ["fetch", "due", "drain"])
def test_state_moves_in_small_messages(
    make: MakeDriver, sizes: Sizes, store: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b", store=store)
    for epoch in range(3):  # so often the same keys: those are brought first
        driver.run_epoch({key: large(n + epoch) for n, key in enumerate(KEYS)})
    with limit(10_000):
        driver.drain = by == "drain"
        sizes.clear()
        driver.give("b")
        driver.begin()
        if by == "fetch":
            assert driver.read(KEYS) == driver.model
            assert sizes.count["fetch_keys answered"] > sizes.count["fetch_keys asked"]
        elif by == "due":
            found = content(state_of(driver).ask(keys_table([]), due=Expiry("total", "n", "", 1000)))
            assert found["due keys"] == sorted(driver.model)
        driver.finish()
        if by == "drain":
            driver.wait_until_all_has_arrived()
        assert driver.scan_all() == driver.model
    assert max(sizes.largest.values()) <= 10_000 + ROOM_BYTES
    assert sizes.count["stream"] > 30
    assert not fell_back(caplog)


def test_keys_that_are_too_many_for_a_message_are_fetched_in_several(make: MakeDriver, sizes: Sizes) -> None:
    driver = make("a", "b")
    with driver.without_drain_from("a"), limit(200):
        driver.give("b")
        driver.begin()
        sizes.clear()
        assert driver.read(KEYS) == driver.model
    assert sizes.count["fetch_keys asked"] > 10
    assert sizes.largest["fetch_keys asked"] <= 200 + ROOM_BYTES


def test_a_large_key_of_many_entries_is_fetched_without_being_there_for_each_of_them_at_once(
    make: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make("a", "b")
    keys = {f"{'k' * 3_000}-{n}": 7 * n for n in range(9)}
    changes: dict[str, Entries | None] = {
        key: {"total": n, "items": [f"{i}" for i in range(n)], "seen": {}} for key, n in keys.items()
    }
    driver.begin()
    state_of(driver).write(changes_to(changes))
    commit(driver, changes)
    loaded: list[int] = []
    load = VariableState.load

    def noting(state: VariableState, table: pa.Table) -> None:
        loaded.append(table.nbytes)
        load(state, table)

    monkeypatch.setattr(VariableState, "load", noting)
    with driver.without_drain_from("a"), limit(10_000):
        driver.give("b")
        driver.begin()
        assert driver.read([*keys, "nobody"]) == {key: driver.model[key] for key in keys}
    assert sum(loaded) > 3_000 * sum(keys.values())
    assert max(loaded) < 10_000 + ROOM_BYTES


def test_a_row_that_is_larger_than_a_message_travels_alone(make: MakeDriver, sizes: Sizes) -> None:
    driver = make("a", "b")
    changes: dict[str, Entries | None] = {key: large(n, 3000) for n, key in enumerate(KEYS[:9])}
    sizes.clear()
    with limit(1_000):
        driver.begin()
        state_of(driver).write(changes_to(changes))
        commit(driver, changes)
        driver.give("b")
        driver.begin()
        assert driver.read(KEYS) == driver.model
        assert driver.scan_all() == driver.model
    assert max(sizes.largest.values()) <= 3_000 + ROOM_BYTES


def test_large_values_travel_in_messages_of_the_usual_size(make: MakeDriver, sizes: Sizes) -> None:
    """Values of a megabyte, 150 of them: together several times what a message has."""
    driver = make("a", "b")
    text = "x" * 1_000_000
    keys = [f"large-{n}" for n in range(150)]
    changes: dict[str, Entries | None] = {
        key: {"total": n, "items": [f"{n}-{text}"], "seen": {}} for n, key in enumerate(keys)
    }
    driver.begin()
    state_of(driver).write(changes_to(changes))
    commit(driver, changes)
    driver.give("b")
    driver.begin()
    answers = state_of(driver).ask(keys_table(keys), rest=True, due=Expiry("total", "n", "", 1000))
    assert [len(item) for item in answers.found["items"].column("item").to_pylist()] == [
        len(text) + len(f"{n}-") for n in range(150)
    ]
    driver.finish()
    assert len(driver.scan("b")) == len(driver.model)
    assert max(sizes.largest.values()) <= frames.MESSAGE_BYTES + ROOM_BYTES
    assert sizes.largest["write asked"] > frames.MESSAGE_BYTES // 4, "messages are not small either"
    assert sizes.count["write asked"] < 20


def test_a_message_beyond_all_limits_is_refused(make: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make("a")
    driver.begin()
    changes = changes_to({"key": large(1, 20_000)})
    monkeypatch.setattr(frames, "MESSAGE_BYTES_MAX", 30_000)
    request = requests.Write(**driver.numbers, stage=STAGE, partition=0, attempt=0, chunk=0, last=True)
    with pytest.raises(WorkerError, match=r"would have \d+ bytes.*keep less under one key"):
        driver.workers["a"].client.exchange(request, changes)
    # So does a worker that gets one from somebody who does not look.
    action = flight.Action("write", pa.py_buffer(b"ANB1".ljust(30_001, b"\0")))
    client = driver.workers["a"].client
    with pytest.raises(flight.FlightServerError, match="would have 30001 bytes"):
        list(client._flight.do_action(action, client._options(60)))
    # A row that is too large is no part of the epoch; what is left goes on.
    driver.finish()


def test_an_error_in_the_middle_of_an_answer_arrives_as_what_it_is(
    make: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make("a")
    driver.run_epoch({key: large(n) for n, key in enumerate(KEYS)})
    driver.begin()
    scan = VariableState.scan

    def failing(state: VariableState, *arguments: Any, **named: Any) -> Iterator[pa.RecordBatch]:
        yield from scan(state, *arguments, **named)
        raise WorkerError("The disk is gone.")

    monkeypatch.setattr(VariableState, "scan", failing)
    with limit(1_000), pytest.raises(WorkerError, match=r"^The disk is gone\.$"):
        state_of(driver).ask(keys_table([]), rest=True)
