"""Map state in the hands of a processor, over several epochs: what it reads, and what is sent."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, MapType, StringType

from anabranch.core.schemas import Op
from support.process_model import fields, run_epochs
from support.process_script import ITEMS, KEY, OUTPUT, Scripted, run, sent


def test_a_map_lives_from_epoch_to_epoch() -> None:
    state, seen = run(
        {"a": "items exists get has x y get has items exists"},
        {"a": "get keys values x2 drop items"},
        {"a": "items drop gone"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        x2=lambda p: p.map.updateValue(["x"], (2, None)),
        y=lambda p: p.map.updateValue(("y",), (9, "nine")),
        drop=lambda p: p.map.removeKey(("y",)),
        gone=lambda p: p.map.removeKey(("never",)),
        get=lambda p: p.map.getValue(("x",)),
        has=lambda p: (p.map.containsKey(("x",)), p.map.containsKey(("z",))),
        keys=lambda p: sorted(p.map.keys()),
        values=lambda p: sorted(p.map.values()),
        exists=lambda p: p.map.exists(),
        items=ITEMS,
    )
    both = "[(('x',), (1, 'one')), (('y',), (9, 'nine'))]"
    assert seen[0] == [
        "[]",
        "False",
        "None",
        "(False, False)",
        "None",
        "None",
        "Row(a=1, b='one')",
        "(True, False)",
        both,
        "True",
    ]
    assert seen[1][:3] == ["Row(a=1, b='one')", "[('x',), ('y',)]", "[(1, 'one'), (9, 'nine')]"]
    assert seen[1][5] == seen[2][0] == "[(('x',), (2, None))]"
    assert sent(state, "m", 0) == [(Op.PUT, "a", "x", 1, "one"), (Op.PUT, "a", "y", 9, "nine")]
    assert sent(state, "m", 1) == [(Op.PUT, "a", "x", 2, None), (Op.DELETE, "a", "y", None, None)]
    assert sent(state, "m", 2) == []


def test_a_cleared_map_sends_one_change() -> None:
    state, seen = run(
        {"a": "x y", "b": "x"},
        {"a": "y clear exists x items", "b": "drop x", "c": "x clear"},
        {"a": "clear"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        y=lambda p: p.map.updateValue(("y",), (2, "two")),
        drop=lambda p: p.map.removeKey(("x",)),
        clear=lambda p: p.map.clear(),
        exists=lambda p: p.map.exists(),
        items=ITEMS,
    )
    assert seen[1] == ["None", "None", "False", "None", "[(('x',), (1, 'one'))]"]
    clear, *puts = sent(state, "m", 1)
    assert clear == (Op.CLEAR, "a", None, None, None)
    assert sorted(puts) == [(Op.PUT, "a", "x", 1, "one"), (Op.PUT, "b", "x", 1, "one")]
    assert sent(state, "m", 2) == [(Op.CLEAR, "a", None, None, None)]
    assert state.map("m", "a") == []


def test_a_map_may_change_while_it_is_read() -> None:
    def drain(processor: Scripted) -> int:
        for key in processor.map.keys():  # noqa: SIM118
            processor.map.removeKey(key)
        return len(list(processor.map.iterator()))

    state, seen = run(
        {"a": "x y"},
        {"a": "drain"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        y=lambda p: p.map.updateValue((None,), (1, "one")),
        drain=drain,
    )
    assert seen[1] == ["0"]
    assert sorted(sent(state, "m"), key=str) == [(Op.DELETE, "a", "x", None, None), (Op.DELETE, "a", None, None, None)]


@pytest.mark.parametrize(
    ("key", "value"),
    [(None, (1, "x")), (("c",), None), (("c",), (1,)), (("c", "d"), (1, "x")), ((1.5,), (1, "x")), (("c",), ("x", 1))],
)
def test_map_entries_that_do_not_fit_are_refused(key: Any, value: Any) -> None:
    def attempt(processor: Scripted) -> str:
        with pytest.raises(PySparkException, match="State variable m") as caught:
            processor.map.updateValue(key, value)
        return str(caught.value)

    state, _ = run({"a": "attempt"}, attempt=attempt)
    assert state.writes == [{}]


class OddKeys(StatefulProcessor):
    """A map whose keys are floats, lists and structs, and whose values are maps."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        struct = fields(s="string", n="long")
        self.map = handle.getMapState(
            "m", fields(f="double", l=ArrayType(StringType()), s=struct), fields(v=MapType(StringType(), StringType()))
        )

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            odd = (float("nan"), ["a", "b"], {"s": "x", "n": row.n})
            value = self.map.getValue(odd)
            self.map.updateValue(odd, ({} if value is None else value[0] | {str(len(value[0])): "v"},))
        yield Row(id=key[0], seen=repr(sorted(self.map.iterator(), key=repr)))


def test_map_keys_may_be_of_any_type() -> None:
    rows = [{"id": "a", "n": 1}, {"id": "a", "n": 2}, {"id": "a", "n": 1}]
    state, outputs = run_epochs(OddKeys(), [rows, rows], key=KEY, output=OUTPUT)
    assert outputs[1][0]["seen"] == (
        "[((nan, ['a', 'b'], Row(s='x', n=1)), ({'0': 'v', '1': 'v', '2': 'v'},)), "
        "((nan, ['a', 'b'], Row(s='x', n=2)), ({'0': 'v'},))]"
    )
    assert len(state.map("m", "a")) == 2
