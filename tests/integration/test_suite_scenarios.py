"""What Spark's suites of stateful operators expect, played through the test kit: the same rows in the same epochs."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from anabranch.testing import StreamTest
from support.suite_scenarios import (
    SCHEMA,
    Alarm,
    Expiring,
    Latest,
    RunningCount,
    Scenario,
    counted_states,
    distinct_in_windows,
    first_for_a_while,
    first_of_key,
    first_of_key_and_time,
    joined,
    joined_in_windows,
    latest_states,
    processed,
    sessions,
    together,
    windows,
    windows_of_windows,
)

#: What moves the watermark, and where it is after each epoch: 5, 15, 15, 35, 35.
PACE = [15, 25, 25, 45, 45]


def of_times(*times: int) -> list[tuple[int, str, int]]:
    return [(time, "a", 1) for time in times]


APPENDED = {
    # A window goes out once, when the watermark reaches its end; what comes for it then is late.
    "windows": Scenario(
        windows,
        [(of_times(10, 11, 12, 13, 14, 15), []), (of_times(25), ["10 5"]), (of_times(10, 25), []),
         ([], ["15 1", "25 2"]), (of_times(29), [])],
    ),
    # The small windows that end in an epoch count in the large ones of the same epoch.
    "windows of windows": Scenario(
        windows_of_windows,
        [(of_times(10, 11, 12, 13, 14, 15), []), (of_times(25), []), (of_times(25), []), ([], ["10 6", "20 2"]),
         ([], [])],
    ),
    # Rows bring sessions together; one that is late does not, though it would belong to a session that is there.
    "sessions": Scenario(
        sessions,
        [([(10, "hello", 1), (12, "hello", 1), (11, "world", 1)], []), ([(16, "hello", 1)], []),
         ([(9, "hello", 1), (17, "world", 1)], []), ([], ["hello 10 21 3", "world 11 16 1", "world 17 22 1"]),
         ([], [])],
    ),
    # Without a time in the key it is remembered for ever; late rows are dropped all the same.
    "first of key": Scenario(
        first_of_key,
        [([(11, "a", 1), (11, "a", 1), (15, "b", 1)], ["a 11", "b 15"]), ([(20, "a", 1)], []),
         ([(16, "c", 1)], ["c 16"]), ([(20, "b", 1), (10, "d", 1)], []), ([(45, "a", 1)], [])],
    ),
    "first of key and time": Scenario(
        first_of_key_and_time,
        [([(15, "a", 1), (15, "a", 1), (12, "a", 1)], ["a 15", "a 12"]), ([(15, "a", 1)], []),
         ([(15, "a", 1), (16, "a", 1)], ["a 16"]), ([(16, "a", 1)], []), ([(36, "a", 1), (35, "a", 1)], ["a 36"])],
    ),
    # A key is forgotten when the watermark is ten seconds after its first row, and not before.
    "first for a while": Scenario(
        first_for_a_while,
        [([(12, "a", 1), (15, "b", 1)], ["a 12", "b 15"]), ([(18, "a", 1)], []), ([(24, "a", 1)], []),
         ([(40, "b", 1), (44, "c", 1)], ["c 44"]), ([(45, "a", 1), (45, "c", 1)], ["a 45"])],
    ),
    "distinct in windows": Scenario(
        distinct_in_windows,
        [([(10, "a", 1), (10, "a", 1), (10, "b", 1), (11, "a", 1)], []), ([(10, "b", 1)], ["10 3"]),
         ([(10, "c", 1)], []), ([], []), ([], [])],
    ),
    # A timer fires when the watermark is at its time, a time-out when it is after it.
    "timers": Scenario(
        processed(Latest(), "eventTime"),
        [([(11, "a", 1), (15, "a", 1), (13, "a", 1), (10, "c", 1)], ["a 15", "c 10"]),
         ([(5, "b", 1), (25, "b", 1)], ["b 25", "c -1"]), ([(15, "a", 1), (16, "a", 1)], ["a 16"]),
         ([], ["a -1", "b -1"]), ([], [])],
    ),
    "time-outs": Scenario(
        latest_states,
        [([(11, "a", 1), (15, "a", 1), (10, "c", 1)], ["a 15", "c 10"]), ([(25, "b", 1)], ["b 25"]),
         ([(15, "a", 1)], []), ([], ["a -1", "b -1", "c -1"]), ([], [])],
    ),
}  # fmt: skip

JOINED = {
    # Each pair once, whichever side comes first, and rows that are there twice in two pairs.
    "inner join": Scenario(
        joined("inner"),
        [([(10, "a", 0), (10, "b", 0), (12, "a", 1), (16, "a", 1)], ["a 10 12"]), ([(14, "b", 1)], ["b 10 14"]),
         ([(16, "a", 0), (16, "a", 1)], ["a 16 16", "a 16 16"]), ([], []), ([(45, "a", 0), (16, "a", 1)], [])],
    ),
    # A row goes out without a partner when none can come any more.
    "full outer join": Scenario(
        joined("full_outer"),
        [([(10, "a", 0), (11, "b", 0), (12, "a", 1), (13, "c", 1)], ["a 10 12"]), ([], ["- - 13"]), ([], []),
         ([], ["b 11 -"]), ([], [])],
    ),
    "left semi join": Scenario(
        joined("left_semi"),
        [([(10, "a", 0), (11, "b", 0), (12, "a", 1), (13, "a", 1)], ["a 10"]), ([(14, "a", 1)], []),
         ([(16, "b", 1)], ["b 11"]), ([], []), ([], [])],
    ),
    "join in windows": Scenario(
        joined_in_windows,
        [([(10, "a", 0), (10, "b", 0), (12, "a", 1)], []), ([(14, "b", 1)], []), ([], []), ([], ["10 2"]), ([], [])],
    ),
}  # fmt: skip

#: The clock goes on by 40 s after the second epoch.
UPDATED = {
    "running count": Scenario(
        processed(RunningCount(), "none"),
        [([(15, "a", 1)], ["a 1"]), ([(15, "a", 1), (15, "b", 1)], ["a 2", "b 1"]),
         ([(25, "a", 1), (25, "b", 1), (25, "c", 1)], ["b 2", "c 1"])],
    ),
    "alarm": Scenario(
        processed(Alarm(), "processingTime"),
        [([(15, "a", 1)], ["a 1"]), ([(15, "a", 1), (15, "b", 1)], ["a 1", "b 1"]), ([(15, "a", 1)], ["a 1"])],
    ),
    "expiring": Scenario(
        processed(Expiring(), "processingTime", "string"),
        [([(15, "a", 1)], ["a 0/0/0"]), ([(15, "b", 2), (15, "b", 3)], ["b 0/0/0"]),
         ([(15, "a", 4), (15, "b", -1)], ["a 1/1/1", "b 1/2/2"])],
    ),
    "counted": Scenario(
        counted_states,
        [([(15, "a", 1)], ["a 1"]), ([(15, "a", 1), (15, "b", 1)], ["a 2", "b 1"]), ([(15, "a", 1)], ["a 1"])],
    ),
}  # fmt: skip

#: By itself: applyInPandasWithState in update mode is for queries without aggregations.
UPDATED_WINDOWS = {
    "windows": Scenario(
        windows,
        [(of_times(10, 11, 12, 13, 14, 15), ["10 5", "15 1"]), (of_times(25), ["25 1"]),
         (of_times(10, 15, 25), ["15 2", "25 2"])],
    ),
}  # fmt: skip


def epochs_of(scenarios: dict[str, Scenario]) -> list[tuple[list[Any], dict[str, list[str]]]]:
    """What goes in and comes out of each epoch of all of them."""
    length = max(len(scenario.epochs) for scenario in scenarios.values())
    assert all(len(scenario.epochs) == length for scenario in scenarios.values())
    epochs = []
    for number, pace in enumerate(PACE[:length]):
        rows: list[Any] = [("pace", pace, "", 0)]
        expected = {}
        for name, scenario in scenarios.items():
            sent, told = scenario.epochs[number]
            rows += [(name, *row) for row in sent]
            if told:
                expected[name] = sorted(told)
        epochs.append((rows, expected))
    return epochs


def by_scenario(rows: list[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for scenario, row in sorted(rows):
        found.setdefault(scenario, []).append(row)
    return found


# In two queries: with every stage that reads the input, all of them take longer.
@pytest.mark.parametrize("scenarios", [APPENDED, JOINED], ids=["appended", "joined"])
def test_rows_that_are_final_go_out_once(spark: SparkSession, scenarios: dict[str, Scenario]) -> None:
    def build(rows: Any) -> Any:
        return together(scenarios, rows)

    with StreamTest(spark, SCHEMA, build, outputMode="append", workers=1, parallelism=1) as test:
        for number, (rows, expected) in enumerate(epochs_of(scenarios)):
            assert (number, by_scenario(test.send(rows))) == (number, expected)


def test_keys_that_change_go_out_each_time(spark: SparkSession) -> None:
    def build(rows: Any) -> Any:
        return together(UPDATED, rows)

    first, second, third = epochs_of(UPDATED)
    with StreamTest(spark, SCHEMA, build, workers=1, parallelism=1) as test:
        assert by_scenario(test.send(first[0])) == first[1]
        assert by_scenario(test.send(second[0])) == second[1]
        assert by_scenario(test.advance_clock(40)) == {"alarm": ["a -1", "b -1"], "counted": ["a -1", "b -1"]}
        assert by_scenario(test.send(third[0])) == third[1]
        # Each value lives for its own minute: what came after 40 s is there still.
        assert by_scenario(test.advance_clock(25)) == {"alarm": ["a -1"], "counted": ["a -1"]}
        late = [("expiring", 15, "a", -1), ("expiring", 15, "b", -1)]
        assert by_scenario(test.send(late)) == {"expiring": ["a 1/1/1", "b 0/0/0"]}


def test_windows_that_change_go_out_each_time(spark: SparkSession) -> None:
    def build(rows: Any) -> Any:
        return together(UPDATED_WINDOWS, rows)

    with StreamTest(spark, SCHEMA, build, workers=1, parallelism=1) as test:
        for number, (rows, expected) in enumerate(epochs_of(UPDATED_WINDOWS)):
            assert (number, by_scenario(test.send(rows))) == (number, expected)


def test_a_complete_result_takes_late_rows_as_well(spark: SparkSession) -> None:
    def build(rows: Any) -> Any:
        return together({"windows": Scenario(windows, [])}, rows)

    with StreamTest(spark, SCHEMA, build, outputMode="complete", workers=1, parallelism=1) as test:
        outputs = [
            sorted(row.row for row in test.send([("windows", time, "a", 1) for time in times]))
            for times in ([10, 11, 12, 13, 14], [25], [10, 25])
        ]
    assert outputs == [["10 5"], ["10 5", "25 1"], ["10 6", "25 2"]]
