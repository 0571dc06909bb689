"""A task's state over several workers: every key reaches its owner, answers come back in order, every owner hears."""

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.answers import RouteTable
from anabranch.core.errors import LostWorkerError
from anabranch.core.ids import Generation, JobId, StageNumber
from anabranch.core.requests import Expiry, LookUpRoute, Read, Write
from anabranch.core.schemas import HASH, INDEX, OP, Op, StageSpec, VariableKind, VariableSpec
from anabranch.wire import frames, routed
from anabranch.wire.credentials import Credentials
from anabranch.wire.messages import DUE, EXPIRED, FURTHER_ROWS, KEYS, REST
from anabranch.wire.routed import RoutedState, Routing, StageAccess

SPEC = StageSpec(
    StageNumber(1),
    "stage1",
    pa.schema([("k", pa.int64())]),
    (
        VariableSpec("total", VariableKind.VALUE, pa.schema([("n", pa.int64())])),
        VariableSpec("items", VariableKind.LIST, pa.schema([("item", pa.string())])),
    ),
)
KEY_GROUPS = 12
#: Of a key with its hash.
KEY_BYTES = 16
steady = settings(deadline=None, derandomize=True, max_examples=60)


class Workers:
    """Stands for all workers and the connections to them. Key k has the total 10 k, and k mod 3 items."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self.reads: list[tuple[str, Read]] = []
        #: By worker, what it was told of rows beyond one for each key: by key group.
        self.further: dict[str, dict[int, int]] = defaultdict(dict)
        self.writes: dict[str, list[tuple[Write, dict[str, pa.Table]]]] = defaultdict(list)
        #: Who was asked for the route, in this order.
        self.route_questions: list[str] = []
        #: Workers that do not answer that.
        self.silent: set[str] = set()

    def get(self, address: str, *, timeout_s: float, credentials: Credentials) -> Any:
        assert (timeout_s, credentials) == (9.0, Credentials("secret"))
        workers = self

        class Client:
            def call(self, request: LookUpRoute) -> RouteTable:  # noqa: ARG002
                return workers.route(address)

            def exchange(self, request: Any, tables: Any) -> Any:
                return workers.answer(address, request, tables)

        return Client()

    def route(self, address: str) -> RouteTable:
        self.route_questions.append(address)
        if address in self.silent:
            raise LostWorkerError(f"{address} does not answer.")
        return self.routing.to_table()

    def answer(self, address: str, request: Any, tables: Any) -> dict[str, pa.Table]:
        if isinstance(request, Write):
            self.writes[address].append((request, tables))
            return {}
        assert isinstance(request, Read)
        self.reads.append((address, request))
        if FURTHER_ROWS in tables:
            assert address not in self.further, "told once"
            self.further[address] = dict(zip(*tables[FURTHER_ROWS].to_pydict().values(), strict=True))
        return self.read(address, request, tables[KEYS])

    def read(self, address: str, request: Read, keys: pa.Table) -> dict[str, pa.Table]:
        self.check_owned(address, keys)
        asked = keys.column("k").to_pylist()
        totals = [(i, 10 * k) for i, k in enumerate(asked) if k >= 0]
        items = [(i, j, f"{k}.{j}") for i, k in enumerate(asked) if k >= 0 for j in range(k % 3)]
        answers = {
            "total": table(totals, SPEC.layouts["total"].answers),
            "items": table(items, SPEC.layouts["items"].answers),
        }
        first, last = request.hashes or (-(2**63), 2**63 - 1)
        assert all(first <= k <= last for k in asked), "the keys of a range come with it"
        if request.rest:
            rest = [(g, g, 0) for g in request.groups if first <= g <= last]
            answers[REST + "total"] = table(rest, SPEC.layouts["total"].rows)
        if request.expired:
            answers[EXPIRED + "total"] = table([(g, -g, 0) for g in request.groups], SPEC.layouts["total"].rows)
        if request.due is not None:
            # Of each group two keys.
            due = [k for g in request.groups for k in (g - KEY_GROUPS, g + KEY_GROUPS * 100) if first <= k <= last]
            answers[DUE] = keys_of(due)
            answers[DUE + "total"] = table([(i, 10 * k) for i, k in enumerate(due)], SPEC.layouts["total"].answers)
            answers[DUE + "items"] = table([], SPEC.layouts["items"].answers)
        return answers

    def check_owned(self, address: str, rows: pa.Table) -> None:
        owners = self.routing.owners[rows.column(HASH).to_numpy() % KEY_GROUPS]
        assert {self.routing.addresses[owner] for owner in owners} <= {address}


def table(rows: list[Any], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array([row[i] for row in rows], field.type) for i, field in enumerate(schema)], schema=schema)


def routing_of(owners: list[int]) -> Routing:
    return Routing(("w0", "w1", "w2"), ("a:0", "a:1", "a:2"), np.array(owners, dtype=np.int16))


def access_to(routing: Routing, partitions: list[int], *, cache_route: bool = True) -> StageAccess:
    return StageAccess(
        job=JobId("0" * 32),
        generation=Generation(4),
        key_groups=KEY_GROUPS,
        stage=SPEC,
        routing=routing,
        parallelism=max(partitions) + 1,
        partitions=np.array(partitions, dtype=np.int32),
        cache_route=cache_route,
        timeout_s=9.0,
        credentials=Credentials("secret"),
    )


def state_at(access: StageAccess, attempt: int = 1) -> RoutedState:
    return access.open(epoch=7, run=2, partition=0, attempt=attempt)


def keys_of(numbers: list[int]) -> pa.Table:
    """Keys whose hash is the key itself: its key group is the key modulo their number."""
    return table([(k, k) for k in numbers], SPEC.layouts["total"].keys)


OWNERS = st.lists(st.integers(0, 2), min_size=KEY_GROUPS, max_size=KEY_GROUPS)
NUMBERS = st.lists(st.integers(-50, 500), unique=True, max_size=40)


@pytest.mark.parametrize("most_keys", [1, 4, 1_000_000])
def test_answers_are_those_of_the_keys_in_their_order(monkeypatch: pytest.MonkeyPatch, most_keys: int) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", most_keys * KEY_BYTES)

    @steady
    @given(OWNERS, NUMBERS, st.booleans())
    def check(owners: list[int], numbers: list[int], and_others: bool) -> None:
        workers = Workers(routing_of(owners))
        monkeypatch.setattr(routed, "connections", workers)
        state = state_at(access_to(workers.routing, [0] * KEY_GROUPS))
        found = state.ask(keys_of(numbers), rest=and_others).found
        totals = [(i, 10 * k) for i, k in enumerate(numbers) if k >= 0]
        assert list(zip(*found["total"].to_pydict().values(), strict=True)) == totals
        items = [(i, j, f"{k}.{j}") for i, k in enumerate(numbers) if k >= 0 for j in range(k % 3)]
        assert list(zip(*found["items"].to_pydict().values(), strict=True)) == items
        assert found["total"].schema.field(INDEX).type == pa.int32()
        assert all((r.epoch, r.run, r.generation, r.stage) == (7, 2, 4, 1) for _, r in workers.reads)
        assert and_others or not any(r.groups or r.hashes for _, r in workers.reads)

    check()


@pytest.mark.parametrize("limit_bytes", [1, 100, 1_000_000])
def test_changes_reach_their_owners_and_every_owner_is_sealed(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", limit_bytes)

    @steady
    @given(OWNERS, NUMBERS, NUMBERS)
    def check(owners: list[int], totals: list[int], items: list[int]) -> None:
        workers = Workers(routing_of(owners))
        monkeypatch.setattr(routed, "connections", workers)
        changes = {
            "total": table([(k, Op.PUT, k, 1) for k in totals], SPEC.layouts["total"].changes),
            "items": table([(k, Op.CLEAR, k, None, None) for k in items], SPEC.layouts["items"].changes),
        }
        state_at(access_to(workers.routing, [0] * KEY_GROUPS), attempt=5).write(changes)
        assert sorted(workers.writes) == sorted({f"a:{owner}" for owner in owners})
        sent: dict[str, list[int]] = {"total": [], "items": []}
        for address, messages in workers.writes.items():
            assert [request.chunk for request, _ in messages] == list(range(len(messages)))
            assert [request.last for request, _ in messages] == [False] * (len(messages) - 1) + [True]
            for request, tables in messages:
                assert (request.partition, request.attempt, request.epoch, request.run) == (0, 5, 7, 2)
                assert sum(map(len, tables.values())) <= 1 or sum(t.nbytes for t in tables.values()) <= limit_bytes
                for name, rows in tables.items():
                    workers.check_owned(address, rows)
                    assert rows.schema.field(OP).type == pa.int8()
                    sent[name] += rows.column("k").to_pylist()
        assert {name: sorted(found) for name, found in sent.items()} == {
            "total": sorted(totals),
            "items": sorted(items),
        }

    check()


def test_owners_are_told_of_rows_beyond_one_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", 1)
    workers = Workers(routing_of([0, 1, 2] * 4))
    monkeypatch.setattr(routed, "connections", workers)
    state = state_at(access_to(workers.routing, [0] * KEY_GROUPS))
    # Key 1 has a thousand rows, key 13 of the same key group one, key 2 three, key 3 one.
    state.note_rows([np.array([1] * 600 + [13, 2]), np.array([1] * 400 + [2, 2, 3])])
    state.read(keys_of([1, 2, 3, 13]))
    assert workers.further == {"a:0": {}, "a:1": {1: 999}, "a:2": {2: 2}}
    state.read(keys_of([1]))  # nothing is told again
    workers.further.clear()
    state.note_rows([np.array([1, 2, 3])])
    state.read(keys_of([1, 2, 3]))
    assert workers.further == {}, "as many rows as keys say nothing more"


def test_only_owners_of_the_partition_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(routing_of([0, 1, 2] * 4))
    monkeypatch.setattr(routed, "connections", workers)
    partitions = [0 if group % 3 == 1 else 1 for group in range(KEY_GROUPS)]
    state = state_at(access_to(workers.routing, partitions))
    assert state.groups.tolist() == [1, 4, 7, 10]
    state.read(keys_of([1, 4]))
    state.write({})
    assert [address for address, _ in workers.reads] == ["a:1"]
    assert [request.last for request, _ in workers.writes["a:1"]] == [True]
    assert list(workers.writes) == ["a:1"]


def test_the_rest_and_what_is_over_come_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", 2 * KEY_BYTES)
    workers = Workers(routing_of([0, 1] * 6))
    monkeypatch.setattr(routed, "connections", workers)
    state = access_to(workers.routing, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]).open(
        epoch=7, run=2, partition=0, attempt=1
    )
    keys = keys_of([0, 12, 24, 36, 1, 13, 25])
    answers = state.ask(keys, rest=True)
    assert sorted(answers.rest["total"].column("k").to_pylist()) == [0, 1, 2, 3]
    assert len(answers.found["total"]) == 7
    assert answers.expired == {}
    answers = state.ask(keys, expiries=[Expiry("total", "k", "", 5)])
    assert sorted(answers.expired["total"].column("k").to_pylist()) == [-3, -2, -1, 0]
    assert answers.rest == {}
    assert [len(request.expired) for address, request in workers.reads if address == "a:0"][-2:] == [1, 0]
    assert state.ask(keys_of([]), rest=True).rest["total"].num_rows == 4


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_keys_that_are_due_come_in_the_same_exchange(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", most * KEY_BYTES)
    workers = Workers(routing_of([0, 1] * 6))
    monkeypatch.setattr(routed, "connections", workers)
    state = state_at(access_to(workers.routing, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    keys = keys_of([0, 12, 24, 1])
    answers = state.ask(keys, due=Expiry("total", "k", "", 5))
    # Three keys go to one worker, and one to the other. What is due is asked for in ranges, if the keys are too many.
    messages = {1: [3, 1], 2: [2, 1], 3: [1, 1], 100: [1, 1]}[most]
    assert [[address for address, _ in workers.reads].count(address) for address in ("a:0", "a:1")] == messages
    assert answers.due_keys is not None
    names = answers.due_keys.column("k").to_pylist()
    assert sorted(names) == [-12, -11, -10, 1200, 1201, 1202]
    entries = answers.due["total"].to_pylist()
    assert sorted((names[row[INDEX]], row["n"]) for row in entries) == [(k, 10 * k) for k in sorted(names)]
    assert len(answers.found["total"]) == 4
    assert state.ask(keys).due_keys is None


def test_tasks_that_do_not_cache_the_route_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(routing_of([2] * KEY_GROUPS))
    monkeypatch.setattr(routed, "connections", workers)
    stale = routing_of([1] * KEY_GROUPS)
    state = state_at(access_to(stale, [0] * KEY_GROUPS, cache_route=False))
    state.read(keys_of([3]))
    state.write({})
    assert workers.route_questions == ["a:1", "a:1"]
    assert [address for address, _ in workers.reads] == ["a:2"]
    assert list(workers.writes) == ["a:2"]


def test_each_partition_asks_an_owner_of_its_own_key_groups_for_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(routing_of([0, 1, 2] * 4))
    monkeypatch.setattr(routed, "connections", workers)
    access = access_to(workers.routing, [2, 0, 1] * 4, cache_route=False)
    for partition in range(3):
        access.open(epoch=7, run=2, partition=partition, attempt=1).read(keys_of([]))
    assert workers.route_questions == ["a:1", "a:2", "a:0"]
    # Tasks without key groups, of which there may be many, do not all ask the same one either.
    workers.route_questions.clear()
    for partition in range(3, 6):
        access.open(epoch=7, run=2, partition=partition, attempt=1).read(keys_of([]))
    assert sorted(workers.route_questions) == ["a:0", "a:1", "a:2"]


def test_a_task_whose_worker_is_silent_asks_others_for_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(routing_of([2] * KEY_GROUPS))
    monkeypatch.setattr(routed, "connections", workers)
    state = state_at(access_to(routing_of([1] * KEY_GROUPS), [0] * KEY_GROUPS, cache_route=False))
    workers.silent = {"a:1", "a:0"}
    state.read(keys_of([3]))
    assert workers.route_questions == ["a:1", "a:0", "a:2"]
    assert [address for address, _ in workers.reads] == ["a:2"]
    workers.silent.add("a:2")
    with pytest.raises(LostWorkerError, match="a:1"):
        state.write({})


@given(OWNERS)
@steady
def test_a_routing_comes_back_as_it_was(owners: list[int]) -> None:
    routing = routing_of(owners)
    found = Routing.of(routing.to_table())
    assert (found.workers, found.addresses) == (routing.workers, routing.addresses)
    assert found.owners.dtype == np.int16
    assert found.owners.tolist() == owners
