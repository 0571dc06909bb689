"""Keys and values of every type that state may have, on their way from one real worker to another."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.core import requests
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import INDEX, Op, StageSpec, VariableKind, VariableSpec
from anabranch.wire import messages
from support.keyed_state import KEY_GROUPS, STAGE, Entries
from support.state_workers import Driver, Worker, fell_back, owned_by, start, wait_until

EVEN = frozenset(range(0, KEY_GROUPS, 2))
COUNT = 64
AT = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)
WINDOW = pa.struct([("start", pa.timestamp("us", tz="UTC")), ("end", pa.timestamp("us", tz="UTC"))])


def at(n: int) -> dt.datetime:
    return AT + dt.timedelta(minutes=n)


#: For each type, the key with a number; None is a key, too.
KEYS: dict[str, tuple[pa.DataType, Any]] = {
    "boolean": (pa.bool_(), lambda n: n == 1),
    "byte": (pa.int8(), lambda n: n - 32),
    "long": (pa.int64(), lambda n: n << 40),
    "float": (pa.float32(), lambda n: n / 4),
    "double": (pa.float64(), lambda n: n / 3),
    "decimal": (pa.decimal128(38, 9), lambda n: decimal.Decimal(n) / 1000),
    "string": (pa.string(), lambda n: "ä" * n),
    "binary": (pa.binary(), lambda n: b"\0" * n),
    "date": (pa.date32(), lambda n: at(n * 1440).date()),
    "timestamp": (pa.timestamp("us", tz="UTC"), at),
    "timestamp without zone": (pa.timestamp("us"), lambda n: at(n).replace(tzinfo=None)),
    "window": (WINDOW, lambda n: {"start": at(n), "end": at(n + 1)}),
    "struct": (
        pa.struct([("a", pa.string()), ("b", pa.struct([("c", pa.decimal128(10, 2))]))]),
        lambda n: {"a": None if n % 5 else str(n), "b": {"c": decimal.Decimal(n)}},
    ),
    "array": (pa.list_(pa.int32()), lambda n: [n] * (n % 7) + [n]),
    "array of structs": (pa.list_(WINDOW), lambda n: [{"start": at(n), "end": None}] * 2),
}
#: What a value may be besides.
VALUES = {
    "map": (pa.map_(pa.string(), pa.list_(WINDOW)), lambda n: [(str(n), [{"start": at(n), "end": at(n)}])]),
    "interval": (pa.duration("us"), lambda n: dt.timedelta(minutes=n)),
    "nothing": (pa.null(), lambda _: None),
}


class TypedDriver(Driver):
    """A driver of a job with one stage whose key, map key and values are of one type."""

    spec: StageSpec
    keys: list[Any]
    value: Any

    def open(self, worker: Worker) -> None:
        worker.ask(
            requests.OpenJob(
                **self.job,
                key_groups=KEY_GROUPS,
                committed_epoch=self.epoch,
                committed_by=self.committed_by,
                stages=(self.spec,),
                checkpoint=self.checkpoint,
            )
        )

    def key_rows(self, worker: Worker) -> list[int]:
        return [n for n in range(len(self.keys)) if self.owners[n % KEY_GROUPS] == worker.name]

    def write_to(self, worker: Worker, changes: Mapping[str, Entries | None], partition: int = 0) -> None:
        assert not changes
        self.write_tables(worker, {}, partition)

    def write_tables(self, worker: Worker, changes: Mapping[str, pa.Table], partition: int) -> None:
        numbers = {"partition": partition, "attempt": 0, "chunk": 0, "last": True}
        worker.client.exchange(requests.Write(**self.numbers, stage=STAGE, **numbers), changes)

    def epoch_of(self, number: int) -> None:
        """An epoch that sets the entries of every key."""
        self.begin()
        for partition, worker in enumerate(self.owning):
            mine = self.key_rows(worker)
            # Two hashes for each key group, so that keys share them.
            columns = [pa.array([n % (2 * KEY_GROUPS) for n in mine], pa.int64()), [Op.PUT] * len(mine)]
            columns += [self.column(mine)]
            values = pa.array([self.value(n + number) for n in mine], self.value_type)
            changes = {
                "one": pa.table([*columns, values], schema=self.spec.layouts["one"].changes),
                "many": pa.table([*columns, self.column(mine), values], schema=self.spec.layouts["many"].changes),
            }
            self.write_tables(worker, changes, partition)
        self.commit()

    def column(self, numbers: list[int]) -> pa.Array:
        return pa.array([self.keys[n] for n in numbers], self.spec.key.field(0).type)

    @property
    def value_type(self) -> pa.DataType:
        return self.spec.variables[0].value.field(0).type

    def found(self) -> dict[int, list[Any]]:
        """By key, its value and its entry, as its owner has them."""
        found: dict[int, list[Any]] = {}
        for worker in self.owning:
            mine = self.key_rows(worker)
            hashes = pa.array([n % (2 * KEY_GROUPS) for n in mine], pa.int64())
            keys = pa.table([hashes, self.column(mine)], schema=self.spec.layouts["one"].keys)
            request = requests.Read(**self.numbers, stage=STAGE, groups=())
            tables = worker.client.exchange(request, {messages.KEYS: keys})
            for name in ("one", "many"):
                for row in tables[name].to_pylist():
                    found.setdefault(mine[row.pop(INDEX)], []).append(list(row.values()))
        return found


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[TypedDriver]:
    driver = TypedDriver(str(tmp_path / "checkpoint"))
    for name in "ab":
        driver.add(start(name, "memory", tmp_path))
    yield driver
    driver.close()


@pytest.mark.parametrize("kind", [*KEYS, *VALUES])
def test_state_of_any_type_comes_from_its_former_owner(
    typed: TypedDriver, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    key_type, key = KEYS.get(kind, KEYS["window"])
    value_type, typed.value = VALUES.get(kind) or KEYS[kind]
    typed.keys = [key(n) for n in range(2 if kind == "boolean" else COUNT)] + [None]
    typed.spec = StageSpec(
        StageNumber(STAGE),
        "stage1",
        pa.schema([("k", key_type)]),
        (
            VariableSpec("one", VariableKind.VALUE, pa.schema([("v", value_type)])),
            VariableSpec("many", VariableKind.MAP, pa.schema([("v", value_type)]), pa.schema([("m", key_type)])),
        ),
    )
    typed.give("a", freeze=False)
    for number in range(3):  # the same keys in every epoch: those are brought first
        typed.epoch_of(number)
    typed.begin()
    before = typed.found()
    assert len(before) == len(typed.keys)
    with typed.without_drain_from("a") as former:
        typed.give(owned_by("b", EVEN))
        typed.progress("b")
        wait_until(lambda: former.asked["recent"] == 2 or fell_back(caplog))
        typed.begin()
        assert typed.found() == before
        typed.finish()
    typed.wait_until_all_has_arrived()
    assert not fell_back(caplog)
    typed.epoch_of(7)
    typed.begin()
    assert len(typed.found()) == len(typed.keys)
