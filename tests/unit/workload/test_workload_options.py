"""The options of the source: each is understood, and each mistake names the option."""

import pytest

from anabranch.core.errors import SettingsError
from anabranch.workload import WorkloadSpec
from anabranch.workload.events import DEFAULT_SCHEDULE
from anabranch.workload.schedule import Schedule, StreamPace
from anabranch.workload.source import SourceOptions


def test_options_are_understood_whatever_their_case() -> None:
    options = SourceOptions.parse(
        {"ROWSPERSECOND": "2.5", "keys": "7", "Ids": "3", "skew": "1", "seed": "4", "payloadbytes": "6"}
        | {"disorderMs": "8", "rows": "100", "partitions": "5", "maxRowsPerEpoch": "50"}
    )
    assert options.spec == WorkloadSpec(keys=7, ids=3, skew=1.0, seed=4, payload_bytes=6, disorder_ms=8)
    assert options.pace == StreamPace(rows_per_second=2.5, rows=100)
    assert (options.partitions, options.max_rows_per_epoch) == (5, 50)
    assert options.columns[0] == "id"
    assert options.columns[-2:] == ("payload", "ingestion_time")


def test_without_options_it_is_a_row_a_second() -> None:
    options = SourceOptions.parse({})
    assert options.pace == StreamPace(rows_per_second=1.0)
    assert options.spec == WorkloadSpec()
    assert options.partitions == 2


def test_columns_are_taken_in_the_order_given() -> None:
    assert SourceOptions.parse({"columns": " server_name, id,ingestion_time"}).columns == (
        "server_name",
        "id",
        "ingestion_time",
    )


def test_event_times_follow_arrivals_unless_they_have_a_pace_of_their_own() -> None:
    arrivals = Schedule(0, 99, 5.0)
    assert SourceOptions.parse({"rowsPerSecond": "5"}).spec_for(arrivals).schedule == arrivals
    assert SourceOptions.parse({"rowsPerEpoch": "5"}).spec_for(arrivals).schedule == DEFAULT_SCHEDULE
    own = SourceOptions.parse({"rowsPerSecond": "5", "eventsPerSecond": "20"}).spec_for(arrivals).schedule
    assert own == Schedule(0, DEFAULT_SCHEDULE.origin_us, 20.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rowPerSecond": "5"}, "rowpersecond .* unknown. Did you mean rowsPerSecond"),
        ({"path": "x"}, "path .* unknown"),
        ({"rowsPerSecond": "0"}, "rowsPerSecond is 0. Give a number above 0"),
        ({"rowsPerSecond": "fast"}, "rowsPerSecond is 'fast'. Give a number"),
        ({"rowsPerSecond": "nan"}, "rowsPerSecond is 'nan'. Give a number"),
        ({"rowsPerSecond": "inf"}, "rowsPerSecond is 'inf'. Give a number"),
        ({"rowsPerEpoch": "0"}, "rowsPerEpoch is 0. Give a number between 1"),
        ({"rowsPerEpoch": "1.5"}, "rowsPerEpoch is '1.5'. Give a whole number"),
        ({"rowsPerEpoch": "5", "rowsPerSecond": "5"}, "rowsPerSecond and rowsPerEpoch exclude each other"),
        ({"rowsPerEpoch": "5", "maxRowsPerEpoch": "5"}, "maxRowsPerEpoch .* rowsPerEpoch is given"),
        ({"maxRowsPerEpoch": "-1"}, "maxRowsPerEpoch is -1"),
        ({"rows": "-1"}, "rows is -1"),
        ({"partitions": "0"}, "partitions is 0"),
        ({"keys": "0"}, "keys is 0"),
        ({"keys": "many"}, "keys is 'many'"),
        ({"ids": "0"}, "ids is 0"),
        ({"skew": "-1"}, "The option skew is -1.0"),
        ({"seed": "-1"}, "seed is -1"),
        ({"payloadBytes": "-1"}, "payloadBytes is -1"),
        ({"disorderMs": "x"}, "disorderMs is 'x'"),
        ({"eventsPerSecond": "-2"}, "eventsPerSecond is -2"),
        ({"columns": "id,servername"}, "option columns asks for 'servername'.*Did you mean 'server_name'"),
        ({"columns": "payload"}, "option columns asks for payload"),
        ({"columns": ","}, "option columns names no column"),
    ],
)
def test_a_mistake_names_the_option(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SourceOptions.parse(given)
